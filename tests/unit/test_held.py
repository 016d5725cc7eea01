"""Tensors that passes have seen count while somebody holds them, and no longer."""

from __future__ import annotations

import gc

import torch

from ds_finepage.held import Held


def test_what_nobody_holds_is_not_counted() -> None:
    held = Held()
    kept, dropped = torch.ones(100), torch.ones(50)
    held.note([kept, dropped])
    del dropped
    gc.collect()
    assert held.bytes_beside([]) == 400
    del kept
    assert held.bytes_beside([]) == 0


def test_what_is_given_is_counted_by_whoever_is_given_it() -> None:
    held = Held()
    rows, states = torch.ones(100), torch.ones(50)
    held.note([rows, states])
    assert held.bytes_beside([rows[10:]]) == 200
    assert held.bytes_beside([states]) == 400


def test_a_view_holds_all_of_its_bytes() -> None:
    held = Held()
    whole = torch.ones(100)
    held.note([whole])
    assert held.bytes_beside([]) == 400
    part = whole[:1]
    del whole
    assert held.bytes_beside([]) == 400
    assert part.numel() == 1


def test_tensors_of_many_passes_add_up() -> None:
    held = Held()
    tensors = [torch.ones(10) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        held.note([tensor])
        assert held.bytes_beside([tensor]) == 40 * number
    assert held.bytes_beside([]) == 120
