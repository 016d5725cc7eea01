"""Products that unpack in registers: Triton's kernel in its interpreter, and who chooses it.

The kernel needs Triton: ``pip install --target DIR triton``, and DIR in PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage.graph.packed import CUT_ROWS, FUSED_ROWS
from ds_finepage.packing import fused, op
from ds_finepage.packing.experts import PackedMatrices
from ds_finepage.packing.form import Packed, PackedForm, pack, pack_each, unpack
from ds_finepage.packing.fused import fused_product
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import pack_model, set_fused
from ds_finepage.packing.stock import StockPackedMatrices, pack_as_stock

HAS_TRITON = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTH = {2: 14, 6: 18, 64: 192, 300: 600}
"""Size of a group -> the width of a weight in it."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton run its kernels in Python.

    Its interpreter cuts bfloat16 off where cards round, and multiplies matrices of its bits.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, fused.KERNEL, raising=False)
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
    sys.modules.pop(fused.KERNEL, None)  # it is not compiled


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU have fused products."""
    monkeypatch.setattr(op, "why_not", lambda where: None)


def packed_weight(form: PackedForm, *shape: int, dtype: torch.dtype = torch.float32) -> Packed:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    return pack(weight, form) if len(shape) == 2 else pack_each(weight, form)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype)


def product(x: torch.Tensor, packed: Packed, form: PackedForm, bias: Any = None) -> torch.Tensor:
    found = x.new_full((len(x), len(packed.numbers)), torch.nan)
    fused_product(x, packed, bias, form, found)
    return found


# --- the kernel ------------------------------------------------------------------------------


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("group", WIDTH)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_product_is_the_sliced_one(
    dtype: torch.dtype, bits: int, group: int, num_rows: int
) -> None:
    form, num_out = PackedForm(bits, group), 37
    packed = packed_weight(form, num_out, WIDTH[group], dtype=dtype)
    x, bias = rows_of(num_rows, WIDTH[group], dtype=dtype), rows_of(num_out, dtype=dtype)
    exact = x.double() @ unpack(packed, form, dtype).double().t() + bias.double()
    # The sums are of float32, and a result is rounded once.
    expected = exact.float().to(dtype)
    torch.testing.assert_close(
        product(x, packed, form, bias), expected, rtol=torch.finfo(dtype).eps, atol=2e-5
    )
    sliced = op.packed_linear(x, *packed, bias, bits, group)
    torch.testing.assert_close(product(x, packed, form, bias), sliced)


@needs_triton
@pytest.mark.usefixtures("interpreted")
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


@needs_triton
@pytest.mark.usefixtures("interpreted", "everywhere")
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


@needs_triton
@pytest.mark.usefixtures("interpreted", "everywhere")
@pytest.mark.parametrize("ends", [[0, 1, 1, 3, 3], [3, 3, 3, 3, 3], [0, 0, 0, 0, 2]], ids=str)
def test_each_row_has_its_expert(ends: list[int]) -> None:
    form, num_rows, num_out = PackedForm(4, 6), 3, 21
    packed, x = packed_weight(form, len(ends), num_out, 18), rows_of(num_rows, 18)
    of_experts = torch.tensor(ends, dtype=torch.int32)
    found = op.packed_grouped_linear(x, *packed, of_experts, 4, 6, True)
    assert not found[ends[-1] :].any()  # behind the last end
    sliced = op.packed_grouped_linear(x, *packed, of_experts, 4, 6)
    torch.testing.assert_close(found, sliced)
    for row in range(ends[-1]):
        expert = next(e for e, end in enumerate(ends) if row < end)
        matrix = Packed(*(part[expert] for part in packed))
        assert torch.equal(found[row : row + 1], product(x[row : row + 1], matrix, form))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ds_finepage.packing import fused, kernel
from ds_finepage.packing.form import PackedForm
types = {"numbers": "*u8", "ends": "*i32", "num_out": "i32", "num_rows": "i32", "step": "i32"}
for capability in (70, 75, 80, 90):
    for num_experts, is_alone in ((0, True), (8, True), (0, False)):
        constants = fused.constants_of(
            PackedForm(4), num_groups=64, num_experts=num_experts, is_alone=is_alone
        )
        constants["HAS_BIAS"] = not num_experts
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*fp16")
            for name in kernel.product.arg_names
        }
        source = ASTSource(kernel.product, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(capability, made.asm["ptx"].count("fma.rn.f32") > 0)
"""


@needs_triton
def test_it_compiles_for_cards(tmp_path: Path) -> None:
    """In a process of its own, because the interpreter leaves traces in Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        check=True,
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    cards = ("70", "75", "80", "90")
    assert done.stdout.splitlines() == [f"{card} True" for card in cards for _ in range(3)]


# --- who chooses it --------------------------------------------------------------------------


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take down the rows of each fused product, which multiplies as the sliced one does."""
    found = []

    def noted(rows: Any, packed: Any, bias: Any, form: Any, results: Any, ends: Any = None) -> None:
        found.append(len(rows))
        parts = (rows, *packed)
        if ends is None:
            results.copy_(op.packed_linear(*parts, bias, form.bits, form.group))
        else:
            results.copy_(op.packed_grouped_linear(*parts, ends, form.bits, form.group))

    monkeypatch.setattr(op, "fused_product", noted)
    return found


@pytest.mark.usefixtures("everywhere")
def test_few_rows_are_fused_where_the_layer_asks(fused_calls: list[int]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    pack_model(model, PackedForm(4))
    few, many = rows_of(2, 8, 64), rows_of(FUSED_ROWS + 1, 64)
    plain = model(few)
    assert fused_calls == []
    set_fused(model, True)
    assert torch.equal(model(few), plain) and fused_calls == [FUSED_ROWS]
    model(many)
    model(few[:0])
    assert fused_calls == [FUSED_ROWS]
    set_fused(model, False)
    model(few)
    assert fused_calls == [FUSED_ROWS]


@pytest.mark.usefixtures("everywhere")
def test_stock_layers_do_as_their_form_says(fused_calls: list[int]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    pack_as_stock(model, PackedForm(4, fused=True))
    model(rows_of(2, 64))
    assert fused_calls == [2]


@pytest.mark.usefixtures("everywhere")
def test_matrices_of_experts_do_as_their_form_says(fused_calls: list[int]) -> None:
    form = PackedForm(4, 6, fused=True)
    matrices = PackedMatrices(packed_weight(form, 2, 8, 18), form)
    for layer in (matrices, StockPackedMatrices(matrices)):
        layer(rows_of(3, 18), torch.tensor([1, 3], dtype=torch.int32))
        assert fused_calls == [3]
        fused_calls.clear()


@pytest.mark.usefixtures("everywhere")
def test_experts_are_fused_by_all_rows_together(fused_calls: list[int]) -> None:
    form = PackedForm(4, 6)
    packed = packed_weight(form, 2, 8, 18)
    for num_rows in (FUSED_ROWS, FUSED_ROWS + 1):
        ends = torch.tensor([1, num_rows], dtype=torch.int32)
        op.packed_grouped_linear(rows_of(num_rows, 18), *packed, ends, 4, 6, True)
    assert fused_calls == [FUSED_ROWS]


def test_a_cpu_slices_whatever_a_layer_asks(fused_calls: list[int]) -> None:
    packed = PackedLinear.from_linear(torch.nn.Linear(64, 8), PackedForm(4, fused=True))
    x = rows_of(2, 64)
    torch.testing.assert_close(packed(x), torch.nn.functional.linear(x, packed.weight, packed.bias))
    assert fused_calls == []
    assert fused.why_not(x.device) is not None


def test_a_form_is_the_same_form_when_it_is_fused() -> None:
    assert PackedForm(4, fused=True) == PackedForm(4)
    assert "fused" not in PackedForm(4, fused=True).name


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    fused._why_not.cache_clear()
    assert "Triton is not installed" in str(fused.why_not(torch.device("cpu")))
    fused._why_not.cache_clear()


@needs_triton
@pytest.mark.parametrize(("kind", "reason"), [("xpu", None), ("privateuseone", "compile")])
def test_triton_compiles_for_one_kind(
    kind: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = importlib.import_module("triton.runtime").driver

    class Xpu:
        def get_active_torch_device(self) -> torch.device:
            return torch.device("xpu")

    monkeypatch.setattr(type(driver), "active", property(lambda self: Xpu()))
    fused._why_not.cache_clear()
    found = fused.why_not(torch.device(kind))
    fused._why_not.cache_clear()
    assert found is None if reason is None else reason in str(found)


# --- on a card -------------------------------------------------------------------------------


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, FUSED_ROWS])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_card_gives_the_sliced_product_and_the_same_bits_when_cut(
    bits: int, num_rows: int
) -> None:
    form, num_out = PackedForm(bits), 3 * CUT_ROWS + 100
    packed = Packed(*(p.cuda() for p in packed_weight(form, num_out, 4096, dtype=torch.float16)))
    x = rows_of(num_rows, 4096, dtype=torch.float16).cuda()
    whole = op.packed_linear(x, *packed, None, bits, 64, True)
    sliced = op.packed_linear(x, *packed, None, bits, 64)
    torch.testing.assert_close(whole, sliced, rtol=2e-3, atol=5e-2)
    assert torch.equal(whole, op.packed_linear(x, *packed, None, bits, 64, True))
    for begin, end in pairwise((0, CUT_ROWS, 3 * CUT_ROWS, num_out)):
        cut = [part[begin:end].clone() for part in packed]
        assert torch.equal(op.packed_linear(x, *cut, None, bits, 64, True), whole[:, begin:end])
