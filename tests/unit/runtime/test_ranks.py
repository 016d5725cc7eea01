"""Ranks that agree before each pass and end together; each rank here is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ds_finepage.errors import PlanInfeasibleError, RankError
from ds_finepage.runtime.ranks import ONE_RANK, RankGroup, differences
from tests.unit.runtime.settings import PROFILE

CPU = torch.device("cpu")


class Wire:
    """What connects the ranks of a test."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=10)
        self.is_cut = False
        self.said: list[Any] = [None] * num_ranks
        self.errors: dict[int, str] = {}


class OnWire:
    """One end of a wire; it is cut for all when one rank leaves."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.rank, self.num_ranks, self._wire = rank, len(wire.said), wire
        self.scratch_bytes = 0

    def _exchange(self, value: Any) -> list[Any]:
        try:
            self._wire.barrier.wait()
            self._wire.said[self.rank] = value
            self._wire.barrier.wait()
        except threading.BrokenBarrierError as error:
            assert self._wire.is_cut, "a rank waits for one that does not come"
            raise RankError("another rank is gone: cut") from error
        return list(self._wire.said)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._exchange(list(numbers))

    def gather_texts(self, text: str) -> list[str]:
        return self._exchange(text)

    def share(self, value: Any) -> Any:
        return self._exchange(value)[0]

    def post(self, text: str) -> None:
        self._wire.errors[self.rank] = text

    def posted(self) -> dict[int, str]:
        return {rank: t for rank, t in self._wire.errors.items() if rank != self.rank}

    def leave(self) -> None:
        self._wire.is_cut = True
        self._wire.barrier.abort()

    def measure_link(self, where: torch.device, scratch_bytes: int) -> tuple[float, int]:
        self.scratch_bytes = scratch_bytes
        return 5e9, 70


Run = Callable[[RankGroup, OnWire], Any]


def tried(run: Run, group: RankGroup, channel: OnWire) -> Any:
    try:
        return run(group, channel)
    except BaseException as error:
        return error


def on_ranks(*runs: Run) -> list[Any]:
    """Run each function as a rank of its own; return their results or errors."""
    wire = Wire(len(runs))
    ends = [OnWire(wire, rank) for rank in range(len(runs))]
    with ThreadPoolExecutor(len(runs)) as pool:
        jobs = [pool.submit(tried, r, RankGroup(e), e) for r, e in zip(runs, ends, strict=True)]
        return [job.result() for job in jobs]


def one_pass(
    order: str | None = "abc",
    *args: torch.Tensor,
    before: BaseException | None = None,
    within: BaseException | None = None,
) -> Run:
    """Return a rank that runs a pass; it may fail before it has agreed, or afterwards."""

    def run(group: RankGroup, channel: OnWire) -> str:
        with group.together():
            if before is not None:
                raise before
            group.agree(order, args)
            if within is not None:
                raise within
            channel.gather((0,))  # a collective of the pass
        return "ran"

    return run


def twice(first: Run, second: Run) -> Run:
    return lambda group, channel: [tried(run, group, channel) for run in (first, second)]


def test_ranks_with_the_same_pass_run_it() -> None:
    tokens = torch.tensor([[1, 2]])
    assert on_ranks(*[one_pass("abc", tokens)] * 3) == ["ran"] * 3
    # Tensors that a shard has for itself may differ.
    assert on_ranks(one_pass("a", torch.zeros(1)), one_pass("a", torch.ones(2))) == ["ran"] * 2


def test_numbers_of_all_ranks_are_by_rank() -> None:
    runs = (lambda group, _: group.of_all([1, 2]), lambda group, _: group.of_all([3, 4]))
    assert on_ranks(*runs) == [[[1, 2], [3, 4]]] * 2
    assert ONE_RANK.of_all((1, 2)) == [[1, 2]]


def test_a_rank_that_has_left_has_no_numbers() -> None:
    def run(group: RankGroup, channel: OnWire) -> Any:
        tried(one_pass(within=KeyError("of the user")), group, channel)
        return group.of_all([1])

    for error in on_ranks(run, run):
        assert isinstance(error, RankError) and "Start all ranks again." in str(error)


def test_one_rank_agrees_with_itself() -> None:
    with ONE_RANK.together():
        ONE_RANK.agree("abc", ())
    assert ONE_RANK.with_link(PROFILE, CPU, 1) is PROFILE
    assert ONE_RANK.has_whole_model


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (one_pass("abc"), one_pass("abd"), "differ in collectives: rank 0 has 'abc', rank 1 has"),
        (one_pass("abc"), one_pass(None), "rank 1 has 'not planned'"),
        (one_pass("a", torch.tensor([1])), one_pass("a", torch.tensor([2])), "in integer inputs"),
        (one_pass("a", torch.zeros(2, 1).int()), one_pass("a", torch.zeros(1, 2).int()), "inputs"),
    ],
)
def test_another_pass_is_refused_on_every_rank_and_they_stay_in_step(
    one: Run, other: Run, what: str
) -> None:
    for first, second in on_ranks(twice(one, one_pass()), twice(other, one_pass())):
        assert isinstance(first, RankError) and what in str(first)
        assert "No rank has run this pass." in str(first)
        assert second == "ran"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (PlanInfeasibleError("needs more", 77), PlanInfeasibleError, "needs more"),
        (KeyError("x"), RankError, "KeyError('x')"),
    ],
)
def test_an_error_before_the_pass_refuses_it_on_all_ranks(
    error: Exception, kind: type[Exception], said: str
) -> None:
    """All of them may then move their KV caches, and try again."""
    runs = twice(one_pass(), one_pass()), twice(one_pass(before=error), one_pass())
    (theirs, later), (own, again) = on_ranks(*runs)
    assert own is error
    assert isinstance(theirs, kind) and getattr(theirs, "min_budget_bytes", None) is None
    assert str(theirs) == f"Rank 1 failed: {said} No rank has run this pass."
    assert (later, again) == ("ran", "ran")
    errors = [error, PlanInfeasibleError("two")]  # each keeps its own
    assert on_ranks(*(one_pass(before=each) for each in errors)) == errors


@pytest.mark.parametrize(
    "failing", [one_pass(within=KeyError("x")), one_pass(before=KeyboardInterrupt())]
)
def test_an_error_in_the_middle_ends_all_ranks(failing: Run) -> None:
    (theirs, later), (own, again) = on_ranks(
        twice(one_pass(), one_pass()), twice(failing, one_pass())
    )
    assert isinstance(own, (KeyError, KeyboardInterrupt)) and isinstance(theirs, RankError)
    assert str(theirs) == f"Rank 1 failed: {own!r}"
    assert str(later) == f"Rank 1 failed: {own!r} Start all ranks again."
    assert str(again).startswith(f"This rank failed in the middle of a pass: {own!r}.")


def test_a_rank_that_is_gone_without_a_word_ends_the_others() -> None:
    (theirs, _) = on_ranks(one_pass(), lambda group, channel: channel.leave())
    assert str(theirs) == "A pass ended in the middle: another rank is gone: cut"


def test_a_refusal_that_reaches_no_rank_is_still_the_error() -> None:
    no_room = PlanInfeasibleError("needs more")

    def alone(group: RankGroup, channel: OnWire) -> list[Any]:
        channel.leave()
        return [tried(run, group, channel) for run in (one_pass(before=no_room), one_pass())]

    ((own, later),) = on_ranks(alone)
    assert own is no_room
    assert str(later).startswith("A pass ended in the middle: another rank is gone")


def test_the_link_is_measured_with_little_memory() -> None:
    def run(group: RankGroup, channel: OnWire) -> Any:
        found = group.with_link(PROFILE, CPU, 100)
        small = channel.scratch_bytes
        group.with_link(PROFILE, CPU, 1 << 40)
        rates = found.rank_bytes_per_s, found.rank_latency_ns
        return rates, small, channel.scratch_bytes, group.has_whole_model

    assert on_ranks(run) == [((5e9, 70), 100, 4 << 20, False)]


def test_the_link_is_measured_with_the_memory_of_the_rank_that_has_least() -> None:
    def with_room(scratch_bytes: int) -> Run:
        def run(group: RankGroup, channel: OnWire) -> int:
            group.with_link(PROFILE, CPU, scratch_bytes)
            return channel.scratch_bytes

        return run

    assert on_ranks(with_room(120), with_room(100), with_room(1 << 40)) == [100] * 3


def test_only_what_differs_is_named() -> None:
    assert differences([{"a": 1, "b": 2}, {"a": 1, "b": 2}]) == ""
    assert differences([{"a": 1, "b": 2}, {"a": 1}]) == (
        "The ranks differ in b: rank 0 has 2, rank 1 has None."
    )
