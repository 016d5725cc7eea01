"""The ops that wait for other ranks, and what ranks say to each other beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from ds_finepage.errors import RankError
from ds_finepage.execution import measure
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.rank_channel import RankChannel
from ds_finepage.graph.collectives import ALL_GATHER, ALL_REDUCE
from tests.unit.capture.process_group import one_rank
from tests.unit.execution.graphs import ACTIVATION, Draft

CPU = torch.device("cpu")


@pytest.fixture(scope="module", name="group")
def _group() -> Iterator[str]:
    with one_rank() as name:
        yield name


def lost(*_: Any, **__: Any) -> None:
    raise RuntimeError("Connection closed by peer")


def test_a_reduction_is_that_of_its_name(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(distributed, "all_reduce", lambda x, op, group: found.append((op, group)))
    torch.ops.finepage.all_reduce_(torch.ones(3), "max", group, 1)
    assert found == [(distributed.ReduceOp.MAX, distributed.group.WORLD)]


def test_tensors_are_gathered_into_the_result(group: str) -> None:
    out, x = torch.zeros(2, 3), torch.randn(2, 3)
    torch.ops.finepage.all_gather_into_(out, x, group, 1)
    assert torch.equal(out, x)


def test_a_rank_that_is_gone_is_named(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "all_reduce", lost)
    with pytest.raises(RankError, match="an all-reduce with the other ranks failed: Connection"):
        torch.ops.finepage.all_reduce_(torch.ones(3), "sum", group, 2)
    monkeypatch.setattr(distributed, "all_gather_single", None, raising=False)  # older versions
    monkeypatch.setattr(distributed, "all_gather_into_tensor", lost)
    with pytest.raises(RankError, match="an all-gather with the other ranks failed: Connection"):
        torch.ops.finepage.all_gather_into_(torch.ones(6), torch.ones(3), group, 2)


@pytest.mark.parametrize("room_bytes", [None, 0])
def test_one_rank_alone_measures_no_collective(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int | None
) -> None:
    monkeypatch.delattr(measure, "Trial")
    draft = Draft()
    x, all_of_x = draft.tensor(ACTIVATION, 4, 4), draft.tensor(ACTIVATION, 8, 4)
    draft.task(ALL_REDUCE, x, "sum", "no group", 2, changes=(x,))
    draft.task(ALL_GATHER, all_of_x, x, "no group", 2, changes=(all_of_x,))
    meter, graph = OpMeter(CPU), draft.graph()
    costs = [
        (t.time_ns, t.workspace_bytes) for t in meter.with_costs(graph, room_bytes=room_bytes).tasks
    ]
    assert costs == [(None, 0), (None, 0)]
    meter.with_costs(graph, make_room=lambda: pytest.fail("they are measured again"))


def test_ranks_exchange_numbers_texts_and_errors(group: str) -> None:
    channel = RankChannel(group)
    assert channel.gather((3, 4)) == [[3, 4]]
    assert channel.gather_texts("mine") == ["mine"]
    channel.post("broken")
    assert channel.posted() == {}  # only those of others
    channel.rank, channel.num_ranks = 1, 2
    assert channel.posted() == {0: "broken"}


def test_a_lost_channel_says_so(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = RankChannel(group)
    monkeypatch.setattr(distributed, "all_gather", lost)
    monkeypatch.setattr(distributed, "all_gather_object", lost)
    with pytest.raises(RankError, match="another rank is gone: Connection closed"):
        channel.gather((1, 2))
    with pytest.raises(RankError, match="another rank is gone: Connection closed"):
        channel.gather_texts("mine")


def test_a_channel_leaves_every_group(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, found = RankChannel(group), []
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: found.append(1))
    channel.leave()
    assert found == [1]
    monkeypatch.setattr(distributed, "destroy_process_group", lost)
    channel.leave()  # they are closed already


def test_a_link_has_a_rate_and_a_latency(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four ranks a reduction has six steps, each of a quarter of the tensor."""
    channel = RankChannel(group)
    channel.num_ranks = 4
    took = {2: 600, 256: 2600}
    monkeypatch.setattr(channel, "_reduce_ns", lambda tensor: took[tensor.numel()])
    rate, latency_ns = channel.measure_link(CPU, 1024)
    assert (rate, latency_ns) == (6 * 256 / 2000e-9, 100)
    took[256] = 600  # too small to tell
    assert channel.measure_link(CPU, 1024) == (6 * 256 / 300e-9, 100)
