"""Plans and tables of weights whose masters lie in parts on several ranks.

The other rank is a stand-in that has its part at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.errors import StoreError
from ds_finepage.execution import collectives
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.collectives import RankParts
from ds_finepage.execution.masters import HostWeight
from ds_finepage.execution.stores import WeightTable
from ds_finepage.graph.parts import with_parts
from ds_finepage.planning.liveness import ample_arena_bytes
from tests.unit.execution.rig import CPU, N, Rig, deep, deep_in_eager

ROOM = 1 << 10


@dataclass(frozen=True)
class Beside(RankParts):
    """Rank 1 of two; the part of rank 0 comes from ``theirs``, by the part of this rank."""

    theirs: dict[bytes, torch.Tensor] = field(default_factory=dict)

    def collect(self, whole: torch.Tensor) -> None:
        mine = bytes(self.own(whole).numpy())
        whole[: whole.numel() // 2].copy_(self.theirs[mine])


def rig_of_parts(arena_bytes: int | None, **others: Any) -> tuple[Rig, dict[str, torch.Tensor]]:
    graph, weights = deep()
    halves = {name: byte_view(w).chunk(2) for name, w in weights.items()}
    theirs = {bytes(mine.numpy()): other for other, mine in halves.values()}
    graph = with_parts(graph, {name: w.nbytes for name, w in weights.items()}, 2)
    if arena_bytes is None:
        arena_bytes = ample_arena_bytes(graph, 64)
    rig = Rig(
        graph,
        masters={name: mine.clone() for name, (_, mine) in halves.items()},
        arena_bytes=arena_bytes,
        parts=Beside(1, 2, "none", theirs),
        **others,
    )
    return rig, weights


@pytest.mark.parametrize("arena_bytes", [None, ROOM])
@pytest.mark.parametrize("delay_seed", [None, 3])
def test_each_rank_reloads_its_part_and_gets_the_others(
    arena_bytes: int | None, delay_seed: int | None
) -> None:
    rig, weights = rig_of_parts(arena_bytes, delay_seed=delay_seed, poison=True)
    for _ in range(2):
        x = torch.randn(N, N)
        (out,) = rig(x)
        assert torch.equal(out, deep_in_eager(x, weights))
    whole = len(weights) * N * N * 4
    reloaded = rig.executor.counters.reloaded_bytes
    assert reloaded == (0 if arena_bytes is None else rig.memgraph.reloaded_bytes)
    assert reloaded <= whole // 2


def test_what_stands_for_the_collects_tells_which_weights_are_missing() -> None:
    rig, _ = rig_of_parts(None)
    before = rig.executor.collects(rig.residents)
    rig(torch.randn(N, N))
    assert rig.executor.collects(rig.residents) != before
    assert rig.executor.counters.entry_reloaded_bytes == 6 * N * N * 4 // 2


def test_a_part_of_another_size_is_refused() -> None:
    graph, weights = deep()
    graph = with_parts(graph, {name: w.nbytes for name, w in weights.items()}, 2)
    masters = {name: byte_view(w)[:100] for name, w in weights.items()}
    with pytest.raises(StoreError, match="2 parts of 'w0' have 100 bytes each"):
        Rig(graph, masters=masters, parts=RankParts(0, 2, "none"))


class Table:
    """A table with one weight in parts and a plain one, on rank 1 of two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = torch.arange(6.0).view(2, 3)
        self.parameter = nn.Parameter(torch.empty(0), requires_grad=False)
        self.plain = nn.Parameter(torch.ones(2))
        mine = byte_view(self.whole)[12:].clone()
        parts = RankParts(1, 2, "group")
        self.gathers: list[str] = []

        def gather(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
            assert x.data_ptr() == out[12:].data_ptr() and torch.equal(x, mine)
            self.gathers.append(group)
            out[:12] = byte_view(self.whole)[:12]

        monkeypatch.setattr(collectives, "gather_into", gather)
        weight = HostWeight(
            "w", self.parameter, mine, (2, 3), (3, 1), torch.float32, lambda w: None, parts=parts
        )
        plain = HostWeight(
            "p", self.plain, byte_view(self.plain), (2,), (1,), torch.float32, lambda w: None
        )
        self.table = WeightTable([weight, plain], CPU)
        self.table.install()


@pytest.fixture(name="of_parts")
def _of_parts(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


def test_all_weights_on_the_device_are_collected(of_parts: Table) -> None:
    table = of_parts.table
    table.load_all()
    assert torch.equal(table.on_device["w"], of_parts.whole)
    assert torch.equal(table.on_device["p"], torch.ones(2))
    assert of_parts.gathers == ["group"]
    host_bytes = sum(master.numel() for master in table.masters.values())
    assert (table.nbytes, host_bytes) == (32, 20)


def test_a_parameter_in_parts_has_its_form_in_a_call_alone(of_parts: Table) -> None:
    with of_parts.table.in_form():
        assert tuple(of_parts.parameter.shape) == (2, 3)
        assert of_parts.parameter.untyped_storage().nbytes() == 0
        assert tuple(of_parts.plain.shape) == (2,)
    assert of_parts.parameter.numel() == 0
    assert of_parts.table.changes().rewritten == ()


def test_a_gathered_parameter_is_refused_and_then_counts_as_changed(of_parts: Table) -> None:
    of_parts.parameter.data = torch.zeros(2, 3)
    for _ in range(2):  # as long as it is there
        with pytest.raises(StoreError, match="parameter w holds a whole tensor"):
            of_parts.table.changes()
    of_parts.parameter.data = torch.empty(0)
    assert of_parts.table.changes().rewritten == ("w",)
    assert of_parts.table.changes().rewritten == ()


def test_what_has_no_plan_is_refused(of_parts: Table) -> None:
    with pytest.raises(StoreError, match="a graph cannot run without a plan on 2 ranks"):
        of_parts.table.require_whole("a graph")
    WeightTable([], CPU).require_whole("a graph")


def test_a_graph_learns_which_weights_lie_in_parts(of_parts: Table) -> None:
    graph, _ = deep()
    named = replace(graph, buffers=(replace(graph.buffers[1], id=0, name="w"),))
    found = of_parts.table.parted(named)
    assert (found.parted, found.num_ranks, found.buffers[0].nbytes) == (("w",), 2, 24)
    assert WeightTable([], CPU).parted(graph) is graph
