"""The n-th allocation, copy or kernel fails: a clear error, a right next call, and no leak."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.accelerator.failures import CLEAR, growing_cache, load_and_first_pass


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # the scenarios collect often, and each time goes over all that is there


FAILURES = [
    (load_and_first_pass, "alloc", (2, 9, 14, 20, 31)),
    (load_and_first_pass, "h2d", (3, 8)),
    (load_and_first_pass, "d2h", (2, 9)),
    (load_and_first_pass, "kernel", (5, 300, 330)),
    (growing_cache, "alloc", (3, 31, 60, 91, 115, 138)),
    (growing_cache, "h2d", (5, 20, 41, 60)),
    (growing_cache, "d2h", (1, 7, 15)),
    (growing_cache, "kernel", (10, 100, 210, 333)),
]


@pytest.mark.parametrize(("scenario", "kind", "which"), FAILURES)
def test_a_failure_leaves_nothing_behind(
    device: torch.device, card: Any, scenario: Any, kind: str, which: tuple[int, ...]
) -> None:
    found = scenario(device, kind, which)
    assert found.faults == []
    assert found.raised
    assert scenario is load_and_first_pass or found.raised == list(which)


def test_a_clear_error_is_no_error_of_the_program() -> None:
    assert not any(issubclass(RuntimeError, kind) for kind in CLEAR)
