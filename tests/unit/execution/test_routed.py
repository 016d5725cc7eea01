"""A reload of experts copies the slices that are used, and no other byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.execution.reload_sources import RoutedReload
from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.routes import Route
from tests.unit.execution.rig import N, Rig, deep

NUM_SLICES, SLICE_BYTES = 6, 10


@pytest.mark.parametrize(
    ("is_ends", "told", "used"),
    [
        (True, [0, 2, 2, 3, 3, 3], {1, 3}),
        (True, [1, 2, 3, 3, 3, 4], {0, 1, 2, 5}),
        (True, [0, 0, 0, 0, 0, 0], set()),
        (False, [3, 3, 0], {0, 3}),
        (False, [[1, 2], [5, 1]], {1, 2, 5}),
        (False, [-1], {5}),
        (False, 4, {4}),
    ],
    ids=str,
)
def test_the_used_slices_are_copied(is_ends: bool, told: Any, used: set[int]) -> None:
    route = Route(0, 1, 2, 0, is_ends, NUM_SLICES, 4)
    master = torch.arange(1, NUM_SLICES * SLICE_BYTES + 1, dtype=torch.uint8)
    extent = torch.zeros_like(master)
    reload = RoutedReload(route, extent, master, lambda: torch.tensor(told).flatten().tolist())
    reload()
    for number in range(NUM_SLICES):
        part = slice(number * SLICE_BYTES, (number + 1) * SLICE_BYTES)
        expected = master[part] if number in used else torch.zeros(SLICE_BYTES, dtype=torch.uint8)
        assert torch.equal(extent[part], expected)
    assert reload.skipped_bytes == (NUM_SLICES - len(used)) * SLICE_BYTES


def test_two_weights_of_a_layer_read_the_choice_once_a_pass() -> None:
    rig = Rig(*deep())
    bound, arena = rig.executor._bound, rig.arena.bytes.view(torch.float32)
    for number in (1, 4):
        arena.fill_(number)
        bound.route_values.clear()
        for _ in range(2):
            assert bound._values(0, 0, Extent(0, N * N * 4)) == [number] * N * N
            arena.fill_(7)
