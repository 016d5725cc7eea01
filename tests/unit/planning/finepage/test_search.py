"""The cyclic policy: what it keeps, what it streams, and that both come round again."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.finepage import best_plans
from ds_finepage.planning.finepage import search as finepage_search
from ds_finepage.planning.finepage.best_plans import BestPlans
from ds_finepage.planning.finepage.forecast import Forecast
from ds_finepage.planning.finepage.ring import place_activations, write_plan
from ds_finepage.planning.finepage.search import _offer, plan_finepage
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.finepage.streaming import streaming_plans
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes, needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.simulator import simulate
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.sketches import chain, names, sketch

UNIT = 64
ROOT = Path(__file__).resolve().parents[4]


def planned(graph: TaskGraph, units: int, profile: HardwareProfile | None = None) -> MemGraph:
    return check(
        plan_finepage(Problem(graph, arena_bytes=units * UNIT, alignment=UNIT, profile=profile))
    )


def machine(*, h2d: float) -> HardwareProfile:
    """A machine that takes 100 ns a task."""
    return HardwareProfile(
        name="made up",
        source="test",
        capacity_bytes=2**30,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=h2d,
        memory_bytes_per_s=1e12,
        flops_per_s={"default": 1e12},
        launch_ns=100,
    )


def kept(memgraph: MemGraph) -> list[str]:
    return [memgraph.graph.buffers[r.buffer].name for r in memgraph.entry]


def reloaded(memgraph: MemGraph) -> list[str]:
    return [n.split()[1] for n in names(memgraph) if n.startswith("reload")]


MIXED = sketch(
    "w1:64 w2:640 w3:128 w4:64 w5:300 a1:64 a2:128 s:999",
    *("w1 s -> a1 s", "a1 w2 -> a2", "w3 a2 -> a2", "w4 a1 a2 -> a2", "w5 a2 ->", "w1 ->"),
)


@pytest.mark.parametrize("graph", [chain(9), MIXED], ids=["chain", "mixed"])
def test_what_a_pass_leaves_is_what_the_next_one_finds(graph: TaskGraph) -> None:
    least = min_arena_bytes(graph, UNIT) // UNIT
    for units in range(least, ample_arena_bytes(graph, UNIT) // UNIT + 2):
        memgraph = planned(graph, units)
        assert set(memgraph.exit) == set(memgraph.entry)


def test_the_last_bytes_of_an_unaligned_arena_are_left_alone() -> None:
    graph = chain(3)
    memgraph = check(plan_finepage(Problem(graph, arena_bytes=4 * UNIT + 13, alignment=UNIT)))
    assert memgraph.reloaded_bytes == 0
    assert memgraph.peak_bytes == 4 * UNIT


def test_weights_are_kept_for_the_whole_pass() -> None:
    memgraph = planned(chain(9), 6)
    assert kept(memgraph)
    assert not set(kept(memgraph)) & set(reloaded(memgraph))
    assert sorted(kept(memgraph) + reloaded(memgraph)) == [f"w{i}" for i in range(9)]


@pytest.mark.parametrize("units", [6, 10, 14, 18, 24, 30])
def test_kept_weights_are_spread_evenly(units: int) -> None:
    """Among any first n weights there are as many kept ones as their share, give or take one."""
    memgraph = planned(chain(32), units)
    order = [int(name[1:]) for name in kept(memgraph)]
    for first in range(33):
        assert abs(sum(i < first for i in order) - first * len(order) / 32) <= 1


@pytest.mark.parametrize("units", range(2, 34))
def test_reloaded_bytes_are_close_to_the_bound(units: int) -> None:
    """Equal weights cannot be divided: within two of the bound, wherever the arena ends."""
    graph = chain(32)
    least = lower_bound_bytes(graph, units * UNIT, UNIT)
    assert least <= planned(graph, units).reloaded_bytes <= least + 2 * UNIT


def test_more_room_never_costs_bytes() -> None:
    moved = [planned(chain(16), units).reloaded_bytes for units in range(2, 19)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


def test_tied_weights_are_kept_and_resident_once() -> None:
    """An embedding that is the head too is needed at both ends: keeping it saves two reloads."""
    graph = sketch(
        "w0:64 w1:64 w2:64 w3:64 a:64",
        *("w0 -> a", "w1 a -> a", "w2 a -> a", "w3 a -> a", "w0 a ->"),
    )
    memgraph = planned(graph, 3)
    assert kept(memgraph) == ["w0"]
    assert reloaded(memgraph) == ["w1", "w2", "w3"]


def test_unused_weights_are_neither_kept_nor_reloaded() -> None:
    memgraph = planned(sketch("w1:64 w2:64", "w1 ->"), 8)
    assert (kept(memgraph), reloaded(memgraph)) == (["w1"], [])


def test_a_large_weight_does_not_make_the_streaming_region_large_for_all() -> None:
    """Streaming w0 takes ten units; keeping it leaves room to keep others as well."""
    graph = sketch(
        "w0:640 " + " ".join(f"w{i}:64" for i in range(1, 9)) + " a:64",
        "w0 -> a",
        *(f"w{i} a -> a" for i in range(1, 9)),
    )
    memgraph = planned(graph, 14)
    assert "w0" in kept(memgraph)
    assert memgraph.reloaded_bytes <= 6 * UNIT


def test_a_graph_without_weights_is_planned() -> None:
    memgraph = planned(sketch("a1:64 a2:64", "-> a1", "a1 -> a2", "a2 ->"), 2)
    assert memgraph.entry == () and memgraph.reloaded_bytes == 0


def test_a_graph_without_paged_buffers_is_planned() -> None:
    memgraph = planned(sketch("i:64 o:64", "i -> o"), 0)
    assert names(memgraph) == ["compute 0"]


def test_a_graph_without_tasks_is_planned() -> None:
    """A call that only makes views has none."""
    assert planned(sketch("i:64"), 0).nodes == ()


def test_with_a_profile_the_predicted_time_decides() -> None:
    graph, slow = chain(16), machine(h2d=1e9)
    timed, least = planned(graph, 10, slow), planned(graph, 10)
    assert simulate(timed, slow).total_ns <= simulate(least, slow).total_ns


def test_a_fast_link_hides_all_reloads() -> None:
    """One weight takes 64 ns to copy and 100 ns to use: only the first reload can show."""
    fast = machine(h2d=1e9)
    timeline = simulate(planned(chain(16), 10, fast), fast)
    assert timeline.stall_ns <= 64


def test_without_a_profile_the_bytes_decide() -> None:
    memgraph = planned(chain(16), 10)
    assert memgraph.reloaded_bytes == 8 * UNIT
    assert memgraph.reloaded_bytes <= min(
        planned(chain(16), 10, machine(h2d=h2d)).reloaded_bytes for h2d in (1e8, 1e9, 1e12)
    )


SCRIPT = """
import random
from ds_finepage.graph.codec import dumps, fingerprint
from ds_finepage.planning.rewrite.recompute import recompute
from tests.property.matmul_chains import matmul_chain
from tests.property.test_recompute_plans import layered
from tests.unit.planning.finepage.test_search import MIXED, Problem, machine, plan_finepage, planned
plans = [planned(MIXED, units, machine(h2d=1e9)) for units in (13, 16, 20)]
plans.append(plan_finepage(Problem(matmul_chain([256] * 12), 1 << 20, 64, split=True)))
graphs = [recompute(layered(random.Random(seed), 60), 64) for seed in range(5)]
print(fingerprint(MIXED), *map(dumps, plans + graphs))
"""


def test_plans_and_their_bytes_do_not_depend_on_the_hash_seed() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and found.pop().count('"kind":"memgraph"') == 4


# Which of several plans is taken.


def search(profile: HardwareProfile | None = None) -> BestPlans:
    return BestPlans(Problem(chain(16), ARENA, UNIT, profile))


def is_good(tried: BestPlans, plan: MemGraph) -> bool:
    tried.offer(plan)
    return tried.has_good


def search_among(*plans: MemGraph, profile: HardwareProfile | None = None) -> MemGraph:
    tried = search(profile)
    for plan in plans:
        tried.offer(plan)
    assert tried.best is not None
    return tried.best


ARENA = 20 * UNIT


@functools.cache
def tight_and_roomy() -> tuple[MemGraph, MemGraph]:
    """Plan one pass twice, to run in the same arena; the first plan reloads more."""
    return planned(chain(16), 4), planned(chain(16), 10)


def test_of_equally_fast_plans_the_one_with_fewer_bytes_is_taken() -> None:
    tight, roomy = tight_and_roomy()
    assert roomy.reloaded_bytes < tight.reloaded_bytes
    hidden = machine(h2d=1e15)
    more, less = simulate(tight, hidden).total_ns, simulate(roomy, hidden).total_ns
    assert less < more <= less * 101 // 100  # as good as equal
    for profile in (None, hidden):
        assert search_among(tight, roomy, profile=profile) is roomy
        assert search_among(roomy, tight, profile=profile) is roomy


def test_fewer_bytes_never_win_by_steps_that_add_up() -> None:
    tight, roomy = tight_and_roomy()
    tried = BestPlans(Problem(chain(16), ARENA, UNIT))
    tried._add(Forecast(1000, 50, lambda: tight), 0)
    tried._add(Forecast(1004, 40, lambda: roomy), 0)
    assert tried.best is roomy
    tried._add(Forecast(1008, 30, lambda: tight), 0)
    assert tried.best is roomy
    tried._add(Forecast(996, 60, lambda: roomy), 0)  # too fast for the second, not the first
    assert tried.best is tight


def test_a_plan_that_is_faster_by_more_than_a_percent_is_taken_whatever_it_moves() -> None:
    """Keeping the first weights for good moves less, and the link is late for the others."""
    graph, profile = chain(32), machine(h2d=4e8)
    weights = weights_by_first_use(graph)
    problem = Problem(graph, 19 * UNIT, UNIT)
    uneven = write_plan(
        problem,
        streamed=weights[16:],
        activations=place_activations(problem),
        ring_bytes=UNIT,
        residents={w: Extent((18 - i) * UNIT, UNIT) for i, w in enumerate(weights[:16])},
    )
    assert uneven is not None
    even = planned(graph, 16, profile)
    assert uneven.reloaded_bytes < even.reloaded_bytes
    assert simulate(even, profile).total_ns * 101 < simulate(uneven, profile).total_ns * 100
    assert search_among(even, uneven, profile=profile) is even
    assert search_among(uneven, even, profile=profile) is even


def test_a_plan_close_to_its_bound_ends_the_search() -> None:
    slow, (tight, _) = machine(h2d=1e6), tight_and_roomy()
    assert is_good(search(machine(h2d=1e15)), tight)  # it takes 1.008 times the bound
    late = planned(chain(3, nbytes=6400), 201)
    timeline = simulate(late, machine(h2d=64e9))
    assert timeline.total_ns > 1.02 * max(timeline.compute_ns, timeline.transfer_ns)
    assert not is_good(BestPlans(Problem(late.graph, 201 * UNIT, UNIT, machine(h2d=64e9))), late)
    assert not is_good(search(), tight)
    assert is_good(search(), planned(chain(16), 17))
    assert is_good(search(slow), planned(chain(16), 17))
    assert not is_good(search(slow), tight)  # the link is busy throughout, with too many bytes


def test_a_list_goes_on_until_no_plan_can_be_faster_or_move_clearly_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All these plans are good: the search would not look for another graph."""
    tight, roomy = tight_and_roomy()
    fast, problem = machine(h2d=1e15), Problem(chain(16), 10 * UNIT, UNIT, machine(h2d=1e15))
    tight_ns, roomy_ns = (simulate(plan, fast).total_ns for plan in (tight, roomy))
    bound_ns, bound_bytes = 16 * 100, lower_bound_bytes(problem.graph, 10 * UNIT, UNIT)
    assert bound_ns < min(tight_ns, roomy_ns) <= max(tight_ns, roomy_ns) < 1.02 * bound_ns
    assert roomy.reloaded_bytes <= 1.5 * bound_bytes < tight.reloaded_bytes

    def tried(equal_times: float = 1.02, few_bytes: float = 1.5) -> list[MemGraph | None]:
        """List the plans that the search takes from its candidates."""
        plans = iter([tight, roomy, None])
        monkeypatch.setattr(best_plans, "EQUAL_TIMES", equal_times)
        monkeypatch.setattr(best_plans, "FEW_BYTES", few_bytes)
        BestPlans(problem).offer_all(plans)
        return [tight, roomy, None][: 3 - len(list(plans))]

    assert tried() == [tight, roomy]  # the first moves too much
    assert tried(few_bytes=10) == [tight]
    assert tried(few_bytes=1) == [tight, roomy, None]
    assert tried(equal_times=1, few_bytes=10) == [tight, roomy, None]  # not as fast as the bound


def test_time_decides_and_bytes_decide_between_equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tight, roomy = tight_and_roomy()
    problem = Problem(chain(16), 10 * UNIT, UNIT, machine(h2d=1e9))
    assert 1.7 * roomy.reloaded_bytes < tight.reloaded_bytes

    def best(tight_ns: int, roomy_ns: int = 100_400) -> MemGraph | None:
        times = {tight.reloaded_bytes: tight_ns, roomy.reloaded_bytes: roomy_ns}
        monkeypatch.setattr(
            "ds_finepage.planning.problem.predicted_ns",
            lambda plan, _, **settings: times[plan.reloaded_bytes],
        )
        tried = BestPlans(problem)
        for plan in (tight, roomy):
            tried.offer(plan)
        return tried.best

    assert best(100_350) is roomy  # as fast
    assert best(99_901) is roomy
    assert best(99_899) is tight
    assert best(99_000) is tight  # however many bytes it moves
    assert best(100_450) is best(110_000) is roomy


def test_without_a_profile_the_first_good_plan_ends_a_list() -> None:
    _, roomy = tight_and_roomy()
    plans = iter([planned(chain(16), 17), roomy])
    search().offer_all(plans)
    assert next(plans) is roomy


def test_a_plan_is_good_for_the_tasks_of_the_pass_not_for_those_that_it_adds() -> None:
    fast, longer = machine(h2d=1e15), planned(chain(32), 33)
    timeline = simulate(longer, fast)
    assert timeline.total_ns == timeline.compute_ns
    assert not is_good(search(fast), longer)


def with_latency(latency_ns: int) -> HardwareProfile:
    """A machine on which a copy takes long to start."""
    return dataclasses.replace(machine(h2d=1e9), transfer_latency_ns=latency_ns)


@pytest.mark.parametrize("percent", (60, 75, 90, 95, 99))
def test_to_be_allowed_to_cut_never_costs_time(percent: int) -> None:
    graph, profile = gather_rows(matmul_chain([256] * 13, num_rows=4)), with_latency(50_000)
    arena_bytes = needed_arena_bytes(graph, UNIT) * percent // 100
    cut, whole = (
        simulate(check(plan_finepage(Problem(graph, arena_bytes, UNIT, profile, split))), profile)
        for split in (True, False)
    )
    assert cut.total_ns <= 1.005 * whole.total_ns


def test_plans_that_move_too_much_to_win_are_left_out() -> None:
    tight, roomy = tight_and_roomy()
    tried = search(dataclasses.replace(machine(h2d=1e6), transfer_latency_ns=1000))
    tried.offer_all([None])
    assert tried.best is None
    tried.offer(roomy)
    num_copies = sum(node.kind is NodeKind.RELOAD for node in roomy.nodes)
    assert tried.may_win(roomy.reloaded_bytes - 1, num_copies)
    assert not tried.may_win(roomy.reloaded_bytes, num_copies)  # neither fewer bytes nor less time
    assert not tried.may_win(roomy.reloaded_bytes, 10**6)
    assert not tried.may_win(2 * tight.reloaded_bytes, num_copies)
    assert search().may_win(10**12, 1)  # without a machine, nothing is known of time


@pytest.mark.parametrize(("h2d", "number"), [(1e6, 1), (1e15, 2)])
def test_a_plan_whose_bytes_alone_take_longer_is_not_simulated(
    h2d: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight, roomy = tight_and_roomy()
    simulated = []

    def predicted(plan: MemGraph, *_: object, **__: object) -> int:
        simulated.append(plan)
        return 1000 + len(simulated)

    monkeypatch.setattr("ds_finepage.planning.problem.predicted_ns", predicted)
    monkeypatch.setattr(best_plans, "wait_for_routes", lambda _: roomy)
    tried = search(machine(h2d=h2d))
    tried.offer(tight)
    assert simulated == [roomy, tight][:number]
    assert tried.best is roomy


def test_a_cyclic_plan_does_not_depend_on_what_is_resident_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(chain(8), 6 * UNIT, UNIT)
    entries = []

    def noted(tried: Problem, **others: Any) -> Any:
        entries.append(tried.entry)
        return streaming_plans(tried, **others)

    monkeypatch.setattr(finepage_search, "streaming_plans", noted)
    found = plan_finepage(problem)
    again = plan_finepage(dataclasses.replace(problem, entry=found.exit[:1]))
    assert again.entry == found.entry == again.exit
    assert entries and set(entries) == {()}


def test_cheap_tasks_run_again_where_no_plan_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(graph: TaskGraph, **_: float) -> TaskGraph:
        asked.append(graph)
        return graph

    monkeypatch.setattr(finepage_search, "recompute", noted)
    problem = Problem(chain(16), 10 * UNIT, UNIT, machine(h2d=1e6))
    for total_ns in (1, 10**9, 10**9):
        found = Forecast(total_ns, UNIT, lambda: planned(chain(16), 10))
        _offer(BestPlans(problem), problem, lambda *_, found=found: iter([found]))
    assert asked == 2 * [problem.graph]  # not for the good plan
