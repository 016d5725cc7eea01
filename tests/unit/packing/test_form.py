"""Weights as packed numbers: how far from the weight, how they lie, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from ds_finepage.errors import ConfigError
from ds_finepage.graph.packed import PACKED_FORMS
from ds_finepage.packing import form as form_module
from ds_finepage.packing.form import Packed, PackedForm, pack, unpack

FORMS = [PackedForm(bits, group) for bits in (4, 8) for group in (16, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(num_rows: int = 6, width: int = 128, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, width, generator=generator).mul(0.05).to(dtype)


def mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_unpacked_weights_are_near_the_weights(form: PackedForm, dtype: torch.dtype) -> None:
    given = weight(dtype=dtype)
    packed = pack(given, form)
    assert packed.numbers.dtype is torch.uint8 and packed.scales.dtype is dtype
    assert packed.numbers.shape == (6, 128 * form.bits // 8)
    assert packed.scales.shape == packed.minima.shape == (6, 128 // form.group)
    assert form.nbytes(given.numel(), given.itemsize) == sum(part.nbytes for part in packed)

    found = unpack(packed, form, dtype)
    assert found.dtype is dtype and found.shape == given.shape
    groups = given.float().unflatten(1, (-1, form.group))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    # Numbers that are spread evenly between the least and the largest weight of each group.
    step = (high - low) / (2**form.bits - 1)
    even = (groups - low).div(step).round() * step + low - groups
    rounding = mean_square(given.float() * torch.finfo(dtype).eps)
    assert mean_square(found.float() - given.float()) < 0.96 * mean_square(even) + rounding


def test_each_weight_is_its_number_times_scale_plus_minimum() -> None:
    form = PackedForm(8, 2)
    packed = pack(torch.tensor([[0.0, 255.0, -1.0, 254.0]]), form)
    assert packed.numbers.tolist() == [[0, 255, 0, 255]]
    assert packed.scales.tolist() == [[1.0, 1.0]] and packed.minima.tolist() == [[0.0, -1.0]]


def test_numbers_of_four_bits_lie_by_halves_of_their_group() -> None:
    packed = pack(torch.arange(16.0)[None], PackedForm(4, 16))
    assert packed.numbers.tolist() == [[low + 16 * (low + 8) for low in range(8)]]
    assert unpack(packed, PackedForm(4, 16), torch.float32).tolist() == [[*range(16)]]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_packed_beside_a_weight_changes_nothing(
    form: PackedForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(weight(), form)
    monkeypatch.setattr(form_module, "ELEMENTS_AT_ONCE", 256)
    row, by_rows = pack(weight()[2:3], form), pack(weight(), form)
    for at_once, alone, rows in zip(whole, row, by_rows, strict=True):
        assert torch.equal(at_once[2:3], alone) and torch.equal(at_once, rows)


def test_a_group_of_one_value_stays_that_value() -> None:
    given = torch.full((1, 64), 0.3)
    given[:, 32:] = 0
    form = PackedForm(4, 32)
    assert torch.equal(unpack(pack(given, form), form, torch.float32), given)


def test_shapes_are_known_without_data() -> None:
    real, meta = (pack(weight().to(device), PackedForm(4)) for device in ("cpu", "meta"))
    for one, other in zip(real, meta, strict=True):
        assert other.is_meta and (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 33, 100])
def test_a_cpu_unpacks_as_accelerators_do(num_rows: int, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    form = PackedForm(bits, 32)
    packed = pack(torch.randn(num_rows, 96, dtype=dtype), form)
    numbers = unpack(Packed(packed.numbers, *map(torch.ones_like, packed[1:])), form, dtype) - 1
    scales, minima = (part.unsqueeze(-1) for part in packed[1:])
    numbers = numbers.unflatten(1, (-1, 32))
    expected = torch.addcmul(minima, numbers, scales)
    if dtype == torch.float32:  # addcmul may round once there, and a CPU rounds twice
        expected = numbers * scales + minima
    assert torch.equal(unpack(packed, form, dtype), expected.flatten(1))


def test_forms_have_names() -> None:
    assert PackedForm.parse("int8") == PackedForm(8, 64)
    assert PackedForm.parse("int4", 32) == PackedForm(4, 32) and PackedForm(4).name == "int4"
    assert PackedForm.parse("int8+output") == PackedForm(8, 64, packs_output=True)
    assert [PackedForm.parse(name).name for name in PACKED_FORMS] == list(PACKED_FORMS)


def not_finite() -> torch.Tensor:
    given = weight()
    given[3, 5] = torch.inf
    return given


def packed_in_fours(shape: tuple[int, ...]) -> Callable[[], object]:
    return lambda: pack(torch.zeros(shape), PackedForm(4))


INTEGERS = torch.zeros(1, 64, dtype=torch.int8)
ODD_SHAPES = [(4,), (2, 2, 2, 64), (0, 64), (4, 0), (2, 0, 64)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(PackedForm, b), f"into {b} bits. Write 4 or 8") for b in (0, 2, 16)),
        *(
            (partial(PackedForm, 4, group), f"groups of {group}. Write an even number")
            for group in (-2, 0, 1, 33)
        ),
        *((packed_in_fours(shape), "is not a matrix") for shape in ODD_SHAPES),
        (
            lambda: pack(weight(2, 96), PackedForm(4), "a.weight"),
            r"a.weight has rows of 96.*groups of 64.*divides 96",
        ),
        (lambda: pack(INTEGERS, PackedForm(4)), "a weight is torch.int8"),
        (lambda: pack(not_finite(), PackedForm(4)), "not finite"),
        (lambda: PackedForm.parse("int3"), r"as 'int3'. Write int4 or int4\+output or int8 or"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
