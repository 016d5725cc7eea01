"""Packs a matrix into numbers of few bits, group by group, and unpacks it.

A group is a run of weights in one row. It has a scale and a minimum, and each weight of it is
``number * scale + minimum``. The numbers, scales and minima follow from the weight alone, whatever
is packed beside it.

[Note: how numbers lie]
Numbers of 8 bits lie in order, a byte each. A byte holds two numbers of 4 bits. The low half is a
number of the first half of its group. The high half is the number as far on in the second half. So
unpacking writes runs of numbers, and rows of the packed matrix are slices of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ds_finepage.errors import ConfigError
from ds_finepage.graph.packed import FORM_BITS, GROUP, PACKED_FORMS, UNPACKED, WITH_OUTPUT

ELEMENTS_AT_ONCE = 1 << 18
"""Weights that are packed together, in float32, so that packing a large matrix takes little."""

RANGES = {4: (1.0, 0.94, 0.88, 0.82), 8: (1.01, 1.0, 0.99)}
"""Bits -> ranges to begin with, as shares of the range of a group's weights. What is beyond such a
range is clipped, which pays where numbers are few."""

WIDE_ROWS = 32
"""Rows that a CPU unpacks together in float32, so that they stay in a core's cache."""

NUM_FITS = {4: 6, 8: 3}
"""Bits -> how often scale and minimum are fitted to the numbers, and the numbers to them."""


@dataclass(frozen=True)
class PackedForm:
    """How weights are packed.

    Attributes:
        bits: Of a number: 4 or 8.
        group: Weights in a row that have a scale and a minimum of their own.
        packs_output: Pack the output layer too.
        fused: Products of few rows unpack in registers, where the device can do that. It changes
            nothing that is packed, so forms are equal without it.
        kept_in: The folder that keeps what is packed for the next start; None keeps nothing.
    """

    bits: int
    group: int = GROUP
    packs_output: bool = False
    fused: bool = field(default=False, compare=False)
    kept_in: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(f"weights cannot be packed into {self.bits} bits. Write 4 or 8.")
        if self.group < 2 or self.group % 2:
            raise ConfigError(
                f"weights cannot be packed in groups of {self.group}. Write an even number, such "
                "as 64."
            )

    @classmethod
    def parse(cls, name: str, group: int = GROUP, kept_in: str | None = None) -> PackedForm:
        """Return the form with a name.

        Args:
            name: "int4" or "int8"; with "+output" behind it, the output layer is packed too.
            group: Weights in a group.
            kept_in: The folder that keeps what is packed.

        Raises:
            ConfigError: There is no such form.
        """
        if name not in PACKED_FORMS:
            forms = " or ".join(sorted(PACKED_FORMS))
            raise ConfigError(f"weights cannot be packed as {name!r}. Write {forms}.")
        bits = FORM_BITS[name.removesuffix(WITH_OUTPUT)]
        return cls(bits, group, name.endswith(WITH_OUTPUT), kept_in=kept_in)

    @property
    def name(self) -> str:
        """The name without the group, such as "int4" or "int4+output"."""
        return f"int{self.bits}{WITH_OUTPUT if self.packs_output else ''}"

    def nbytes(self, num_weights: int, itemsize: int) -> int:
        """Return the bytes of packed weights.

        Args:
            num_weights: How many.
            itemsize: Bytes of one before, and of a scale and of a minimum.
        """
        return num_weights * self.bits // 8 + 2 * itemsize * num_weights // self.group

    def require(self, shape: tuple[int, ...], name: str = "a weight") -> None:
        """Refuse a shape that cannot be packed.

        Args:
            shape: Of the weight: (out, in).
            name: Of the weight, for the message.

        Raises:
            ConfigError: It is not a matrix, or its rows are no whole number of groups.
        """
        if len(shape) != 2 or 0 in shape:
            raise ConfigError(
                f"{name} of shape {tuple(shape)} is not a matrix, so it cannot be packed."
            )
        if shape[1] % self.group:
            raise ConfigError(
                f"{name} has rows of {shape[1]}, which groups of {self.group} do not divide. "
                f"Choose a group that divides {shape[1]}."
            )


def packed_form(
    config: Any, weights: str | None, group: int = GROUP, *, fused: bool = False
) -> PackedForm | None:
    """Return the packed form that a user asks for; None if the weights are not to be packed.

    Args:
        config: The model's config, of transformers.
        weights: "bf16", "int8" or "int4"; None leaves the weights as they are.
        group: Numbers that share a scale.
        fused: Products of few rows unpack in registers.

    Raises:
        ConfigError: Unknown form, a group that cannot be used, or a model that is quantised
            already.
    """
    if weights is None:
        return None
    own = getattr(config, "quantization_config", None)
    if own is not None:
        method = own.get("quant_method") if isinstance(own, dict) else None
        raise ConfigError(
            f"weights: {weights!r} cannot be had, because the model is quantised already "
            f"(quantization_config: {method or 'unknown method'}). Leave the option out, or give "
            f"the model that was quantised."
        )
    if weights == UNPACKED:
        return None
    return replace(PackedForm.parse(weights, group), fused=fused)


class Packed(NamedTuple):
    """A packed matrix.

    Attributes:
        numbers: uint8, (out, in * bits / 8); see [Note: how numbers lie].
        scales: One a group, (out, in / group), of the weight's dtype.
        minima: Likewise.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor


def pack(weight: torch.Tensor, form: PackedForm, name: str = "a weight") -> Packed:
    """Pack a matrix, or several matrices, each by itself.

    Args:
        weight: (out, in) or (matrices, out, in), of a floating dtype; on the meta device only
            shapes are made.
        form: How to pack it.
        name: Of the weight, for messages.

    Returns:
        The packed matrix; the parts of several lie behind each other along a first dimension.

    Raises:
        ConfigError: The form does not suit the weight, or the weight is not finite.
    """
    form.require(tuple(weight.shape[-2:] if weight.dim() == 3 else weight.shape), name)
    if not weight.is_floating_point():
        raise ConfigError(f"{name} is {weight.dtype}, so it is packed already or has no fractions.")
    *outer, width = weight.shape
    groups = (*outer, width // form.group)
    packed = Packed(
        weight.new_empty(*outer, width * form.bits // 8, dtype=torch.uint8),
        weight.new_empty(groups),
        weight.new_empty(groups),
    )
    if not weight.is_meta:
        several = (t if t.dim() == 3 else t.unsqueeze(0) for t in (weight, *packed))
        for matrix, *parts in zip(*several, strict=True):
            _pack_into(Packed(*parts), matrix, form, name)
    return packed


def _pack_into(packed: Packed, weight: torch.Tensor, form: PackedForm, name: str) -> None:
    step = max(1, ELEMENTS_AT_ONCE // weight.shape[1])
    for begin in range(0, len(weight), step):
        rows = weight[begin : begin + step].float().unflatten(1, (-1, form.group))
        if not rows.isfinite().all():
            raise ConfigError(f"{name} has values that are not finite, so it cannot be packed.")
        numbers, scales, minima = _fit(rows, form.bits, weight.dtype)
        packed.numbers[begin : begin + step] = _joined(numbers, form).flatten(1)
        packed.scales[begin : begin + step] = scales
        packed.minima[begin : begin + step] = minima


def unpack(packed: Packed, form: PackedForm, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix, (out, in), that a packed one stands for."""
    numbers = packed.numbers.unflatten(1, (packed.scales.shape[1], -1))
    shape = (*numbers.shape[:2], form.group)
    found: torch.Tensor = numbers.new_empty(shape, dtype=dtype)
    scales, minima = packed.scales.unsqueeze(-1), packed.minima.unsqueeze(-1)
    if not numbers.is_cpu:  # as few kernels as can be
        _take_apart(numbers, form, found)
        return torch.addcmul(minima, found, scales, out=found).flatten(1)
    # On a CPU addcmul takes one number at a time, and these take a row of them.
    wide = torch.promote_types(dtype, torch.float32)
    buffer = torch.empty_like(found[: 0 if wide == dtype else WIDE_ROWS], dtype=wide)
    for begin in range(0, len(numbers), WIDE_ROWS):
        span = slice(begin, begin + WIDE_ROWS)
        piece = found[span] if wide == dtype else buffer[: len(numbers[span])]
        _take_apart(numbers[span], form, piece)
        piece.mul_(scales[span].to(wide)).add_(minima[span].to(wide))
        if wide != dtype:
            found[span] = piece
    return found.flatten(1)


def _take_apart(numbers: torch.Tensor, form: PackedForm, found: torch.Tensor) -> None:
    """Write the numbers of some rows, (rows, groups, bytes of a group), one by one."""
    if form.bits == 8:
        found.copy_(numbers)
        return
    low, high = found.chunk(2, dim=-1)
    torch.bitwise_and(numbers, 15, out=low)
    torch.bitwise_right_shift(numbers, 4, out=high)


def _joined(numbers: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """Put numbers, (rows, groups, group) in float32, into bytes."""
    whole = numbers.to(torch.uint8)
    if form.bits == 8:
        return whole
    low, high = whole.chunk(2, dim=-1)
    return low | (high << 4)


def _fit(
    rows: torch.Tensor, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find numbers, scales and minima with a small squared error for each group.

    From each of several ranges, numbers and then the line through them are fitted to the weights,
    a few times. The best of all that were seen counts, with scale and minimum rounded to the dtype
    that they are kept in.

    Args:
        rows: Weights, (rows, groups, group) in float32.
        bits: Of a number.
        dtype: Of scales and minima.
    """
    top = (1 << bits) - 1
    low, high = rows.aminmax(dim=-1, keepdim=True)
    mean = rows.mean(-1, keepdim=True)
    centred = rows - mean
    best, least = (low, low), torch.full_like(low, torch.inf)
    for share in RANGES[bits]:
        scale, minimum = (high - low) * share / top, low + (high - low) * (1 - share) / 2
        for _ in range(NUM_FITS[bits]):
            scale = _rounded(scale.clamp(min=torch.finfo(dtype).tiny), dtype)
            minimum = _rounded(minimum, dtype)
            numbers = _numbers(rows, scale, minimum, top)
            error = (numbers * scale).add_(minimum).sub_(rows).norm(dim=-1, keepdim=True)
            is_better = error < least
            least = torch.where(is_better, error, least)
            best = (
                torch.where(is_better, scale, best[0]),
                torch.where(is_better, minimum, best[1]),
            )
            middle = numbers.mean(-1, keepdim=True)
            slope = (numbers * centred).sum(-1, keepdim=True)
            spread = numbers.sub_(middle).square_().sum(-1, keepdim=True)
            scale = torch.where(spread > 0, slope / spread, scale)
            minimum = mean - scale * middle
    scales, minima = best
    return _numbers(rows, scales, minima, top), scales.squeeze(-1), minima.squeeze(-1)


def _numbers(
    rows: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, top: int
) -> torch.Tensor:
    return (rows - minimum).div_(scale).round_().clamp_(0, top)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).float()
