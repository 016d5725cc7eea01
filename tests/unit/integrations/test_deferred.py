"""Tensors of a file whose ops run when a part of the result is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("deepspeed")

from ds_finepage.errors import ConfigError, StoreError
from ds_finepage.integrations.deepspeed import deferred
from ds_finepage.integrations.deepspeed.deferred import (
    DeferredTensor,
    open_files,
    part_of,
    whole_of,
)

PLAIN = {
    "a": torch.arange(48.0).view(8, 6) / 7,
    "b": -torch.arange(48.0).view(8, 6) / 7,
    "scale": torch.tensor(3.5),
    "cube": torch.arange(120.0).view(4, 5, 6),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(15.0).view(3, 5).to(torch.float16),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "PIECE_BYTES", 100)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    save_file(PLAIN, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@pytest.fixture(name="unread")
def _unread(path: Path) -> dict[str, Any]:
    found: Any = open_files([path])
    assert found.keys() == PLAIN.keys()
    return found


def read(tensor: Any, part: deferred.Part | None = None) -> torch.Tensor:
    part = whole_of(tensor) if part is None else part
    found = torch.ones([len(each) for each in part], dtype=tensor.dtype)
    tensor.read_into(found, part)
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_a_whole_tensor_is_read(unread: dict[str, Any], name: str) -> None:
    plain = PLAIN[name]
    assert unread[name].dtype is plain.dtype and unread[name].device.type == "cpu"
    for found in (read(unread[name]), unread[name].value(), plain.clone().copy_(unread[name])):
        assert found.shape == plain.shape and torch.equal(found, plain)


@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("sizes", ((4, 2), (1, 5), (0, 6)))
def test_a_shard_is_read_alone(
    unread: dict[str, Any], dim: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut by rows reads its own elements; a cut by columns never more than a piece at once."""
    elements: list[int] = []
    stock = deferred.Region.read

    def spy(region: Any, start: int, stop: int) -> torch.Tensor:
        elements.append(stop - start)
        return stock(region, start, stop)

    monkeypatch.setattr(deferred.Region, "read", spy)
    sizes = (sizes[0] + 2 * (dim == 0), sizes[1])
    whole = torch.empty(8, 6, device="meta")
    for cut, plain in zip(whole.split(sizes, dim), PLAIN["a"].split(sizes, dim), strict=True):
        part = part_of(whole, cut.detach())
        assert part is not None
        elements.clear()
        assert torch.equal(read(unread["a"], part), plain)
        assert sum(elements) == (plain.numel() if dim == 0 else 48 * bool(plain.numel()))
        assert max(elements, default=0) <= 25  # PIECE_BYTES


def test_a_cast_runs_on_the_shard(unread: dict[str, Any]) -> None:
    cast = unread["a"][...].to(device="cpu", dtype=torch.bfloat16)
    parameter: Any = torch.nn.Parameter(cast)
    assert isinstance(parameter, DeferredTensor) and parameter.dtype is torch.bfloat16
    part = (range(3, 5), range(6))
    assert torch.equal(read(parameter, part), PLAIN["a"][3:5].bfloat16())
    back = cast.float()
    assert torch.equal(read(back, part), PLAIN["a"][3:5].bfloat16().float())  # rounded once


@pytest.mark.parametrize("dim", (0, 1, 2))
@pytest.mark.parametrize("join", (torch.stack, torch.cat))
def test_joined_tensors_are_read_one_by_one(unread: dict[str, Any], join: Any, dim: int) -> None:
    if join is torch.cat and dim == 2:
        return
    made = join([unread["a"], unread["b"], torch.zeros(8, 6)], dim=dim)
    expected = join([PLAIN["a"], PLAIN["b"], torch.zeros(8, 6)], dim=dim)
    assert isinstance(made, DeferredTensor)
    assert torch.equal(read(made), expected)
    assert torch.equal(read(made.bfloat16()), expected.bfloat16())
    part = (range(1, 2), *map(range, expected.shape[1:]))
    assert torch.equal(read(made, part), expected[1:2])


def test_other_ops_run_on_whole_tensors(unread: dict[str, Any]) -> None:
    made = torch.stack([unread["a"], unread["b"]]).transpose(1, 2).contiguous() * unread["scale"]
    expected = torch.stack([PLAIN["a"], PLAIN["b"]]).transpose(1, 2).contiguous() * 3.5
    assert isinstance(made, DeferredTensor) and made.shape == expected.shape
    assert torch.equal(read(made), expected)
    second = unread["a"].split([5, 3])[1]
    assert isinstance(second, DeferredTensor) and torch.equal(read(second), PLAIN["a"][5:])


def test_an_op_without_a_shape_before_it_ran_runs_now(unread: dict[str, Any]) -> None:
    assert torch.equal(unread["a"], unread["a"])
    assert unread["scale"].item() == 3.5
    assert torch.equal(unread["a"].nonzero(), PLAIN["a"].nonzero())


def test_what_cannot_be_copied_by_rows_is_copied(unread: dict[str, Any]) -> None:
    a = PLAIN["a"]
    assert torch.equal(torch.empty(6, 8).T.copy_(unread["a"]), a)
    assert torch.equal(torch.empty(2, 8, 6).copy_(unread["a"])[1], a)
    assert torch.equal(torch.empty(8, 6, dtype=torch.bfloat16).copy_(unread["a"]), a.bfloat16())


def test_a_tensor_leaves_for_another_device_at_once(unread: dict[str, Any]) -> None:
    assert type(unread["a"].to("meta")) is torch.Tensor


def test_a_change_lasts(unread: dict[str, Any], path: Path) -> None:
    unread["a"].mul_(2)
    assert torch.equal(read(unread["a"]), PLAIN["a"] * 2)
    assert torch.equal(read(unread["a"].t().contiguous()), PLAIN["a"].t() * 2)
    assert torch.equal(read(open_files([path])["a"]), PLAIN["a"])  # type: ignore[index]


@pytest.mark.parametrize("use", [lambda t: t[2:4], lambda t: t.t(), lambda t: t * 2])
@pytest.mark.parametrize("writes_first", [False, True])
def test_a_write_beside_another_use_is_refused(
    unread: dict[str, Any], use: Any, writes_first: bool
) -> None:
    """A view would have to see it, and a result that was computed before must not."""
    made = use(unread["a"])
    written = unread["a"] if writes_first else made
    if made.is_alone and not writes_first:  # a tensor of its own
        assert torch.equal(read(made.zero_()), torch.zeros(8, 6))
        return
    with pytest.raises(ConfigError, match="cannot be loaded piece by piece: its conversion writes"):
        written.zero_()


def test_a_file_that_became_shorter_is_refused(unread: dict[str, Any], path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StoreError, match=r"file.safetensors ends within cube: .* load it again"):
        read(unread["cube"])


def test_files_with_another_dtype_are_left_to_stock(path: Path) -> None:
    other = path.with_name("other.safetensors")
    save_file({"a": torch.ones(2, dtype=torch.complex64)}, other)
    assert open_files([path, other]) is None


def test_only_ranges_of_a_tensor_are_parts_of_it() -> None:
    whole = torch.empty(4, 6, device="meta")
    assert part_of(whole, whole.narrow(1, 2, 3)) == (range(4), range(2, 5))
    assert part_of(whole, whole) == whole_of(whole)
    assert part_of(whole, whole.t()) is None
    assert part_of(whole.t(), whole.t()) is None
    assert part_of(whole[:1].expand(4, 6), whole[:1].expand(4, 6)) is None
    assert part_of(whole, whole.clone()) is None
    assert part_of(whole, torch.cat(whole.chunk(2))) is None
    assert part_of(whole, whole.view(2, 12)) is None
    assert part_of(whole, whole.as_strided((2, 6), (6, 1), 3)) is None
