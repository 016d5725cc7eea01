"""A paged KV cache is traced with its layer, and its block of memory is one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.capture.dynamo_graph import SHARES_MEMORY
from ds_finepage.capture.recording import Recordings, record
from ds_finepage.capture.tracing import has_paged_cache, open_paged_caches
from ds_finepage.graph.taskgraph import BufferKind
from tests.unit.capture.replay import by_dynamo, replay, traced


class Allocator:
    def __init__(self, block: torch.Tensor, layer: int) -> None:
        self.views = {layer: (block[2 * layer :], block[2 * layer + 1 :])}


class PagedAttentionCache:
    """Two rows for each layer of each token, one behind the other, as transformers has them."""

    def __init__(self, num_rows: int) -> None:
        self.block = torch.zeros(num_rows, 3)
        self.cache_allocators = {name: Allocator(self.block, i) for i, name in enumerate("ab")}

    @torch.compiler.disable
    def update(self, name: str, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        ((keys, values),) = self.cache_allocators[name].views.values()
        keys.index_copy_(0, at, rows)
        values.index_copy_(0, at, rows * 2)
        return keys + 0


class Other(PagedAttentionCache):
    pass


ROWS, AT = torch.ones(1, 3), torch.tensor([4])


def step(cache: Any, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return cache.update("a", rows, at).sum() + cache.update("b", rows, at).sum()


def test_an_opened_cache_is_traced_as_a_part_of_its_graph() -> None:
    closed = PagedAttentionCache(16)
    assert len(by_dynamo(step, (closed, ROWS, AT))) > 1
    cache = PagedAttentionCache(16)
    open_paged_caches((ROWS,), {"cache": cache})
    assert len(by_dynamo(step, (cache, ROWS, AT))) == 1
    assert torch.equal(cache.block, closed.block)


def test_no_other_object_is_opened() -> None:
    other = Other(16)
    open_paged_caches((other, None), {"mask": ROWS})
    assert "update" not in vars(other)
    assert not has_paged_cache((other, None), {"mask": ROWS})
    assert has_paged_cache((ROWS,), {"cache": PagedAttentionCache(16)})
    assert not hasattr(other.block, SHARES_MEMORY) and not hasattr(ROWS, SHARES_MEMORY)


def test_the_block_is_one_buffer_and_its_bytes_count_once() -> None:
    cache = PagedAttentionCache(16)
    open_paged_caches((cache,), {})
    ((graph, args),) = by_dynamo(step, (cache, ROWS, AT))
    taskgraph = record(graph, args)
    (state,) = [b for b in taskgraph.buffers if b.kind is BufferKind.STATE]
    assert state.nbytes == 16 * 3 * 4
    cache.block.zero_()
    expected = step(cache, ROWS, AT)
    cache.block.zero_()
    assert torch.equal(replay(taskgraph, args)[0], expected)


def test_memory_that_lies_otherwise_is_recorded_by_itself() -> None:
    def function(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return keys.add_(1) + values

    def views(first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = torch.zeros(12)
        found = block[first : first + 4], block[second : second + 4]
        for view in found:
            setattr(view, SHARES_MEMORY, True)
        return found

    graph = traced(function, *views(0, 2))
    assert graph.sharing_of(views(0, 2)) == graph.sharing_of(views(0, 2))
    assert graph.sharing_of(views(0, 2)) != graph.sharing_of(views(0, 4))
    apart = views(0, 2)[0], views(0, 2)[1]
    assert graph.sharing_of(apart) != graph.sharing_of(views(0, 2))
    for args in (views(0, 2), views(0, 4), views(4, 3), apart):
        expected = function(*(a.clone() for a in args)) if args is apart else None
        found = replay(record(graph, args), args)[0]
        for arg in args:
            arg.untyped_storage().fill_(0)
        assert torch.equal(found, function(*args) if expected is None else expected)


def test_a_range_of_sizes_is_recorded_for_each_way_that_memory_lies() -> None:
    def function(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return rows * 2 + keys.sum() + values.sum()

    def call(num_rows: int, offset: int) -> tuple[torch.Tensor, ...]:
        block = torch.zeros(12)
        views = block[:4], block[offset : offset + 4]
        for view in views:
            setattr(view, SHARES_MEMORY, True)
        return torch.ones(num_rows), *views

    runs = by_dynamo(function, call(20, 2), call(21, 2), call(22, 3), call(23, 2))
    graph = runs[-1][0]
    recordings = Recordings(graph)
    (_, *others) = [
        recordings.bucket_of(args, lambda *_: None) for found, args in runs if found is graph
    ]
    assert [bucket.is_new for bucket in others if bucket is not None] == [True, False]


@pytest.mark.parametrize("position", [0, 1])
def test_tensors_without_the_mark_have_buffers_of_their_own(position: int) -> None:
    block = torch.zeros(8)
    args = block[:4], block[2:6]
    setattr(args[position], SHARES_MEMORY, True)
    graph = traced(lambda a, b: a + b, *args)
    taskgraph = record(graph, args)
    assert sum(b.kind is BufferKind.INPUT for b in taskgraph.buffers) == 2
