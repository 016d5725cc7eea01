"""A meter that knows nothing of plans never reads more than the budget.

On CPU the meter counts everything that is allocated through torch on this thread while it is on,
Dynamo and ``generate`` included. Two things are host memory by design and are kept out of its sight
in the open: masters, which are the parameters themselves and exist before; and the host pool, which
is made before (``host_pool``). While the costs of ops are measured the meter is blind, because
torch has one profiler; what the measurement takes is then added to what was live (``scratch``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from ds_finepage import session
from ds_finepage.api import attach
from ds_finepage.execution import measure
from ds_finepage.execution.arena import HostPool
from ds_finepage.execution.meter import DeviceMeter, free_profiler
from ds_finepage.planning.policies import POLICIES
from ds_finepage.session import Handle
from tests.integration.families import logits, make_model, token_ids, tokens

CPU = torch.device("cpu")
SHARES = ("min", "25%", "50%", "100%")
POOL_BYTES = 16 << 20


def work(model: Any) -> None:
    """Call a model in the ways and lengths that the budget has to hold for."""
    logits(model, token_ids(5))
    logits(model, token_ids(100, batch=3))
    tokens(model, token_ids(8), 8)
    tokens(model, token_ids(60, batch=3), 12)
    logits(model, token_ids(5))
    tokens(model, token_ids(100), 4)


@pytest.fixture(scope="module", params=("llama", "gpt2", "mistral"))
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def sizes(family: str) -> Iterator[dict[str, int]]:
    """Budgets by name, learned from a handle with an ample one."""
    torch._dynamo.reset()
    handle = attach(model := make_model(family), device_budget="1GiB", device="cpu")
    work(model)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    handle.detach()
    yield {"min": least, "25%": needed // 4, "50%": needed // 2, "100%": needed}


@pytest.fixture
def host_pool(monkeypatch: pytest.MonkeyPatch) -> HostPool:
    """Host memory for offloads that is there before the meter is."""
    pool = HostPool(pinned=False)
    pool.reserve(POOL_BYTES)
    monkeypatch.setattr(session, "HostPool", lambda pinned: pool)
    return pool


class Scratch:
    """Adds up what was live before ops were measured and what measuring them took."""

    def __init__(self, meter: DeviceMeter) -> None:
        self.peak_bytes = 0
        seen = self

        class Profile(profile):
            def __exit__(self, *error: Any) -> None:
                super().__exit__(*error)
                live = meter.live_bytes
                for _, nbytes in measure.allocation_events(self):
                    live += nbytes
                    seen.peak_bytes = max(seen.peak_bytes, live)

        self.profile = Profile


@pytest.mark.parametrize("share", SHARES)
def test_the_meter_never_reads_more_than_the_budget(
    family: str,
    sizes: dict[str, int],
    share: str,
    host_pool: HostPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = max(sizes[share], sizes["min"])
    torch._dynamo.reset()
    model = make_model(family)
    meter = DeviceMeter(CPU)
    scratch = Scratch(meter)
    monkeypatch.setattr(measure, "profile", scratch.profile)
    with meter:
        handle = attach(model, device_budget=budget, device="cpu")
        work(model)
    arenas = [p.arena_bytes for p in handle.stats.passes]
    handle.detach()
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    assert host_pool.bytes.numel() == POOL_BYTES
    assert max(arenas) < meter.peak_bytes <= budget
    assert 0 < scratch.peak_bytes <= budget


@pytest.fixture(scope="module")
def attached(family: str) -> Iterator[tuple[Any, Handle]]:
    torch._dynamo.reset()
    handle = attach(model := make_model(family), device_budget="1GiB", device="cpu")
    logits(model, token_ids(7))
    yield model, handle
    handle.detach()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_with_an_ample_budget_the_second_forward_reloads_nothing(
    attached: tuple[Any, Handle], policy: str
) -> None:
    model, handle = attached
    handle.replan(budget_bytes=handle.stats.needed_budget_bytes, policy=policy)
    (only,) = handle.stats.passes
    logits(model, token_ids(7))
    assert only.last_reloaded_bytes == only.last_entry_reloaded_bytes == handle.stats.weight_bytes
    for _ in range(2):
        before = handle.stats.reloaded_bytes
        logits(model, token_ids(7))
        assert only.last_reloaded_bytes == handle.stats.reloaded_bytes - before == 0
        assert only.last_offloaded_bytes == 0


def test_the_meter_counts_blocks_from_allocation_to_release() -> None:
    with DeviceMeter(CPU) as meter:
        a = torch.empty(1000, dtype=torch.uint8)
        del a
        b = torch.empty(700, dtype=torch.uint8)
        b.untyped_storage().resize_(0)
        c = torch.empty(500, dtype=torch.uint8)
    assert (meter.peak_bytes, meter.live_bytes) == (1000, c.numel())


def test_blocks_that_were_there_before_the_meter_do_not_count_when_released() -> None:
    with DeviceMeter(CPU):  # torch remembers the addresses of whatever any profiler saw
        blocks = [torch.empty(7777, dtype=torch.uint8) for _ in range(20)]
    with DeviceMeter(CPU) as meter:
        del blocks
        a = torch.empty(500, dtype=torch.uint8)
    assert (meter.peak_bytes, meter.live_bytes) == (500, a.numel())


def test_the_meter_makes_way_for_another_profiler_and_goes_on() -> None:
    with DeviceMeter(CPU) as meter:
        a = torch.empty(1000, dtype=torch.uint8)
        with free_profiler(), profile(use_kineto=False, profile_memory=True) as other:
            torch.empty(50, dtype=torch.uint8)
        assert meter.live_bytes == 1000
        del a
        b = torch.empty(500, dtype=torch.uint8)
    assert [n for _, n in measure.allocation_events(other)] == [50, -50]
    assert (meter.peak_bytes, meter.live_bytes) == (1000, b.numel())


def test_meters_are_not_nested() -> None:
    with DeviceMeter(CPU):
        with pytest.raises(RuntimeError, match="end that one first"):
            with DeviceMeter(CPU):
                pass
