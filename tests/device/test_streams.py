"""Streams, events, delays, failures and counts of the test device."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from tests.device import card

MS = 1_000_000


@pytest.fixture
def pair(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pinned ones on the host, and zeros on the device."""
    zeros = torch.zeros(1000, device=device)
    torch.accelerator.synchronize()
    return torch.ones(1000).pin_memory(), zeros


Pair = tuple[torch.Tensor, torch.Tensor]


def test_a_pageable_copy_waits(pair: Pair) -> None:
    on_card = pair[1]
    card.set_delay("h2d", MS)
    source = torch.ones(1000)
    card.reset_counters()
    on_card.copy_(source, non_blocking=True)
    source.fill_(5)
    assert on_card.sum().item() == 1000
    assert card.counters()["syncs"] == 2  # the copy, and item()


def test_a_stream_keeps_its_order(device: torch.device) -> None:
    card.set_delay("kernel", random_ns=MS, seed=1)
    number = torch.zeros((), device=device)
    for _ in range(10):
        number.add_(1).mul_(2)
    assert number.item() == 2046


def test_events_tell_time(device: torch.device) -> None:
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    assert first.query()
    first.record()
    with card.held():
        card._sleep(2 * MS)
        last.record()
        assert not last.query()
        with pytest.raises(RuntimeError, match="completed"):
            first.elapsed_time(last)
    last.synchronize()
    assert last.query() and first.elapsed_time(last) >= 2


def test_an_event_without_timing_has_no_time(device: torch.device) -> None:
    events = [torch.Event(device) for _ in range(2)]
    for event in events:
        event.record()
        event.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        events[0].elapsed_time(events[1])


def test_random_delays_repeat_with_their_seed(pair: Pair) -> None:
    host, on_card = pair

    def delays(seed: int) -> list[int]:
        card.set_delay("h2d", 1000, random_ns=MS, seed=seed)
        found = []
        for _ in range(5):
            card.reset_counters()
            on_card.copy_(host, non_blocking=True)
            found.append(card.counters()["h2d_delayed_ns"])
        return found

    first = delays(7)
    assert len(set(first)) == 5 and all(1000 <= delay < 1000 + MS for delay in first)
    assert delays(7) == first != delays(8)


def test_one_stream_can_be_late(pair: Pair) -> None:
    side = torch.Stream(pair[1].device)
    card.set_stream_delay(side, 2 * MS)
    first, last = (torch.Event(pair[1].device, enable_timing=True) for _ in range(2))
    with side:
        first.record()
        last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 2


def test_an_error_inside_a_kernel_shows_at_the_next_wait(device: torch.device) -> None:
    table = torch.zeros(3, 2, device=device)
    torch.embedding(table, torch.tensor([5], device=device))
    with pytest.raises(torch.AcceleratorError, match="index out of range"):
        torch.accelerator.synchronize()


def test_counts(pair: Pair) -> None:
    host, on_card = pair
    card.reset_counters()
    on_card.copy_(host, non_blocking=True)
    host.copy_(on_card, non_blocking=True)
    assert card.counters()["enqueue_ns"] == 0
    with card.enqueuing_timed():
        on_card.add_(1)
    torch.accelerator.synchronize()
    found = card.counters()
    assert (found["h2d"], found["h2d_bytes"]) == (found["d2h"], found["d2h_bytes"]) == (1, 4000)
    assert found["kernel"] == 1 and found["alloc"] == 0
    assert found["enqueue_ns"] > 0
    assert found["syncs_by_reason"] == {"synchronize": 1}


def test_waits_of_the_host_can_be_forbidden_and_found(pair: Pair) -> None:
    on_card = pair[1]
    card.set_sync_debug_mode("error")
    on_card.add_(1).mul_(2)  # enqueues alone
    for wait in (on_card[0].item, on_card.cpu, on_card.nonzero, torch.accelerator.synchronize):
        with pytest.raises(RuntimeError, match="the host would wait"):
            wait()
    card.set_sync_debug_mode("default")
    with card.syncs_recorded() as found:
        on_card.nonzero()
    assert [reason for reason, _ in found] == ["aten::nonzero"]
    assert "test_waits_of_the_host_can_be_forbidden" in found[0][1]


def _add_one() -> None:
    torch.ones(2, device="slowcard").add_(1)


def test_a_forked_process_is_refused(device: torch.device) -> None:
    torch.ones(2, device=device)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_add_one)
    child.start()
    child.join()
    assert child.exitcode == 1
