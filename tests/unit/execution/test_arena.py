"""Arena, pinned pool and the views of them."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.execution.arena import POISON, Arena, HostPool, view_of
from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.taskgraph import TensorView

CPU = torch.device("cpu")


def view(
    dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> TensorView:
    return TensorView(0, 0, dtype, shape, stride, offset)


def counting(nbytes: int) -> Arena:
    arena = Arena(nbytes, CPU)
    arena.bytes.copy_(torch.arange(nbytes, dtype=torch.uint8))
    return arena


def test_a_slice_is_the_arenas_own_memory() -> None:
    arena = counting(256)
    arena.slice(Extent(64, 64), 2).zero_()
    assert arena.bytes[62:68].tolist() == [62, 63, 0, 0, 66, 67]
    assert arena.slice(Extent(64, 128), 3).tolist() == [0, 0, 66]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_a_view_begins_where_its_extent_does(dtype: str) -> None:
    arena = Arena(256, CPU)
    arena.bytes.zero_()
    found = arena.view(view(dtype, (2, 3), (3, 1)), Extent(64, 64))
    assert found.dtype is getattr(torch, dtype) and found.shape == (2, 3)
    assert found.data_ptr() == arena.bytes.data_ptr() + 64


def test_a_view_has_the_strides_and_the_offset_of_the_captured_tensor() -> None:
    arena = Arena(256, CPU)
    whole = arena.view(view("float32", (3, 4), (4, 1)), Extent(64, 64))
    whole.copy_(torch.arange(12.0).view(3, 4))
    turned = arena.view(view("float32", (2, 3), (1, 4), offset=1), Extent(64, 64))
    assert torch.equal(turned, whole.t()[1:3])


def test_a_tensors_own_offset_does_not_count() -> None:
    base = torch.arange(8.0)
    found = view_of(base[5:], view("float32", (3,), (1,)), 4 * 2)
    assert found.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("used_in", [True, False])
def test_views_can_be_written_in_and_out_of_inference_mode(made_in: bool, used_in: bool) -> None:
    with torch.inference_mode(made_in):
        arena = Arena(64, CPU)
        found = arena.view(view("float32", (4,), (1,)), Extent(0, 64))
    with torch.inference_mode(used_in), torch.no_grad():
        found.fill_(1)
        torch.add(found, found, out=found)
    assert not found.is_inference() and found.tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_poison_is_nan_in_every_float(dtype: torch.dtype) -> None:
    assert torch.full((16,), POISON, dtype=torch.uint8).view(dtype).isnan().all()


def test_a_pool_starts_empty_and_grows() -> None:
    pool = HostPool(pinned=False)
    assert pool.bytes.numel() == 0
    pool.reserve(128)
    assert pool.bytes.numel() == 128
    before = pool.bytes
    pool.reserve(64)
    assert pool.bytes is before


def test_slots_can_be_written_though_reserved_in_inference_mode() -> None:
    pool = HostPool(pinned=False)
    with torch.inference_mode():
        pool.reserve(64)
    pool.slice(0, 64).fill_(1)
    assert not pool.bytes.is_inference()


def test_views_need_no_grad() -> None:
    found = view_of(torch.ones(4, requires_grad=True), view("float32", (4,), (1,)))
    assert not found.requires_grad


def test_a_slot_is_the_pools_own_memory() -> None:
    pool = HostPool(pinned=False)
    pool.reserve(128)
    pool.bytes.zero_()
    pool.slice(64, 2).fill_(7)
    assert pool.bytes.nonzero().flatten().tolist() == [64, 65]
