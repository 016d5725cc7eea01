"""Tensors of a file whose ops run when a part of the result is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("deepspeed")

from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed import deferred
from ds_finepage.integrations.deepspeed.checkpoint_files import open_file
from ds_finepage.integrations.deepspeed.deferred import DeferredTensor, part_of, whole_of

PLAIN = {
    "a": torch.arange(48.0).view(8, 6) / 7,
    "b": -torch.arange(48.0).view(8, 6) / 7,
    "scale": torch.tensor(3.5),
    "cube": torch.arange(120.0).view(4, 5, 6),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "PIECE_BYTES", 100)


@pytest.fixture(name="unread")
def _unread(tmp_path: Path) -> dict[str, Any]:
    save_file(PLAIN, tmp_path / "file.safetensors")
    opened: Any = open_file(tmp_path / "file.safetensors")
    return {name: DeferredTensor.of(tensor.region) for name, tensor in opened.items()}


def read(tensor: Any, part: deferred.Part | None = None) -> torch.Tensor:
    part = whole_of(tensor) if part is None else part
    found = torch.full([len(each) for each in part], -1.0, dtype=tensor.dtype)
    tensor.read_into(found, part)
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_a_whole_tensor_is_read(unread: dict[str, Any], name: str) -> None:
    assert torch.equal(read(unread[name]), PLAIN[name])
    assert torch.equal(unread[name].value(), PLAIN[name])


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


def test_an_op_that_writes_is_refused(unread: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded shard by shard: its conversion writes"):
        unread["a"].zero_()


def test_only_ranges_of_a_tensor_are_parts_of_it() -> None:
    whole = torch.empty(4, 6, device="meta")
    assert part_of(whole, whole.narrow(1, 2, 3)) == (range(4), range(2, 5))
    assert part_of(whole, whole) == whole_of(whole)
    assert part_of(whole, whole.t()) is None
    assert part_of(whole, whole.clone()) is None
    assert part_of(whole, torch.cat(whole.chunk(2))) is None
    assert part_of(whole, whole.view(2, 12)) is None
    assert part_of(whole, whole.as_strided((2, 6), (6, 1), 3)) is None
