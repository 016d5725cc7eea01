"""How much the host computes: no choice of another share is clearly faster."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.attention import ATTENTION_FLOPS, HOST_ATTENTION
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.planning.bounds import lower_bound
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.host_lane import (
    _evenly,
    _rows_of_each,
    can_attend,
    can_multiply,
    with_host_lane,
)
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.rewrite.host_attention import with_host_attention
from ds_finepage.planning.rewrite.host_products import host_bytes, with_host_rows
from ds_finepage.planning.rewrite.split import Divisible, divisible_weights
from ds_finepage.planning.simulator import Costs, predicted_ns
from ds_finepage.planning.time_bound import end_times_ns, least_time_beside_host_ns, least_time_ns
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain, random_chain
from tests.property.test_forecasts import machine as any_machine
from tests.unit.graph.attended import Layers, attended
from tests.unit.planning.finepage.test_packed_weights import ROWS, WIDTH, layers
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.steady import plan_steady

UNIT = 64
GRAPH = gather_rows(matmul_chain([512] * 49))
WEIGHTS = can_multiply(GRAPH)


def with_host(link: float, host: float, **figures: float) -> HardwareProfile:
    figures = {"host_flops_per_s": 1e15, **figures}
    return dataclasses.replace(machine(h2d=link), host_bytes_per_s=host, **figures)  # type: ignore[arg-type]


def problem(
    profile: HardwareProfile, percent: int = 40, *, split: bool = True, graph: TaskGraph = GRAPH
) -> Problem:
    arena_bytes = needed_arena_bytes(graph, UNIT) * percent // 100
    return Problem(graph, arena_bytes, UNIT, profile, split)


def whole_ones(units: Sequence[Divisible], share: float) -> dict[int, int]:
    return {unit.buffer: unit.num_rows for unit in _evenly(units, share)}


def time_with(shares: dict[int, int], given: Problem, units: Sequence[Divisible] = WEIGHTS) -> int:
    plan = plan_finepage(given.of(with_host_rows(given.graph, units, shares)))
    assert given.profile is not None
    return predicted_ns(plan, given.profile)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("link", "host"), [(1e9, 1e9), (1e9, 4e9), (4e9, 1e9)])
def test_no_other_share_is_much_faster(link: float, host: float, split: bool) -> None:
    given = problem(with_host(link, host), split=split)
    (found,) = with_host_lane(given)
    assert given.profile is not None
    chosen_ns = predicted_ns(plan_finepage(given.of(found)), given.profile)
    choose = _rows_of_each if split else whole_ones
    others = [time_with(choose(WEIGHTS, share / 20), given) for share in range(0, 21, 2)]
    assert min(chosen_ns, others[0]) <= 1.06 * min(others)  # the planner takes the better one
    assert host < link or chosen_ns < 0.8 * others[0]


def test_a_slow_device_leaves_more_to_the_host() -> None:
    tasks = tuple(dataclasses.replace(task, time_ns=10**6) for task in GRAPH.tasks)
    graph = dataclasses.replace(GRAPH, tasks=tasks)
    profile = with_host(8e8, 4e9)
    given = problem(profile, 10, graph=graph)
    (found,) = with_host_lane(given)
    chosen_ns = predicted_ns(plan_finepage(given.of(found)), profile)
    others = [time_with(_rows_of_each(WEIGHTS, n / 10), given) for n in range(11)]
    assert chosen_ns <= 1.06 * min(others) < 0.8 * others[0]


@pytest.mark.parametrize("percent", [20, 50, 80])
@pytest.mark.parametrize("host", [1e9, 1e10])
def test_no_plan_is_faster_than_the_bound(host: float, percent: int) -> None:
    profile = with_host(2e9, host)
    given = problem(profile, percent)
    plan = plan_steady(GRAPH, arena_bytes=given.arena_bytes, policy="finepage", profile=profile,
                       alignment=UNIT, split=True)  # fmt: skip
    bound = lower_bound(GRAPH, given.arena_bytes, UNIT, may_cut=True)
    total_ns = predicted_ns(plan, profile)
    assert least_time_beside_host_ns(bound, profile) <= total_ns
    assert total_ns <= 1.15 * least_time_beside_host_ns(bound, profile)


def steps(num_layers: int = 24, *, num_live: int = 1000) -> TaskGraph:
    layers = Layers(num_live)
    for _ in range(num_layers):
        layers.attend()
        layers.multiply()
    return layers.graph()


STEPS = steps()


def attended_ns(given: Problem, num_layers: float) -> int:
    assert given.profile is not None
    units = can_attend(given.graph)
    graph = with_host_attention(given.graph, _evenly(units, num_layers / len(units)))
    return predicted_ns(plan_finepage(given.of(graph)), given.profile)


@pytest.mark.parametrize("percent", [15, 40, 70])
@pytest.mark.parametrize(("link", "host"), [(1e8, 1e8), (1e8, 4e8), (4e8, 1e8)])
def test_no_other_number_of_layers_is_much_faster(link: float, host: float, percent: int) -> None:
    given = problem(profile := with_host(link, host), percent, graph=STEPS)
    plan = plan_steady(STEPS, arena_bytes=given.arena_bytes, policy="finepage", profile=profile,
                       alignment=UNIT, split=True)  # fmt: skip
    chosen_ns = predicted_ns(plan, profile)
    others = [attended_ns(given, num) for num in range(25)]
    assert chosen_ns <= 1.2 * min(others)
    assert host < link or chosen_ns < 0.7 * others[0]
    bound = lower_bound(STEPS, given.arena_bytes, UNIT, may_cut=True)
    assert least_time_beside_host_ns(bound, profile) <= chosen_ns


def test_the_host_attends_and_multiplies() -> None:
    profile = with_host(1e6, 1e8)
    ways = list(with_host_lane(problem(profile, 10, graph=steps(8, num_live=30))))
    ops = [{graph.tasks[t].op for t in graph.host_tasks} for graph in ways]
    assert ops == [{"aten.mm.default", HOST_ATTENTION}] * 2
    (alone,) = with_host_lane(problem(profile, 10, graph=attended(8)))
    assert len(alone.host_tasks) == 8


def test_it_attends_to_nothing_where_all_rows_fit() -> None:
    assert list(with_host_lane(problem(with_host(1e9, 1e9), 200, graph=STEPS))) == []


def test_ranks_attend_on_their_devices() -> None:
    assert can_attend(STEPS) and not can_attend(dataclasses.replace(STEPS, num_ranks=2))


@pytest.mark.parametrize("attend_rate", [2e8, 5e7])
def test_the_faster_kind_of_work_comes_first_in_the_bound(attend_rate: float) -> None:
    units = can_attend(STEPS)
    tasks = list(STEPS.tasks)
    nbytes = sum(unit.nbytes for unit in units)
    for unit in units:
        flops = int(1e12 / ATTENTION_FLOPS * unit.nbytes / attend_rate)
        tasks[unit.task] = dataclasses.replace(tasks[unit.task], flops=flops)
    graph = dataclasses.replace(STEPS, tasks=tuple(tasks))
    bound = lower_bound(graph, 0, UNIT, may_cut=True)
    profile = with_host(1e6, 1e9, host_flops_per_s=1e12)
    # The link copies next to nothing, so the host reads all, each kind at its own rate.
    found = least_time_beside_host_ns(bound, profile)
    assert found == pytest.approx(1e9 * nbytes / attend_rate, rel=0.1)


def test_rows_that_the_host_reads_are_not_written_on_the_device() -> None:
    tasks = tuple(
        dataclasses.replace(task, time_ns=10**9) if task.op == "aten.copy_.default" else task
        for task in STEPS.tasks
    )
    bound = lower_bound(dataclasses.replace(STEPS, tasks=tasks), 0, UNIT, may_cut=True)
    assert least_time_beside_host_ns(bound, with_host(1e9, 1e9)) < 10**9


def experts(*, transposed: bool) -> TaskGraph:
    graph = layers_of_experts(num_layers=2)
    if not transposed:
        return graph
    tensors = list(graph.tensors)
    for unit in can_multiply(graph):
        (place,) = (a.tensor for a in graph.tasks[unit.task].args[1:2])
        num, depth, rows = tensors[place].shape
        tensors[place] = dataclasses.replace(tensors[place], stride=(depth * rows, rows, 1))
    return dataclasses.replace(graph, tensors=tuple(tensors))


def test_the_host_multiplies_by_transposed_experts_as_a_whole() -> None:
    plain, graph = experts(transposed=False), experts(transposed=True)
    assert can_multiply(plain) and not divisible_weights(graph)
    assert [(u.buffer, u.nbytes) for u in can_multiply(graph)] == [
        (u.buffer, u.nbytes) for u in can_multiply(plain)
    ]
    given = problem(with_host(1e9, 4e9), 40, graph=graph)
    found = list(with_host_lane(given))
    assert found and all(each.host_tasks for each in found)


def test_transposed_experts_fill_their_buffer_and_have_one_use() -> None:
    graph = experts(transposed=True)
    unit = can_multiply(graph)[0]
    others = [other for other in can_multiply(graph) if other != unit]
    place = graph.tasks[unit.task].args[1].tensor
    tensors = list(graph.tensors)
    tensors[place] = dataclasses.replace(tensors[place], offset=1)
    buffers = list(graph.buffers)
    buffers[unit.buffer] = dataclasses.replace(buffers[unit.buffer], nbytes=unit.nbytes + 4)
    reader = Task(len(graph.tasks), "aten.neg.default", reads=(unit.buffer,))
    flat = list(graph.tensors)
    flat[place] = dataclasses.replace(flat[place], shape=(512, 64), stride=(64, 1))
    named = list(graph.tasks)
    args = named[unit.task].args
    named[unit.task] = dataclasses.replace(named[unit.task], args=args[:1])
    for changes in (
        {"tensors": tuple(flat)},
        {"tasks": tuple(named)},
        {"tensors": tuple(tensors)},
        {"buffers": tuple(buffers)},
        {"tasks": (*graph.tasks, reader)},
    ):
        assert can_multiply(dataclasses.replace(graph, **changes)) == others


def test_of_experts_the_host_reads_those_that_have_rows() -> None:
    graph = experts(transposed=True)
    units, known = can_multiply(graph), routes(graph)
    found = with_host_rows(graph, units, {unit.buffer: unit.num_rows for unit in units})
    most = sum(known[unit.buffer].most_bytes(unit.nbytes) for unit in units)
    assert host_bytes(found) == most < sum(unit.nbytes for unit in units)


@pytest.mark.parametrize("share", [0.2, 0.5, 1])
@pytest.mark.parametrize("device_ns", [10**5, 10**6])
@pytest.mark.parametrize("choose", [_rows_of_each, whole_ones])
def test_the_device_works_while_the_host_multiplies(
    choose: Callable[[Sequence[Divisible], float], dict[int, int]], device_ns: int, share: float
) -> None:
    tasks = tuple(dataclasses.replace(task, time_ns=device_ns) for task in GRAPH.tasks)
    graph = dataclasses.replace(GRAPH, tasks=tasks)
    graph = with_host_rows(graph, WEIGHTS, choose(WEIGHTS, share))
    given = problem(profile := with_host(1e9, 2e9), 100, graph=graph)
    bound_ns = least_time_ns(
        lower_bound(graph, given.arena_bytes, UNIT, may_cut=True), profile, given.arena_bytes
    )
    total_ns = predicted_ns(plan_finepage(given), profile)
    assert bound_ns <= total_ns <= 1.05 * bound_ns  # each product waits for the one before


def test_the_host_makes_one_product_after_another() -> None:
    units = can_multiply(side_by_side := layers(24, with_bias=False))
    graph = with_host_rows(side_by_side, units, {unit.buffer: unit.num_rows for unit in units})
    profile = with_host(1e9, 2e9)
    one_ns = Costs(profile).task_ns(graph, graph.tasks[0])
    assert end_times_ns(graph, profile) == [one_ns * (n + 1) for n in range(24)]


def test_what_the_link_must_copy_is_part_of_the_bound() -> None:
    bound = lower_bound(GRAPH, 0, UNIT, may_cut=True)
    more = dataclasses.replace(bound, per_call_bytes=bound.per_call_bytes + 10**9)
    profile = with_host(1e9, 1e15)
    assert least_time_beside_host_ns(bound, profile) < 10**8
    assert least_time_beside_host_ns(more, profile) >= 10**9


def test_the_host_multiplies_only_while_it_issues_nothing() -> None:
    bound = lower_bound(GRAPH, 0, UNIT, may_cut=True)
    times = [
        least_time_beside_host_ns(bound, with_host(1e9, 1e9, host_op_ns=ns)) for ns in (0, 10**6)
    ]
    # The lookup alone is no product, and the link copies meanwhile.
    assert times[1] - times[0] == pytest.approx(10**6 / 2, rel=0.01)


def test_the_device_and_the_host_make_the_products_together() -> None:
    tasks = tuple(dataclasses.replace(task, time_ns=10**6) for task in GRAPH.tasks)
    ample = lower_bound(dataclasses.replace(GRAPH, tasks=tasks), 10**9, UNIT, may_cut=True)
    num_bytes = sum(task.moved_bytes for task in GRAPH.tasks[1:])
    as_fast = with_host(1e9, num_bytes / 0.048)
    # Half of 48 products, and the lookup on the device before or behind them.
    assert least_time_beside_host_ns(ample, as_fast) == pytest.approx(24.5e6, rel=0.01)
    assert least_time_beside_host_ns(ample, with_host(1e9, 1e3)) == pytest.approx(49e6, rel=0.01)
    assert least_time_beside_host_ns(ample, with_host(1e9, 1e18)) == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_of_any_machine_is_faster_than_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    graph, profile = gather_rows(random_chain(rng)), any_machine(rng)
    given = problem(profile, rng.choice([50, 70, 90]), graph=graph)
    try:
        plan = plan_steady(graph, arena_bytes=given.arena_bytes, policy="finepage", split=True,
                           alignment=UNIT, profile=profile)  # fmt: skip
    except PlanInfeasibleError:
        return
    bound = lower_bound(graph, given.arena_bytes, UNIT, may_cut=True)
    assert least_time_beside_host_ns(bound, profile) <= predicted_ns(plan, profile)


def test_copies_that_hide_leave_the_host_nothing() -> None:
    assert list(with_host_lane(problem(with_host(1e15, 1e9)))) == []
    ample = problem(with_host(1e9, 1e9), 200)
    assert list(with_host_lane(ample)) == []


def slow(graph: TaskGraph) -> TaskGraph:
    """Let each task take longer than a host does, as a product that unpacks its weight first."""
    return dataclasses.replace(
        graph, tasks=tuple(dataclasses.replace(task, time_ns=10**6) for task in graph.tasks)
    )


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("graph", [slow(GRAPH), slow(layers_of_experts(num_experts=4))])
def test_no_budget_makes_a_pass_slower_beside_a_slow_device(graph: TaskGraph, split: bool) -> None:
    settings = PlanSettings(
        policy="finepage", split=split, alignment=UNIT, profile=with_host(1e9, 1e11)
    )
    arenas = [needed_arena_bytes(graph, UNIT) * n // 100 for n in (20, 40, 70, 100, 200)]
    times = [plan_checked(graph, each, settings).timeline.total_ns for each in arenas]
    assert all(more <= 1.01 * less for less, more in pairwise(times)), times


@pytest.mark.parametrize("percent", [10, 200])
@pytest.mark.parametrize("link", [2e9, 5e8])
def test_a_host_faster_than_the_device_has_all_whole_products(link: float, percent: int) -> None:
    given = problem(with_host(link, 1e11), percent, split=False, graph=slow(GRAPH))
    (found,) = with_host_lane(given)
    assert host_bytes(found) == sum(unit.nbytes for unit in WEIGHTS)
    assert given.profile is not None
    chosen_ns = predicted_ns(plan_finepage(given.of(found)), given.profile)
    others = [time_with(whole_ones(WEIGHTS, n / 10), given) for n in range(10)]
    assert chosen_ns < min(others)


@pytest.mark.parametrize(("begin_ns", "has_small"), [(0, True), (3000, False)])
def test_small_weights_are_not_cut_where_their_tasks_cost_more(
    begin_ns: int, has_small: bool
) -> None:
    graph = gather_rows(matmul_chain([512, 512, 64] * 16))
    profile = with_host(1e9, 4e9, transfer_latency_ns=begin_ns, host_op_ns=begin_ns)
    given, units = problem(profile, graph=graph), can_multiply(graph)
    times = {
        way: predicted_ns(plan_finepage(given.of(way)), profile) for way in with_host_lane(given)
    }
    found = min(times, key=times.__getitem__)
    others = [time_with(whole_ones(units, n / 10), given, units) for n in range(11)]
    assert len(times) == 2 and times[found] < min(others)
    names = {b.name for b in found.buffers if b.kind is BufferKind.MASTER}
    sizes = {b.nbytes for b in graph.buffers if b.name in names}
    assert max(sizes) == 512 * 512 * 4 and (min(sizes) < max(sizes)) == has_small


def test_many_rows_are_left_to_the_device() -> None:
    prefill = gather_rows(matmul_chain([512] * 49, num_rows=512))
    tasks = tuple(dataclasses.replace(t, flops=2 * 512**3) for t in prefill.tasks)
    prefill = dataclasses.replace(prefill, tasks=tasks)
    profile = with_host(1e9, 1e10, host_flops_per_s=1e9)
    few, many = (
        sum(map(host_bytes, with_host_lane(problem(profile, graph=g)))) for g in (GRAPH, prefill)
    )
    assert few > 10 * many


def test_the_host_reads_packed_numbers_and_the_device_unpacks_them_into_memory() -> None:
    packed = layers(24, with_bias=False)
    tasks = (  # Draft counts neither
        dataclasses.replace(task, flops=4 * WIDTH * ROWS, moved_bytes=17 * WIDTH * ROWS)
        for task in packed.tasks
    )
    graph = dataclasses.replace(packed, tasks=tuple(tasks))
    given = problem(profile := with_host(1e9, 4e9), graph=graph)
    (found,) = with_host_lane(given)
    total_ns = predicted_ns(plan_finepage(given.of(found)), profile)
    missing = lower_bound(graph, given.arena_bytes, UNIT, may_cut=True)
    assert total_ns < 0.4 * missing.nbytes  # the link alone takes a nanosecond a byte
    bound_ns = least_time_beside_host_ns(missing, profile)
    assert bound_ns <= total_ns <= 1.3 * bound_ns


def test_ranks_that_share_weights_have_no_lane_of_the_host() -> None:
    assert can_multiply(dataclasses.replace(GRAPH, num_ranks=2)) == []
    shared = dataclasses.replace(GRAPH, num_ranks=2)
    assert list(with_host_lane(problem(with_host(1e9, 1e9), graph=shared))) == []


def test_ranks_have_the_bound_of_plans_without_the_host() -> None:
    profile = with_host(1e9, 1e9)
    settings = PlanSettings(policy="finepage", split=True, alignment=UNIT, profile=profile)
    graph = dataclasses.replace(GRAPH, num_ranks=2)
    planned = plan_checked(graph, problem(profile).arena_bytes, settings)
    assert planned.lower_bound_ns == planned.lower_bound_alone_ns


def test_the_host_takes_the_experts_that_have_no_room() -> None:
    graph = layers_of_experts(num_layers=4, num_experts=8, rows=2)
    given = problem(with_host(1e6, 1e9), 50, graph=graph)
    both, all_but_the_last = with_host_lane(given)
    for found, names in ((both, {"up", "down"}), (all_but_the_last, {"up"})):
        on_host = [b for b in found.buffers if b.kind is BufferKind.MASTER]
        assert {b.name.rpartition(".")[2] for b in on_host} == names
    # Half of the layers have room.
    assert needed_arena_bytes(both, UNIT) <= given.arena_bytes * 1.25
    assert 2 * host_bytes(all_but_the_last) == host_bytes(both)
    assert list(with_host_lane(problem(with_host(1e6, 1e9), 100, graph=graph))) == []
    # A device that takes longer than the host leaves all of them to it, also with room for all.
    *_, every = with_host_lane(problem(with_host(1e6, 1e11), 50, graph=slow(graph)))
    (beside_room,) = with_host_lane(problem(with_host(1e6, 1e11), 100, graph=slow(graph)))
    assert host_bytes(every) == host_bytes(beside_room) == 2 * host_bytes(both)
    # Where no layer has room, that is the first way already.
    assert len(list(with_host_lane(problem(with_host(1e6, 1e11), 5, graph=slow(graph))))) == 2


@pytest.mark.parametrize("seed", range(40))
def test_the_host_never_makes_a_pass_slower(seed: int) -> None:
    rng = random.Random(seed)
    graph, profile = random_chain(rng), any_machine(rng)
    given = problem(profile, rng.choice([50, 70, 90]), split=rng.random() < 0.5, graph=graph)
    if not given.is_feasible:
        return
    settings = {"arena_bytes": given.arena_bytes, "policy": "finepage", "alignment": UNIT}
    alone, beside = (
        plan_steady(graph, profile=p, split=given.split, **settings)  # type: ignore[arg-type]
        for p in (profile.without_host, profile)
    )
    assert not alone.graph.host_tasks
    assert predicted_ns(beside, profile) <= predicted_ns(alone, profile)


def test_other_policies_leave_the_host_alone() -> None:
    profile = with_host(1e9, 1e11)
    for policy in ("horizon", "lru", "static"):
        settings = PlanSettings(policy=policy, split=False, alignment=UNIT, profile=profile)
        graph = matmul_chain([512] * 9)
        planned = plan_checked(graph, problem(profile, 80, graph=graph).arena_bytes, settings)
        assert not planned.memgraph.graph.host_tasks
        assert planned.lower_bound_ns == planned.lower_bound_alone_ns


def test_a_plan_has_both_bounds_and_counts_the_bytes_of_the_host_as_there() -> None:
    profile = with_host(1e9, 4e9)
    settings = PlanSettings(policy="finepage", split=True, alignment=UNIT, profile=profile)
    arena_bytes = problem(profile).arena_bytes
    planned = plan_checked(GRAPH, arena_bytes, settings)
    alone = plan_checked(
        GRAPH, arena_bytes, dataclasses.replace(settings, profile=profile.without_host)
    )
    read = host_bytes(planned.memgraph.graph)
    assert read > 0
    assert planned.lower_bound_bytes == max(0, alone.lower_bound_bytes - read)
    assert planned.lower_bound_ns < planned.lower_bound_alone_ns == alone.lower_bound_ns
