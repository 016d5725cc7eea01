"""Ranks that hold the weights together run one plan; each rank here is a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_finepage.errors import PlanInfeasibleError, RankError
from ds_finepage.graph.taskgraph import Symbol
from ds_finepage.runtime.parted_ranks import PartedRanks, shape_of
from ds_finepage.runtime.ranks import ONE_RANK, shapes_of
from tests.unit.graph.test_parts import parted
from tests.unit.runtime.test_ranks import on_ranks, tried

Step = Callable[[PartedRanks], Any]


def ranks_of_parts(*runs: Step) -> list[Any]:
    def as_run(run: Step) -> Callable[..., Any]:
        return lambda group, channel: run(PartedRanks(channel))

    return on_ranks(*map(as_run, runs))


def in_a_pass(step: Step, *args: Any) -> Step:
    def run(group: PartedRanks) -> Any:
        with group.together(args):
            return step(group)

    return run


def error_of(step: Step, group: PartedRanks) -> Any:
    """Return what a step returns, or its error."""
    return tried(lambda *_: step(group), group, None)  # type: ignore[arg-type]


def both(first: Step, second: Step) -> Step:
    return lambda group: [error_of(first, group), error_of(second, group)]


def making(value: Any, what: str = "plan") -> Step:
    return in_a_pass(lambda group: group.shared(what, lambda: value))


def test_all_ranks_use_what_rank_0_makes() -> None:
    assert ranks_of_parts(making("a"), making("b"), making("c")) == ["a"] * 3
    assert ONE_RANK.shared("plan", lambda: "own") == "own"
    assert not ONE_RANK.collects_weights and PartedRanks.collects_weights


def test_a_refusal_of_rank_0_is_that_of_all() -> None:
    def refuse() -> None:
        raise PlanInfeasibleError("needs more", 77)

    refused = in_a_pass(lambda group: group.shared("plan", refuse))
    for error, later in ranks_of_parts(both(refused, making(1)), both(making("b"), making(2))):
        assert isinstance(error, PlanInfeasibleError)
        assert (str(error), error.min_budget_bytes) == ("needs more", 77)
        assert later == 1


def test_the_largest_number_is_used() -> None:
    runs = [in_a_pass(lambda group, n=n: group.most("room", n)) for n in (3, 9, 5)]  # type: ignore[misc]
    assert ranks_of_parts(*runs) == [9, 9, 9]
    assert ONE_RANK.most("room", 3) == 3


@pytest.mark.parametrize(
    "other",
    [
        in_a_pass(lambda group: group.most("room", 1), torch.zeros(2, 9)),
        in_a_pass(lambda group: group.agree("run", ()), torch.zeros(2, 9)),
        in_a_pass(lambda group: group.shared("other plan", lambda: 1), torch.zeros(2, 9)),
    ],
)
def test_ranks_at_different_steps_are_told_what_each_has(other: Step) -> None:
    one = in_a_pass(lambda group: group.shared("plan", lambda: 1), torch.zeros(2, 7))

    def told(step: Step) -> Step:
        def run(group: PartedRanks) -> Any:
            error = error_of(step, group)
            return error, group.take_difference(), group.take_difference()

        return run

    for error, differs, again in ranks_of_parts(told(one), told(other)):
        assert isinstance(error, RankError)
        assert "shapes of inputs: rank 0 has '2x7', rank 1 has '2x9'." in str(error)
        assert "rank 0 has 'plan'" in str(error) and "prompts of the same shape" in str(error)
        assert (differs, again) == (True, False)


def test_a_rank_without_room_differs_from_one_with_room() -> None:
    def refuse(group: PartedRanks) -> None:
        raise PlanInfeasibleError("needs more")

    def differs(step: Step) -> Step:
        def run(group: PartedRanks) -> bool:
            error_of(in_a_pass(step), group)
            return group.take_difference()

        return run

    def run_it(group: PartedRanks) -> None:
        group.agree("a", ())

    assert ranks_of_parts(differs(refuse), differs(run_it)) == [True, True]
    assert ranks_of_parts(differs(refuse), differs(refuse)) == [False, False]
    assert not ONE_RANK.take_difference()


def test_inputs_of_the_ranks_may_differ() -> None:
    runs = [
        in_a_pass(lambda group, n=n: group.agree("a", (torch.tensor([n]),)))  # type: ignore[misc]
        for n in (1, 2)
    ]
    assert ranks_of_parts(*runs) == [None, None]


def test_sizes_of_inputs_are_named_without_weights() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    args = (weight, 5, *(torch.zeros(2, n) for n in range(1, 7)))
    assert shapes_of(args) == "2x1, 2x2, 2x3, 2x4"


def test_a_pass_has_one_digest_on_all_devices() -> None:
    graph = parted(num_weights=1)
    on = [
        replace(graph, tasks=(replace(graph.tasks[0], args=(Symbol("device", d),)),))
        for d in ("card:0", "card:1", "cpu")
    ]
    first, second, host = map(shape_of, on)
    assert first == second != host
