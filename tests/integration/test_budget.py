"""A meter that knows nothing of plans never reads more than the budget.

On CPU the meter counts everything that is allocated through torch on this thread while it is on,
Dynamo and ``generate`` included. Two things are host memory by design and are kept out of its sight
in the open: masters, which are the parameters themselves and exist before; and the host pool, which
is made before. While the costs of ops are measured the meter is blind, because torch has one
profiler; what the measurement takes is added to what was live then (``Scratch``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution import measure
from ds_finepage.execution.arena import HostPool
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime import device_memory
from ds_finepage.runtime.handle import Handle
from tests.integration.families import logits, make_model, token_ids, tokens

CPU = torch.device("cpu")
CELLS = (("short", "min"), ("long", "min"), ("long", "50%"), ("default caches", "min"))
"""Every work under the least budget; the one that needs the most under one that some of it fits."""
POOL_BYTES = 16 << 20
FIRST_BUDGET_BYTES = 8 << 20  # enough for everything here; an arena takes all that it may


def short_prompts(model: Any) -> None:
    logits(model, token_ids(5))
    tokens(model, token_ids(8), 6)
    tokens(model, token_ids(12, batch=3), 6)


def long_prompts(model: Any) -> None:
    logits(model, token_ids(100, batch=3))
    tokens(model, token_ids(100), 4)
    logits(model, token_ids(5))


def default_caches(model: Any) -> None:
    tokens(model, token_ids(8), 12, cache=None)
    tokens(model, token_ids(50, batch=3), 16, cache=None)
    tokens(model, token_ids(9), 4, cache=None)


WORK = {"short": short_prompts, "long": long_prompts, "default caches": default_caches}


@dataclass
class Reading:
    """What the meter read around some work, and what measuring ops took it to meanwhile."""

    budget_bytes: int
    arena_bytes: int
    peak_bytes: int
    scratch_peak_bytes: int


class Scratch:
    """Adds up what was live before ops were measured and what measuring them takes."""

    def __init__(self, meter: DeviceMeter) -> None:
        self.peak_bytes = 0
        self._meter, self._try = meter, measure._try

    def attempt(self, *args: Any) -> Any:
        """Try an op as ``measure._try`` does, once more under a meter of all that it takes."""
        blind = SimpleNamespace(peak_bytes=0)
        with DeviceMeter(CPU) as whole, pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "DeviceMeter", lambda _: nullcontext(blind))
            self._try(*args)
        self.peak_bytes = max(self.peak_bytes, self._meter.live_bytes + whole.peak_bytes)
        return self._try(*args)


@contextmanager
def metered() -> Iterator[tuple[DeviceMeter, Scratch]]:
    """Meter a stretch of work, with a host pool that is there before."""
    pool = HostPool(pinned=False)
    pool.reserve(POOL_BYTES)
    meter = DeviceMeter(CPU)
    scratch = Scratch(meter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "HostPool", lambda pinned: pool)
        patch.setattr(measure, "_try", scratch.attempt)
        with meter:
            yield meter, scratch
    assert pool.bytes.numel() == POOL_BYTES


@dataclass
class Attached:
    model: Any
    handle: Handle
    first: Reading  # everything from attach on, Dynamo included
    least: dict[str, int]
    needed: dict[str, int]
    readings: list[Reading] = field(default_factory=list)

    def forget(self) -> None:
        """Make all captures be made, and all ops be measured, once more."""
        self.model._previous_max_cache_length = -1  # what transformers remembers of the longest
        self.handle._runner.forget()
        self.handle._runner.table.maker.meter = OpMeter(CPU)

    def budget_bytes(self, work: str, share: str) -> int:
        if share == "min":
            return self.least[work]
        return self.needed[work] * int(share.rstrip("%")) // 100


@pytest.fixture(scope="module")
def attached() -> Iterator[Attached]:
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    least, needed = {}, {}
    with metered() as (meter, scratch):
        handle = attach(model, device_budget=FIRST_BUDGET_BYTES, device="cpu")
        for name, work in WORK.items():
            before = len(handle.stats.passes)
            work(model)
            passes = handle.stats.passes[before:]
            least[name] = max((p.min_budget_bytes for p in passes), default=0)
            needed[name] = max((p.needed_budget_bytes for p in passes), default=0)
    arena = max(p.arena_bytes for p in handle.stats.passes)
    first = Reading(FIRST_BUDGET_BYTES, arena, meter.peak_bytes, scratch.peak_bytes)
    yield Attached(model, handle, first, least, needed)
    handle.detach()
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


def test_attaching_and_compiling_take_no_more_than_the_budget(attached: Attached) -> None:
    first = attached.first
    attached.readings.append(first)
    assert first.arena_bytes < first.peak_bytes <= first.budget_bytes


@pytest.mark.parametrize(("work", "share"), CELLS)
def test_the_meter_never_reads_more_than_the_budget(
    attached: Attached, work: str, share: str
) -> None:
    budget = attached.budget_bytes(work, share)
    attached.forget()
    attached.handle.replan(budget_bytes=budget)
    with metered() as (meter, scratch):
        try:
            WORK[work](attached.model)
        except PlanInfeasibleError as error:
            assert budget < attached.least[work]
            assert f"device_budget is {budget} bytes" in str(error)
            return
        finally:  # nothing runs in less than it is said to need
            ran = [p for p in attached.handle.stats.passes if p.num_runs]
            assert all(p.min_budget_bytes <= budget for p in ran)
    arena = max(p.arena_bytes for p in attached.handle.stats.passes)
    reading = Reading(budget, arena, meter.peak_bytes, scratch.peak_bytes)
    assert reading.arena_bytes < reading.peak_bytes <= reading.budget_bytes
    attached.readings.append(reading)


def test_measuring_ops_takes_no_more_than_the_budget(attached: Attached) -> None:
    assert attached.readings
    for reading in attached.readings:
        assert 0 < reading.scratch_peak_bytes <= reading.budget_bytes


@pytest.mark.parametrize("split", [False, True])
def test_a_refusal_ends_when_what_was_held_is_let_go(split: bool) -> None:
    torch._dynamo.reset()
    model = make_model("llama", vocab_size=2000)
    calls = [token_ids(n) for n in (64, 20, 64, 20)]
    plain = [logits(model, ids) for ids in calls]
    handle = attach(model, device_budget="64MiB", device="cpu", split=split)
    for ids in calls:
        logits(model, ids)
    tight = handle.stats.min_budget_bytes + 100_000
    handle.replan(budget_bytes=tight)
    held = []
    with pytest.raises(PlanInfeasibleError, match="results of earlier calls that are still alive"):
        for ids in calls:
            held.append(logits(model, ids))
    held.clear()
    for ids, expected in zip(calls, plain, strict=True):
        torch.testing.assert_close(logits(model, ids), expected)
