"""Policies zero*: what is fetched and released when. Against real runs: tests/integration."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import ModuleCall, TaskGraph
from ds_finepage.planning.baselines import zero
from ds_finepage.planning.baselines.zero import (
    EVERY_PARAMETER,
    ZeroSettings,
    authors_settings,
    plan_zero_with,
    script_of,
)
from ds_finepage.planning.policies import POLICIES
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import simulate
from tests.unit.planning.baselines.gathered import gathered
from tests.unit.planning.baselines.layered import CARD, UNIT, layered, moved

NUMEL = UNIT // 4  # of every weight, in float32
BARE = ZeroSettings(prefetch_bucket_size=0, param_persistence_threshold=0)


def planned(graph: TaskGraph, settings: ZeroSettings, units: int = 100) -> MemGraph:
    return check(plan_zero_with(Problem(graph, units * UNIT, UNIT), settings))


def bucket(num_weights: int, **others: int) -> ZeroSettings:
    size = num_weights * NUMEL
    return ZeroSettings(prefetch_bucket_size=size, param_persistence_threshold=0, **others)


def test_a_module_fetches_when_it_is_called_and_releases_when_it_returns() -> None:
    memgraph = planned(layered(1), BARE, units=3)
    assert moved(memgraph, NodeKind.RELOAD, NodeKind.DROP) == [
        *("reload embed", "embed", "drop embed"),
        *("reload layers.0.lin0", "layers.0.lin0", "drop layers.0.lin0"),
        *("reload layers.0.lin1", "layers.0.lin1", "drop layers.0.lin1"),
        *("reload head", "head", "drop head"),
    ]
    assert memgraph.entry == memgraph.exit == ()


def test_without_prefetch_copies_and_tasks_take_turns() -> None:
    memgraph = planned(layered(2, task_ns=100), BARE)
    timeline = simulate(memgraph, CARD)
    assert timeline.total_ns == timeline.compute_ns + timeline.transfer_ns == 6 * 100 + 6 * UNIT


def test_prefetch_tops_up_once_a_module_even_where_that_runs_no_task() -> None:
    """The model itself and each layer are modules too."""
    memgraph = planned(layered(1), bucket(1))
    assert moved(memgraph, NodeKind.RELOAD) == [
        "reload embed",  # behind the fetch of the model, which has no parameters of its own
        "reload layers.0.lin0",  # behind embed
        "embed",
        "reload layers.0.lin1",  # behind layers.0
        "reload head",  # behind layers.0.lin0
        "layers.0.lin0",
        "layers.0.lin1",
        "head",
    ]


def test_prefetch_hides_what_was_fetched_for_one_module_only() -> None:
    """On entry the compute stream waits for all that was fetched before, needed or not."""
    timeline = simulate(planned(layered(4, task_ns=UNIT), bucket(1)), CARD)
    assert timeline.transfer_ns == timeline.compute_ns == 10 * UNIT
    assert 10 * UNIT < timeline.total_ns < 20 * UNIT


def test_prefetch_overshoots_the_bucket_but_not_by_a_whole_weight() -> None:
    graph = layered(3)
    half_more = dataclasses.replace(bucket(1), prefetch_bucket_size=NUMEL + 1)
    assert script_of(graph, half_more) == script_of(graph, bucket(2))


def test_live_parameters_limit_prefetch_and_not_what_is_needed() -> None:
    graph = layered(3)
    assert gathered(graph, bucket(100)) == (8 * UNIT, 8 * UNIT)
    assert gathered(graph, bucket(100, max_live_parameters=2 * NUMEL)) == (8 * UNIT, 2 * UNIT)
    assert gathered(graph, bucket(100, max_live_parameters=0)) == (8 * UNIT, UNIT)


def test_small_parameters_stay_up_to_the_models_threshold() -> None:
    graph = layered(3)
    first_five = ZeroSettings(
        prefetch_bucket_size=0,
        param_persistence_threshold=EVERY_PARAMETER,
        model_persistence_threshold=5 * NUMEL,
    )
    assert script_of(graph, first_five).entry == (0, 1, 2, 3, 4)
    assert gathered(graph, first_five)[0] == 3 * UNIT
    memgraph = planned(graph, first_five)
    assert [r.buffer for r in memgraph.entry] == [0, 1, 2, 3, 4]
    assert memgraph.reloaded_bytes == 3 * UNIT


def test_nothing_else_stays_whatever_the_room() -> None:
    memgraph = planned(layered(3), BARE, units=10_000)
    assert memgraph.reloaded_bytes == memgraph.graph.weight_bytes


@pytest.mark.parametrize(("distance", "num_gathered"), [(0, 9), (10**9, 8)])
def test_a_tied_weight_is_kept_if_it_is_used_soon(distance: int, num_gathered: int) -> None:
    graph = layered(3, weights_a_layer=2, is_tied=True)
    settings = dataclasses.replace(BARE, max_reuse_distance=distance)
    expected = (num_gathered - 1) * UNIT
    assert gathered(graph, settings)[0] == expected


def test_the_defaults_keep_all_of_a_small_model() -> None:
    graph = layered(3)
    memgraph = check(POLICIES["zero"].plan(Problem(graph, arena_bytes=100 * UNIT, alignment=UNIT)))
    assert memgraph.policy == "zero"
    assert memgraph.reloaded_bytes == 0
    with pytest.raises(PlanInfeasibleError) as caught:
        POLICIES["zero"].plan(Problem(graph, arena_bytes=8 * UNIT, alignment=UNIT))
    assert "policy 'zero' holds" in str(caught.value) and "(512 bytes)" in str(caught.value)


@pytest.mark.parametrize("units", range(3, 16))
def test_the_persistence_knob_uses_the_arena_up(units: int) -> None:
    graph = layered(4)
    memgraph = check(
        POLICIES["zero-persistence"].plan(Problem(graph, arena_bytes=units * UNIT, alignment=UNIT))
    )
    assert memgraph.policy == "zero-persistence"
    # Two activations and what streams; there is no embedding op, so nothing is prefetched.
    num_kept = min(10, max(0, units - 3))
    assert num_kept <= len(memgraph.entry) <= num_kept + 1
    assert [r.buffer for r in memgraph.entry] == list(range(len(memgraph.entry)))


@pytest.mark.parametrize("policy", ["zero", "zero-persistence"])
def test_given_settings_are_taken(policy: str) -> None:
    problem = Problem(layered(4), arena_bytes=12 * UNIT, alignment=UNIT, engine=bucket(3))
    found = check(POLICIES[policy].plan(problem))
    assert found == plan_zero_with(problem, bucket(3), policy)
    assert found.reloaded_bytes == problem.graph.weight_bytes  # nothing is kept, whatever the room


def test_without_an_embedding_there_is_no_hidden_size() -> None:
    settings = authors_settings(layered(1))
    assert settings.prefetch_bucket_size == settings.param_persistence_threshold == 0


def test_a_coordinator_that_never_settles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "MAX_PASSES", 1)
    graph = layered(4)
    settings = dataclasses.replace(BARE, param_persistence_threshold=EVERY_PARAMETER)
    with pytest.raises(PlanInfeasibleError, match="still changes .* after 1 forwards"):
        script_of(graph, settings)


LAYERS = (
    ModuleCall("", "Model", 0, 0, 6),
    ModuleCall("embed", "Embedding", 1, 0, 1),
    ModuleCall("layers.0", "Block", 1, 1, 3),
    ModuleCall("layers.0.lin0", "Linear", 2, 1, 2),
    ModuleCall("layers.0.lin1", "Linear", 2, 2, 3),
    ModuleCall("layers.1", "Block", 1, 3, 5),
    ModuleCall("layers.1.lin0", "Linear", 2, 3, 4),
    ModuleCall("layers.1.lin1", "Linear", 2, 4, 5),
    ModuleCall("head", "Linear", 1, 5, 6),
)
"""Two layers of two linear modules each, between an embedding and a head."""


def test_leaf_modules_fetch_a_layer_at_once() -> None:
    graph = dataclasses.replace(layered(2), calls=LAYERS)
    settings = dataclasses.replace(BARE, leaf_classes=("Block",))
    memgraph = check(plan_zero_with(Problem(graph, 100 * UNIT, UNIT), settings))
    assert moved(memgraph, NodeKind.RELOAD)[2:6] == [
        *("reload layers.0.lin0", "reload layers.0.lin1", "layers.0.lin0", "layers.0.lin1")
    ]


def test_settings_are_written_to_a_ds_config() -> None:
    found = ZeroSettings(
        prefetch_bucket_size=1,
        param_persistence_threshold=2,
        model_persistence_threshold=3,
        max_live_parameters=4,
        max_reuse_distance=5,
    )
    assert found.keys == {
        "stage3_prefetch_bucket_size": 1,
        "stage3_param_persistence_threshold": 2,
        "stage3_model_persistence_threshold": 3,
        "stage3_max_live_parameters": 4,
        "stage3_max_reuse_distance": 5,
    }
