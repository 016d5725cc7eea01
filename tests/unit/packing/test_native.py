"""Products with a packed weight that a CPU unpacks in registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.packing import native, op
from ds_finepage.packing.form import Packed, PackedForm, unpack
from tests.unit.packing.products import packed_weight, rows_of

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="needs a C compiler")

NUM_OUT = 70


def product(rows: torch.Tensor, packed: Packed, form: PackedForm, bias: Any = None) -> torch.Tensor:
    found = rows.new_full((len(rows), len(packed.numbers)), torch.nan)
    native.product(rows, packed, bias, form, found)
    return found


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("group", [64, 40, 6])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_product_with_the_unpacked_weight(
    bits: int, group: int, dtype: torch.dtype, num_rows: int
) -> None:
    form = PackedForm(bits, group)
    packed = packed_weight(form, NUM_OUT, 6 * group, dtype=dtype)
    rows, bias = rows_of(num_rows, 6 * group, dtype=dtype), rows_of(NUM_OUT, dtype=dtype)
    wide = Packed(packed.numbers, packed.scales.double(), packed.minima.double())
    weight = unpack(wide, form, torch.float64).t()
    exact, limit = rows.double() @ weight, rows.double().abs() @ weight.abs()
    found = product(rows, packed, form)
    assert found.dtype is dtype
    limit *= torch.finfo(dtype).eps
    assert ((found - exact).abs() <= limit).all()
    assert ((product(rows, packed, form, bias) - (exact + bias)).abs() <= 2 * limit).all()


def test_a_result_is_the_same_in_any_cut_beside_any_rows_and_with_any_threads() -> None:
    form = PackedForm(4)
    packed, rows = packed_weight(form, NUM_OUT, 256), rows_of(5, 256)
    expected = product(rows, packed, form)
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(product(rows[1:2], packed, form), expected[1:2])
        joint = torch.full_like(expected, torch.nan)
        for begin, end in ((0, 64), (64, NUM_OUT)):
            cut = Packed(*(part[begin:end] for part in packed))
            native.product(rows, cut, None, form, joint[:, begin:end])
        assert torch.equal(joint, expected)
    torch.set_num_threads(before)


def test_rows_that_are_not_dense_are_read_as_they_lie() -> None:
    form = PackedForm(8)
    packed, rows = packed_weight(form, NUM_OUT, 128), rows_of(128, 2).t()
    assert not rows.is_contiguous()
    assert torch.equal(product(rows, packed, form), product(rows.contiguous(), packed, form))


def test_few_rows_are_multiplied_so_and_others_are_not() -> None:
    packed, wide = (
        packed_weight(PackedForm(4), 8, 64, dtype=d) for d in (torch.float32, torch.double)
    )
    rows = rows_of(native.FEW_ROWS + 1, 64)
    assert native.takes(rows[1:], packed) and not native.takes(rows, packed)
    assert not native.takes(rows[:0], packed) and not native.takes(rows[1:].to("meta"), packed)
    assert not native.takes(rows[1:].double(), wide)


def test_the_op_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    form = PackedForm(4)
    packed, rows, bias = packed_weight(form, NUM_OUT, 128), rows_of(2, 128), rows_of(NUM_OUT)
    expected = product(rows, packed, form, bias)
    monkeypatch.setattr(op, "unpack", None)
    assert torch.equal(op.packed_linear(rows, *packed, bias, 4, 64), expected)


def test_it_has_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(native, "_compiled", lambda: lambda *args: given.append(args[-1]))
    monkeypatch.setattr(native, "num_threads", lambda wanted: -wanted)
    product(rows_of(1, 64), packed_weight(PackedForm(4), 8, 64), PackedForm(4))
    assert given == [-torch.get_num_threads()]


def test_without_a_compiler_the_op_unpacks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    form = PackedForm(4)
    packed, rows = packed_weight(form, NUM_OUT, 128), rows_of(2, 128)
    expected = product(rows, packed, form)
    monkeypatch.setattr(native, "compiled", lambda *_, **__: "there is no C compiler")
    assert native.why_not() == "there is no C compiler"
    assert not native.takes(rows, packed)
    torch.testing.assert_close(op.packed_linear(rows, *packed, None, 4, 64), expected)
