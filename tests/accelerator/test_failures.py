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


@pytest.mark.parametrize(
    ("kind", "which"),
    [("alloc", (2, 9, 14, 20, 31)), ("h2d", (3, 8)), ("d2h", (2, 9)), ("kernel", (5, 300, 330))],
)
def test_a_failure_of_load_or_first_pass_leaves_nothing_behind(
    device: torch.device, card: Any, kind: str, which: tuple[int, ...]
) -> None:
    found = load_and_first_pass(device, kind, which)
    assert found.faults == []
    assert not found.beyond and found.raised


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("alloc", (3, 31, 60, 91, 115, 138)),
        ("h2d", (5, 20, 41, 60)),
        ("d2h", (1, 7, 15)),
        ("kernel", (10, 100, 210, 333)),
    ],
)
def test_a_failure_of_a_growing_cache_leaves_nothing_behind(
    device: torch.device, card: Any, kind: str, which: tuple[int, ...]
) -> None:
    found = growing_cache(device, kind, which)
    assert found.faults == []
    assert found.raised == list(which)


def test_a_clear_error_is_no_error_of_the_program() -> None:
    assert not any(issubclass(RuntimeError, kind) for kind in CLEAR)
