"""The test device finds two operations that nothing orders, in every run and without delays."""

from __future__ import annotations

import pytest
import torch

from tests.device import card


def wait_for(stream: torch.Stream) -> None:
    """Let the current stream wait for what a stream has enqueued."""
    torch.accelerator.current_stream().wait_event(stream.record_event())


@pytest.fixture
def side(device: torch.device) -> torch.Stream:
    """Return a second stream."""
    return torch.Stream(device)


@pytest.mark.parametrize("waits", [False, True])
def test_a_use_before_its_reload(side: torch.Stream, waits: bool) -> None:
    host, weight = torch.ones(8).pin_memory(), torch.zeros(8, device=side.device)
    with card.races_found() as found:
        with side:
            weight.copy_(host, non_blocking=True)
        if waits:
            wait_for(side)
        weight + 1
    expected = (
        "aten::add (stream 0) reads what copy h2d (stream {}) writes, and nothing orders them"
    )
    assert found == ([] if waits else [expected.format(side.stream_id)])


@pytest.mark.parametrize("waits", [False, True])
def test_an_overwrite_before_the_last_use(side: torch.Stream, waits: bool) -> None:
    host, arena = torch.ones(8).pin_memory(), torch.zeros(16, device=side.device)
    main = torch.accelerator.current_stream()
    with card.races_found() as found:
        torch.add(arena[:8], 1, out=arena[8:])
        with side:
            if waits:
                wait_for(main)
            arena[4:12].copy_(host, non_blocking=True)
    assert len(found) == (0 if waits else 2)  # the bytes that add reads, and those that it writes
    assert all("copy h2d" in race and "writes what aten::add" in race for race in found)


@pytest.mark.parametrize("waits", [False, True])
def test_a_host_slot_read_before_it_is_written(side: torch.Stream, waits: bool) -> None:
    slot = torch.zeros(8).pin_memory()
    first, second = (torch.ones(8, device=side.device) for _ in range(2))
    with card.races_found() as found:
        slot.copy_(first, non_blocking=True)
        main = torch.accelerator.current_stream()
        with side:
            if waits:
                main.synchronize()  # the host orders them too
            second.copy_(slot, non_blocking=True)
    assert len(found) == (0 if waits else 1)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_freed_under_another_stream(side: torch.Stream, is_recorded: bool) -> None:
    tensor = torch.ones(3000, device=side.device)
    with card.races_found() as found:
        with side:
            wait_for(card.default_stream())
            tensor + 1
        if is_recorded:
            tensor.record_stream(side)
        del tensor
        torch.zeros(3000, device=side.device)
    assert bool(found) is not is_recorded


def test_what_does_not_race(side: torch.Stream) -> None:
    tensor = torch.zeros(4, 4, device=side.device)
    with card.races_found() as found:
        with side:
            tensor[:, :2].add_(1)  # other columns
            seen = torch.Event(side.device)
            seen.record()
        tensor[:, 2:].add_(1)
        while not seen.query():
            pass
        tensor.mul_(2)  # the host has seen that the stream is done
        with side:
            wait_for(card.default_stream())
            tensor.sum()
        tensor.sum()  # two readers
        tensor.cpu()
    assert found == []


def test_races_are_found_inside_the_block_alone(side: torch.Stream) -> None:
    tensor = torch.zeros(4, device=side.device)
    with card.races_found() as found, side:
        tensor.add_(1)  # zeros were written before the block
    assert found == []
    tensor.add_(1)
    assert card._extension.races() == []
