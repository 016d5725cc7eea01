"""Changes on which Dynamo has no guard: a kept trace from before them serves no call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as of_all

from ds_finepage._compat.traces import CAN_KEEP_TRACES

if not CAN_KEEP_TRACES:
    pytest.skip("traces are kept in other releases of torch", allow_module_level=True)

from tests.integration.test_kept_traces import cache, files, num_traced, planned, source

__all__ = ["cache", "source"]  # fixtures


def doubled(module: torch.nn.Module, _: Any, result: torch.Tensor) -> torch.Tensor | None:
    return result * 2 if type(module).__name__ == "Inner" else None


def test_with_hooks_around_all_modules_no_trace_serves_and_none_is_kept(
    source: Any, cache: Path
) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    kept = files(cache)
    hook = of_all.register_module_forward_hook(doubled)
    try:
        assert num_traced(run) and num_traced(run)
    finally:
        hook.remove()
    assert files(cache) == kept
    assert num_traced(run) == 0


def test_another_method_of_a_class_is_noticed_in_the_same_process(source: Any) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert (num_traced(run), num_traced(run)) == (1, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.Inner, "forward", lambda self, x: x @ self.weight - self.factor)
        assert num_traced(run) == 1
    assert num_traced(run) == 0
