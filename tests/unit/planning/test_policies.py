"""The policies by name."""

from __future__ import annotations

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.graph.memgraph import PUBLISHED, Extent, MemGraph, Residency
from ds_finepage.planning import pipeline
from ds_finepage.planning.liveness import min_arena_bytes, needed_arena_bytes
from ds_finepage.planning.pipeline import graph_to_plan
from ds_finepage.planning.policies import POLICIES, Policy
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.sketches import PAGING, chain, plan, sketch
from tests.unit.planning.steady import plan_settings, plan_steady

HORIZONS = ("horizon", "horizon-published")
every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))
ours = pytest.mark.parametrize("policy", PAGING)
carrying = pytest.mark.parametrize("policy", HORIZONS)


@every_policy
def test_a_plan_says_which_policy_made_it(policy: str) -> None:
    assert plan(chain(3), arena_bytes=256, policy=policy).policy == policy


def test_the_policies_that_page_are_the_cyclic_one_and_the_horizons() -> None:
    assert {p.name for p in POLICIES.values() if p.is_cyclic} == {"finepage"}
    assert set(PAGING) == {"finepage", *HORIZONS}
    assert all(name == policy.name for name, policy in POLICIES.items())


@pytest.mark.parametrize("make", [plan, plan_steady])
def test_an_unknown_policy_is_refused_with_the_nearest_known_one(make: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(chain(3), arena_bytes=192, policy="horizn")  # type: ignore[operator]
    message = str(caught.value)
    assert "unknown policy 'horizn'. Did you mean 'horizon'?" in message
    assert all(name in message for name in POLICIES)


@carrying
def test_a_carrying_policy_starts_from_what_it_finds(policy: str) -> None:
    entry = (Residency(1, Extent(64, 64)),)
    memgraph = plan(chain(3), arena_bytes=192, policy=policy, entry=entry)
    assert memgraph.entry == entry


@ours
@pytest.mark.parametrize("units", range(1, 11))
def test_a_steady_plan_ends_as_it_begins(policy: str, units: int) -> None:
    weights = sketch(" ".join(f"w{i}:64" for i in range(9)), *(f"w{i} ->" for i in range(9)))
    memgraph = check(plan_steady(weights, arena_bytes=units * 64, policy=policy))
    assert set(memgraph.entry) == set(memgraph.exit)


@ours
@pytest.mark.parametrize("units", range(2, 11))
def test_what_a_steady_plan_finds_moved_is_one_weight_at_most(policy: str, units: int) -> None:
    """The policy horizon may swap two places from pass to pass and never settle."""
    memgraph = check(plan_steady(chain(9), arena_bytes=units * 64, policy=policy))
    assert {r.buffer for r in memgraph.entry} == {r.buffer for r in memgraph.exit}
    moved = set(memgraph.entry) - set(memgraph.exit)
    assert len(moved) <= (1 if policy in ("horizon", PUBLISHED) else 0)


@carrying
def test_a_steady_plan_reloads_less_than_the_first_pass(policy: str) -> None:
    first = plan(chain(9), arena_bytes=5 * 64, policy=policy)
    steady = plan_steady(chain(9), arena_bytes=5 * 64, policy=policy)
    assert steady.reloaded_bytes < first.reloaded_bytes == 9 * 64


def test_a_steady_plan_gives_up_after_some_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that never settles: the last of its plans stands."""
    monkeypatch.setattr(pipeline, "check", lambda memgraph: memgraph)  # its exits are made up
    calls = []

    def restless(problem: Problem) -> MemGraph:
        calls.append(problem.entry)
        found = POLICIES["horizon"].plan(problem)
        where = Extent(64 * (len(calls) % 2), 64)
        object.__setattr__(found, "exit", (Residency(0, where),))
        return found

    restless_policy = Policy(name="restless", plan=restless, pages=True)
    monkeypatch.setitem(POLICIES, "restless", restless_policy)
    memgraph = plan_steady(sketch("w:64", "w ->"), arena_bytes=128, policy="restless")
    assert len(calls) == 9
    assert set(memgraph.entry) != set(memgraph.exit)


@every_policy
def test_rows_stand_in_for_a_table_that_is_in_the_way(policy: str) -> None:
    graph = matmul_chain([16, 16, 16], num_rows=2, vocabulary=256)
    rows = gather_rows(graph)
    assert rows != graph
    needed = needed_arena_bytes(graph, 64)
    cases = [(needed, graph), (needed - 64, graph), (min_arena_bytes(graph, 64) - 64, graph)]
    if POLICIES[policy].is_cyclic:
        cases[1] = needed - 64, rows
    if policy in PAGING:
        cases[2] = cases[2][0], rows
    for arena_bytes, expected in cases:
        assert graph_to_plan(graph, arena_bytes, plan_settings(policy=policy)) == expected
    if policy in PAGING:
        least = min_arena_bytes(rows, 64)
        memgraph = check(plan_steady(graph, arena_bytes=least, policy=policy))
        assert memgraph.graph == rows
        with pytest.raises(PlanInfeasibleError, match="needs"):
            plan_steady(graph, arena_bytes=least - 64, policy=policy)
