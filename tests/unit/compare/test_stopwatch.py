"""Every call of the model is timed, from outside of all hooks, and its bytes are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.compare import stopwatch
from ds_finepage.compare.engine import Engine
from ds_finepage.compare.stopwatch import Forward, a_token, median_ns, timed_forwards


class Part(torch.nn.Module):
    """Calls another module of the same class, which is not the model."""

    def __init__(self, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: int) -> int:
        return x + 1 if self.inner is None else int(self.inner(x))


class Counting(Engine):
    """Copies as many bytes as its hooks say, and one for two of them back."""

    def copied(self) -> tuple[int, int]:
        return self.fetched_bytes, self.fetched_bytes // 2


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Counting:
    model = Part(Part())
    made = Counting(model, torch.device("cpu"))
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr(stopwatch.time, "perf_counter_ns", lambda: next(ticks))

    def hook(*args: Any) -> None:
        made.fetched_bytes += 6
        next(ticks)  # it takes time

    model.register_forward_pre_hook(hook)
    return made


def test_calls_of_the_model_are_timed_with_their_hooks(engine: Counting) -> None:
    before = Part.__call__
    with timed_forwards(engine) as forwards:
        assert engine.model(1) == 2
        assert engine.model(2) == 3
        engine.model.inner(3)
    engine.model(4)
    assert forwards == [Forward(wall_ns=20, h2d_bytes=6, d2h_bytes=3)] * 2
    assert Part.__call__ is before and "__call__" not in vars(Part)


def test_an_error_of_the_model_leaves_no_watch(engine: Counting) -> None:
    with pytest.raises(TypeError), timed_forwards(engine):
        engine.model(None)
    assert "__call__" not in vars(Part)


def test_a_class_with_a_call_of_its_own_gets_it_back(engine: Counting) -> None:
    class Own(Part):
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)

    own = vars(Own)["__call__"]
    engine.model = Own()
    with timed_forwards(engine) as forwards:
        engine.model(1)
    assert len(forwards) == 1 and vars(Own)["__call__"] is own


def test_the_median_is_that_of_the_times() -> None:
    forwards = [Forward(wall_ns=n, h2d_bytes=0, d2h_bytes=0) for n in (9, 1, 4)]
    assert median_ns(forwards) == 4


def test_a_token_takes_its_share_of_all_passes_behind_the_prompt() -> None:
    forwards = [Forward(wall_ns=ns, h2d_bytes=ns + 1, d2h_bytes=2) for ns in (50, 10, 20)]
    # Draft steps take what is left of the time of the call.
    assert a_token(forwards, 130, 5) == Forward(wall_ns=20, h2d_bytes=8, d2h_bytes=1)
    assert a_token(forwards[:1], 50, 1) == Forward(wall_ns=0, h2d_bytes=0, d2h_bytes=0)
