"""The kernel of the fused products in Triton's interpreter, against sums in float64.

Triton decides when it is imported whether it compiles or interprets. So test_fused.py runs this
file in a process of its own, and pytest does not find it by its name.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from ds_finepage.graph.packed import CUT_ROWS, FUSED_ROWS
from ds_finepage.packing import op
from ds_finepage.packing.form import Packed, PackedForm, unpack
from tests.unit.packing.products import everywhere, packed_weight, product, rows_of

__all__ = ["everywhere"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTH = {2: 14, 6: 18, 64: 192, 300: 600}
"""Size of a group -> the width of a weight in it."""


@pytest.fixture(autouse=True)
def _rounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the interpreter bfloat16: it cuts off where cards round, and multiplies the bits."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def converted(given: Any, from_: Any, to: Any, rounding: Any) -> Any:
        if (from_.name, to.name) != ("fp32", "bf16"):
            return convert(given, from_, to, rounding)
        rounded = torch.from_numpy(given.copy()).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy().reshape(given.shape)

    def dotted(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar.name == "bf16":
            a, b = (
                interpreter.TensorHandle(
                    torch.from_numpy(each.data).view(torch.bfloat16).float().numpy(),
                    interpreter.tl.float32,
                )
                for each in (a, b)
            )
        return dot(self, a, b, *others)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dotted)
    yield


def assert_sums(
    found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Compare with sums in float64, as far as the order of a sum in float32 is worth.

    Each rounding is at most half a unit of a partial sum. Partial sums of n products are about as
    large as the root of the sum of their squares, and n roundings that are independent add up to
    the root of n of them (Higham and Mary 2019, A new approach to probabilistic rounding error
    analysis).

    Args:
        found: (rows, out).
        x: (rows, in).
        weight: (out, in).
        bias: (out,), or none.
    """
    exact = x.double() @ weight.double().t()
    squares = x.double() ** 2 @ (weight.double() ** 2).t()
    if bias is not None:
        exact, squares = exact + bias.double(), squares + bias.double() ** 2
    unit = torch.finfo(torch.float32).eps / 2
    slack = unit * math.sqrt(x.shape[1] + 1) * squares.sqrt()
    slack += torch.finfo(found.dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= slack).all()


@pytest.mark.usefixtures("unpacks")  # a CPU that unpacks in registers rounds no weight
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("group", WIDTH)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_a_sum_in_float32_that_is_rounded_once(
    dtype: torch.dtype, bits: int, group: int, num_rows: int
) -> None:
    form, num_out = PackedForm(bits, group), 37
    packed = packed_weight(form, num_out, WIDTH[group], dtype=dtype)
    x, bias = rows_of(num_rows, WIDTH[group], dtype=dtype), rows_of(num_out, dtype=dtype)
    weight = unpack(packed, form, dtype)
    assert_sums(product(x, packed, form, bias), x, weight, bias)
    assert_sums(op.packed_linear(x, *packed, bias, bits, group), x, weight, bias)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_it_unpacks_to_the_very_numbers(dtype: torch.dtype, bits: int) -> None:
    form, width = PackedForm(bits, 6), 18
    packed = packed_weight(form, 5, width, dtype=dtype)
    ones = torch.eye(width, dtype=dtype)
    each = torch.cat([product(row, packed, form) for row in ones.split(1)])
    assert torch.equal(each, unpack(packed, form, dtype).t())
    several = torch.cat([product(rows, packed, form) for rows in ones.split(FUSED_ROWS)])
    assert torch.equal(several, each)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("num_rows", [1, FUSED_ROWS])
def test_a_cut_weight_gives_the_same_bits(num_rows: int) -> None:
    form, num_out = PackedForm(4, 32), 2 * CUT_ROWS + 100
    packed, x = packed_weight(form, num_out, 64), rows_of(num_rows, 64)
    bias = rows_of(num_out)
    whole = op.packed_linear(x, *packed, bias, 4, 32, True)
    found = torch.full_like(whole, torch.nan)
    for begin, end in pairwise((0, CUT_ROWS, 2 * CUT_ROWS, num_out)):
        cut = [part[begin:end] for part in packed]
        op.packed_linear(x, *cut, bias[begin:end], 4, 32, True, out=found[:, begin:end])
    assert torch.equal(found, whole)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("ends", [[0, 1, 1, 3, 3], [3, 3, 3, 3, 3], [0, 0, 0, 0, 2]], ids=str)
def test_each_row_has_its_expert(ends: list[int]) -> None:
    form, num_rows, num_out = PackedForm(4, 6), 3, 21
    packed, x = packed_weight(form, len(ends), num_out, 18), rows_of(num_rows, 18)
    of_experts = torch.tensor(ends, dtype=torch.int32)
    found = op.packed_grouped_linear(x, *packed, of_experts, 4, 6, True)
    assert not found[ends[-1] :].any()  # behind the last end
    for row in range(ends[-1]):
        expert = next(e for e, end in enumerate(ends) if row < end)
        matrix = Packed(*(part[expert] for part in packed))
        assert_sums(found[row : row + 1], x[row : row + 1], unpack(matrix, form, x.dtype))
        assert torch.equal(found[row : row + 1], product(x[row : row + 1], matrix, form))
