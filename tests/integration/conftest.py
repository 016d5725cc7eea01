"""Keeps what one file does to torch away from the next, and the collector off what is old."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integration.detaching import detached
from tests.integration.engines import one_process_deepspeed

__all__ = ["detached"]

LINEAR = torch.nn.functional.linear


@pytest.fixture(scope="module", autouse=True)
def _plain_linear() -> Iterator[None]:
    """Take DeepSpeed's own function out again, which ``zero.Init`` leaves in place."""
    yield
    torch.nn.functional.linear = LINEAR


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """Take what is there by now out of later collections; it is large, and each goes over it."""
    torch.set_num_threads(1)  # for fixtures of a whole module, too
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    """DeepSpeed with one process on the CPU, whatever else this machine has."""
    with one_process_deepspeed() as found:
        yield found


@pytest.fixture
def fresh() -> None:
    """Take away what Dynamo has compiled for earlier tests."""
    torch._dynamo.reset()


@pytest.fixture
def nothing_persisted(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin anew: ZeRO counts over all models of a process, and would stop at one's threshold."""
    from deepspeed.runtime.zero.partition_parameters import Init

    monkeypatch.setattr(Init, "num_persisted_elements", 0)
