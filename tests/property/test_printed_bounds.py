"""Printed bounds are held against independent ones, and both against the plans of all policies."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes
from ds_finepage.planning.pipeline import Planned, PlanSettings, graph_to_plan, plan_checked
from ds_finepage.planning.policies import POLICIES
from ds_finepage.planning.simulator import Costs
from tests.property.experts import layers_of_experts
from tests.property.independent_bounds import Machine, fewest_bytes, least_ns
from tests.property.matmul_chains import random_chain
from tests.property.strategies import taskgraphs
from tests.property.test_memgraphs import modest as of_memgraphs
from tests.unit.planning.finepage.test_search import machine

UNIT = 64
PROFILE = dataclasses.replace(machine(h2d=1e10), memory_bytes_per_s=1e11)

modest = settings(of_memgraphs, max_examples=20)


def planned_by(
    policy: str, graph: TaskGraph, arena_bytes: int, *, split: bool, profile: HardwareProfile
) -> Planned | None:
    asked = PlanSettings(policy=policy, split=split, alignment=UNIT, profile=profile)
    try:
        return plan_checked(graph, arena_bytes, asked)
    except PlanInfeasibleError:
        return None


def copied_bytes(planned: Planned) -> int:
    """Return the bytes that a run of the plan reloads in every pass."""
    plan = planned.memgraph
    return plan.reloaded_bytes + sum(plan.graph.buffers[b].nbytes for b in plan.lost)


def machine_for(graph: TaskGraph, profile: HardwareProfile) -> Machine:
    times = [Costs(profile).task_ns(graph, task) for task in graph.tasks]
    return Machine(times, profile.h2d_bytes_per_s)


def hold(planned: Planned, *, split: bool) -> None:
    """Show that the printed bounds are at most the independent ones, and these at most the plan."""
    arena_bytes, profile = planned.memgraph.arena_bytes, planned.settings.profile
    graph = planned.graph if split else graph_to_plan(planned.graph, arena_bytes, planned.settings)
    nbytes = fewest_bytes(graph, arena_bytes, UNIT, cut=split)
    time = least_ns(graph, arena_bytes, UNIT, machine_for(planned.graph, profile), cut=split)
    assert nbytes is not None and time is not None
    slack = 1 + 1e-7  # of the solver
    assert planned.lower_bound_bytes <= nbytes * slack + 1
    assert nbytes <= copied_bytes(planned) * slack + 1
    assert planned.lower_bound_ns <= time * slack + 1
    assert time <= planned.timeline.total_ns * slack + 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
@modest
@given(data=st.data(), graph=taskgraphs(max_tasks=10))
def test_no_plan_is_below_the_bounds(policy: str, data: st.DataObject, graph: TaskGraph) -> None:
    least, ample = min_arena_bytes(graph, UNIT), ample_arena_bytes(graph, UNIT)
    arena_bytes = data.draw(st.integers(least, max(least, ample)))
    planned = planned_by(policy, graph, arena_bytes, split=False, profile=PROFILE)
    if planned is not None:
        hold(planned, split=False)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("split", [False, True])
def test_no_plan_of_products_is_below_the_bounds(seed: int, split: bool) -> None:
    """Products and looked-up tables, cut and whole."""
    rng = random.Random(seed)
    graph = with_workspaces(random_chain(rng), rng)
    least, ample = min_arena_bytes(graph, UNIT), ample_arena_bytes(graph, UNIT)
    for arena_bytes in (least, rng.randint(least, ample), ample):
        planned = planned_by("finepage", graph, arena_bytes, split=split, profile=PROFILE)
        assert planned is not None
        hold(planned, split=split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("percent", [40, 60, 90])
@pytest.mark.parametrize("h2d", [1e9, 1e11, 1e12])
@pytest.mark.parametrize("num_experts", [(8, 8, 8, 8), (4, 4, 4, 4, 16)])
def test_no_plan_with_experts_is_below_the_bounds(
    split: bool, percent: int, h2d: float, num_experts: tuple[int, ...]
) -> None:
    graph = layers_of_experts(num_experts=num_experts)
    profile = dataclasses.replace(PROFILE, h2d_bytes_per_s=h2d, memory_bytes_per_s=1e13)
    arena_bytes = graph.weight_bytes * percent // 100
    for policy in sorted(POLICIES) if not split else ["finepage"]:
        planned = planned_by(policy, graph, arena_bytes, split=split, profile=profile)
        if planned is not None:
            hold(planned, split=split)


def with_workspaces(graph: TaskGraph, rng: random.Random) -> TaskGraph:
    return dataclasses.replace(
        graph,
        tasks=tuple(
            dataclasses.replace(t, workspace_bytes=rng.choice([0, 0, 100, 5000]))
            for t in graph.tasks
        ),
    )
