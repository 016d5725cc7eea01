"""The table over ranks, as a handle makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.runtime.ranks import Ranks


class _Twice(Ranks):
    """Another rank that has done the same, on twice the bytes."""

    def of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers), [2 * number for number in numbers]]


def test_every_rank_has_a_row_with_its_own_figures() -> None:
    model = nn.Linear(64, 64).eval()
    handle = attach(model, device_budget="1MiB", device="cpu", ranks=_Twice())
    with torch.no_grad():
        model(torch.zeros(1, 64))
    table = handle.rank_table()
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["rank"] == ["0", "1"]
    assert cells["weights"] == ["16.25 KiB", "32.50 KiB"]
    assert cells["budget"] == ["1.00 MiB", "2.00 MiB"]
    assert cells["runs"] == ["1", "2"]
    assert cells["without a plan"] == ["0", "0"]
    handle.detach()
