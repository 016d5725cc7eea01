"""Graphs of the test device: work that is recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.device import card


@pytest.fixture
def side(device: torch.device) -> torch.Stream:
    """Return a stream that can record."""
    return torch.Stream(device)


@pytest.fixture
def ones(device: torch.device) -> torch.Tensor:
    found = torch.ones(8, device=device)
    torch.accelerator.synchronize()
    return found


def recorded(side: torch.Stream, work: Callable[[], object]) -> card.CUDAGraph:
    graph = card.CUDAGraph()
    with side:
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    return graph


def test_recorded_work_does_not_run(side: torch.Stream, ones: torch.Tensor) -> None:
    card.reset_counters()
    graph = recorded(side, lambda: ones.mul_(2))
    assert graph.num_works == 1 and card.counters()["kernel"] == 0
    assert ones.cpu().tolist() == [1] * 8


def test_each_replay_runs_all_of_it_on_the_current_stream(
    side: torch.Stream, ones: torch.Tensor
) -> None:
    other = torch.ones_like(ones)
    torch.accelerator.synchronize()

    def work() -> None:
        torch.add(ones, other, out=ones)
        other.copy_(ones)

    graph = recorded(side, work)
    with card.held(side):
        for _ in range(3):
            graph.replay()
        torch.accelerator.current_stream().synchronize()
    assert ones.cpu().tolist() == other.cpu().tolist() == [8] * 8
    assert card.counters()["replay"] == 3


def test_a_graph_that_is_reset_is_empty(side: torch.Stream, ones: torch.Tensor) -> None:
    graph = recorded(side, lambda: ones.mul_(2))
    graph.reset()
    assert graph.num_works == 0


def test_a_replay_can_fail_and_be_late(side: torch.Stream, ones: torch.Tensor) -> None:
    graph = recorded(side, lambda: ones.mul_(2))
    card.fail_nth("replay", 1)
    with pytest.raises(RuntimeError, match="injected failure of a replay"):
        graph.replay()
    card.fail_nth("replay", 1, later=True)
    graph.replay()
    with pytest.raises(RuntimeError, match="injected failure"):
        torch.accelerator.synchronize()
    card.set_delay("replay", 1000)
    graph.replay()
    assert ones.cpu().tolist() == [2] * 8
    assert card.counters()["replay_delayed_ns"] == 1000


def test_a_replay_races_as_its_work_does(side: torch.Stream, ones: torch.Tensor) -> None:
    graph = recorded(side, lambda: ones.mul_(2))
    with card.races_found() as races:
        graph.replay()
        with side:
            graph.replay()
    assert races and "mul_" in races[0]
    with card.races_found() as races:
        graph.replay()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            graph.replay()
    assert races == []


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "alloc cannot be recorded": lambda x: x * 2,
    "h2d cannot be recorded": lambda x: x.copy_(torch.ones(8).pin_memory(), non_blocking=True),
    "d2h cannot be recorded": lambda x: torch.ones(8).pin_memory().copy_(x, non_blocking=True),
    "the host cannot wait": lambda x: x[0].item(),
    "a wait for another stream": lambda x: torch.accelerator.current_stream().wait_stream(
        torch.Stream(x.device)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_card_refuses_is_refused(
    side: torch.Stream, ones: torch.Tensor, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        recorded(side, lambda: REFUSED[message](ones))
    assert (ones + 1).cpu().tolist() == [2] * 8


def test_the_default_stream_cannot_be_recorded(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="default stream"):
        card.CUDAGraph().capture_begin()


def test_one_graph_at_a_time(side: torch.Stream, ones: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="another graph is being recorded"):
        recorded(side, lambda: card.CUDAGraph().capture_begin())
    graph = recorded(side, lambda: ones.mul_(2))
    with pytest.raises(RuntimeError, match="cannot be recorded in a graph"):
        recorded(side, graph.replay)
    with pytest.raises(RuntimeError, match="is not being recorded"):
        graph.capture_end()
    with side, pytest.raises(RuntimeError, match="has been recorded"):
        graph.capture_begin()
