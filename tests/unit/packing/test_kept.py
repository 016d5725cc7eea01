"""Packed matrices in a folder: what is read instead of packed, and what is packed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_finepage.packing import kept
from ds_finepage.packing.form import Packed, PackedForm, pack
from ds_finepage.packing.kept import pack_once

WEIGHT = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
HALF = WEIGHT.to(torch.bfloat16)


@pytest.fixture
def form(tmp_path: Path) -> PackedForm:
    return PackedForm(4, 16, kept_in=tmp_path / "new" / "packed")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the weights that are packed from now on."""
    names: list[str] = []

    def packs(weight: torch.Tensor, form: PackedForm, name: str) -> Packed:
        names.append(name)
        return pack(weight, form, name)

    monkeypatch.setattr(kept, "pack", packs)
    return names


def files(form: PackedForm) -> list[Path]:
    assert form.kept_in is not None
    return sorted(form.kept_in.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 64), (2, 4, 64)], ids=["a matrix", "experts"])
def test_a_weight_is_packed_once(
    form: PackedForm, times: list[str], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = WEIGHT.view(shape).to(dtype)
    expected = pack(weight, form)
    for name in ("first", "second"):
        found = pack_once(weight.clone(), form, name)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs) and ours.dtype is theirs.dtype
    assert times == ["first"]
    assert [path.suffix for path in files(form)] == [".safetensors"]


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [
        pytest.param(WEIGHT, WEIGHT.neg(), {}, id="values"),
        pytest.param(WEIGHT, WEIGHT.view(4, 128), {}, id="shape"),
        pytest.param(HALF, HALF.view(torch.float16), {}, id="dtype"),
        pytest.param(WEIGHT, WEIGHT, {"bits": 8}, id="bits"),
        pytest.param(WEIGHT, WEIGHT, {"group": 32}, id="group"),
    ],
)
def test_another_weight_or_form_is_packed_again(
    form: PackedForm,
    times: list[str],
    first: torch.Tensor,
    second: torch.Tensor,
    changes: dict[str, int],
) -> None:
    pack_once(first, form, "first")
    another = replace(form, **changes)
    found = pack_once(second, another, "second")
    assert times == ["first", "second"]
    assert all(map(torch.equal, found, pack(second, another)))


def test_a_weight_that_lies_the_other_way_is_the_same_weight(
    form: PackedForm, times: list[str]
) -> None:
    pack_once(WEIGHT, form, "first")
    pack_once(WEIGHT.t().contiguous().t(), form, "second")
    assert times == ["first"]


def test_another_version_reads_no_file_of_this_one(
    form: PackedForm, times: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_once(WEIGHT, form, "first")
    monkeypatch.setattr(kept, "VERSION", kept.VERSION + 1)
    pack_once(WEIGHT, form, "second")
    assert times == ["first", "second"]


def test_a_file_that_was_cut_short_is_written_again(form: PackedForm, times: list[str]) -> None:
    pack_once(WEIGHT, form, "first")
    (path,) = files(form)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert all(map(torch.equal, pack_once(WEIGHT, form, "second"), pack(WEIGHT, form)))
    assert path.read_bytes() == whole and times == ["first", "second"]


def test_a_disk_that_is_full_leaves_no_file_that_is_read(
    form: PackedForm, times: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(parts: object, path: Path) -> None:
        path.write_bytes(b"")
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(kept, "save_file", fills)
        with pytest.raises(OSError, match="No space left"):
            pack_once(WEIGHT, form, "first")
    assert [path.suffix for path in files(form)] != [".safetensors"]
    pack_once(WEIGHT, form, "second")
    assert times == ["first", "second"]


def test_without_a_folder_or_without_bytes_nothing_is_kept(
    form: PackedForm, times: list[str]
) -> None:
    pack_once(WEIGHT, replace(form, kept_in=None), "no folder")
    assert pack_once(WEIGHT.to("meta"), form, "no bytes").scales.is_meta
    assert times == ["no folder", "no bytes"]
    assert form.kept_in is not None and not form.kept_in.exists()


def test_a_folder_that_cannot_be_made_is_an_error(form: PackedForm) -> None:
    assert form.kept_in is not None
    form.kept_in.parent.write_text("")
    with pytest.raises(OSError, match="new"):
        pack_once(WEIGHT, form, "first")
