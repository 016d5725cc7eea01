"""Products that unpack in registers: the kernel, interpreted and compiled, and who chooses it.

The kernel needs Triton, which torch brings in its builds for CUDA, ROCm and XPU.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch

from ds_finepage.graph.packed import CUT_ROWS, FUSED_ROWS
from ds_finepage.packing import fused, op
from ds_finepage.packing.form import Packed, PackedForm
from ds_finepage.packing.linear import PackedWeight
from ds_finepage.packing.model import pack_model, set_fused
from ds_finepage.packing.stock import StockPacked, pack_as_stock
from tests.unit.packing.products import everywhere, packed_layer_of, packed_weight, rows_of

__all__ = ["everywhere"]

HAS_TRITON = find_spec("triton") is not None
HERE = Path(__file__).parent
REGISTERS = 65536
"""Of each multiprocessor of each card."""

LATENCY_NS = 400
"""Of device memory; see [Note: bytes in flight] in packing/fused.py."""

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


# --- the kernel ------------------------------------------------------------------------------


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q"]
        + ["-p", "no:cacheprovider", str(HERE / "interpreted_kernel.py")],
        capture_output=True,
        text=True,
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


CARDS = {
    70: (900 / 80, 2048),  # V100
    75: (616 / 68, 1024),  # RTX 2080 Ti
    80: (2039 / 108, 2048),  # A100, 80 GB
    86: (1008 / 84, 1536),  # RTX 3090 Ti
    89: (272 / 24, 1536),  # RTX 4060
    90: (4800 / 132, 2048),  # H200
    100: (8000 / 148, 2048),  # B200
    120: (448 / 30, 1536),  # RTX 5060
}
"""Compute capability -> GB/s of device memory for each multiprocessor, and its threads, of the card
that asks most of one. From the vendor's data sheets."""

TYPES = {"numbers": "*u8", "ends": "*i32", "num_out": "i32", "num_rows": "i32", "step": "i32"}


def slow(parameter: object) -> Any:
    """Leave a case to the slow tests."""
    return pytest.param(parameter, marks=pytest.mark.slow)


def resources(
    capability: int, form: PackedForm, dtype: str, num_experts: int, is_alone: bool
) -> tuple[dict[str, int], dict[str, Any], Any]:
    """Compile a form of the kernel for a card.

    Returns:
        What cuobjdump finds (``REG`` of a thread, ``STACK`` and ``LOCAL`` bytes of spills), the
        constants of the form, and what Triton knows of the compiled kernel.
    """
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    targets: Any = importlib.import_module("triton.backends.compiler")
    kernel: Any = importlib.import_module(fused.KERNEL).product
    constants = fused.constants_of(
        form, num_groups=4096 // form.group, num_experts=num_experts, is_alone=is_alone
    )
    constants["HAS_BIAS"] = not num_experts
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, dtype)
        for name in kernel.arg_names
    }
    aligned = {(kernel.arg_names.index("numbers"),): [["tt.divisibility", 16]]}
    made = triton.compile(
        compiler.ASTSource(kernel, signature, constants, aligned),
        target=targets.GPUTarget("cuda", capability, 32),
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(made.asm["cubin"])
        binary.flush()
        shown = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", binary.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", shown)}
    return found, constants, made.metadata


@needs_triton
@pytest.mark.parametrize("capability", [80, *(slow(each) for each in CARDS if each != 80)])
def test_no_form_spills_and_one_row_keeps_the_memory_busy(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a multiprocessor has in flight; see [Note: bytes in flight]."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bytes_a_ns, threads = CARDS[capability]
    triton_version = tuple(int(n) for n in version("triton").split(".")[:2])
    kinds = ((0, True), (8, True), (0, False))
    for dtype, bits, (num_experts, is_alone) in product(("*fp16", "*bf16"), (4, 8), kinds):
        form = PackedForm(bits)
        found, constants, made = resources(capability, form, dtype, num_experts, is_alone)
        assert found["STACK"] == found["LOCAL"] == 0, (dtype, form, num_experts, is_alone)
        if not is_alone or (capability == 100 and triton_version < (3, 8)):
            continue  # Triton 3.5 takes 104 registers for a B200, and leaves 15% too few in flight
        registers = -(-found["REG"] // 8) * 8  # a warp gets them by 256
        threads_of_program = 32 * made.num_warps
        programs = min(REGISTERS // (registers * threads_of_program), threads // threads_of_program)
        row_bytes = fused.BYTES_AT_ONCE[True]
        row_bytes += 4 * row_bytes // (form.group * bits // 8)  # a scale and a minimum a group
        in_flight = programs * constants["OUTPUTS"] * row_bytes
        assert in_flight >= bytes_a_ns * LATENCY_NS, (dtype, form, found)


def test_all_programs_together_keep_the_memory_busy() -> None:
    """The rows of a small weight, 4096, on the card that asks most of them, an H200."""
    assert 4096 * fused.BYTES_AT_ONCE[True] >= 4800 * LATENCY_NS


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
    matrices = PackedWeight(packed_weight(form, 2, 8, 18), form)
    for layer in (matrices, StockPacked(matrices)):
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
    packed = packed_layer_of(torch.nn.Linear(64, 8), PackedForm(4, fused=True))
    x = rows_of(2, 64)
    torch.testing.assert_close(packed(x), torch.nn.functional.linear(x, packed.weight, packed.bias))
    assert fused_calls == []
    assert fused.why_not(x.device) is not None


def test_a_form_is_the_same_form_when_it_is_fused() -> None:
    assert PackedForm(4, fused=True) == PackedForm(4)
    assert "fused" not in PackedForm(4, fused=True).name


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    fused.why_not.cache_clear()
    assert "Triton is not installed" in str(fused.why_not(torch.device("cpu")))
    fused.why_not.cache_clear()


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
    fused.why_not.cache_clear()
    found = fused.why_not(torch.device(kind))
    fused.why_not.cache_clear()
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
