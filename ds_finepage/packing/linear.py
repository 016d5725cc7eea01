"""Packed weights as modules, and the linear layer that has one."""

from __future__ import annotations

from typing import Any

import torch

from ds_finepage.packing.form import Packed, PackedForm, unpack
from ds_finepage.packing.kept import pack_once
from ds_finepage.packing.op import packed_grouped_linear, packed_linear


class PackedWeight(torch.nn.Module):
    """Holds a packed matrix, or one for each expert, that is not trained.

    Attributes:
        form: How it is packed.
        numbers: See :class:`ds_finepage.packing.form.Packed`.
        scales: Likewise.
        minima: Likewise.
    """

    def __init__(self, packed: Packed, form: PackedForm) -> None:
        super().__init__()
        self.form = form
        self.numbers, self.scales, self.minima = (_parameter(part) for part in packed)

    @property
    def packed(self) -> Packed:
        """The parts."""
        return Packed(self.numbers, self.scales, self.minima)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply each row by the matrix of its expert.

        Args:
            x: (rows, in), sorted by expert.
            ends: (experts,), integers: where the rows of each expert end.

        Returns:
            (rows, out), of the dtype of the scales.
        """
        return product(x, self.packed, self.form, ends=ends)

    def extra_repr(self) -> str:
        """Return the sizes and the form."""
        num, out_features, num_groups = self.scales.shape
        return (
            f"{num} matrices, in_features={num_groups * self.form.group}, "
            f"out_features={out_features}, {self.form.name} in groups of {self.form.group}"
        )


class PackedLinear(PackedWeight):
    """Stands for a ``torch.nn.Linear``, with a packed weight.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: (out,), or None.
    """

    def __init__(self, packed: Packed, form: PackedForm, bias: torch.Tensor | None = None) -> None:
        """Take the tensors as they are; a parameter stays the one that it is."""
        super().__init__(packed, form)
        self.in_features = packed.numbers.shape[1] * 8 // form.bits
        self.out_features = packed.numbers.shape[0]
        self.register_parameter("bias", None if bias is None else _parameter(bias))

    @property
    def weight(self) -> torch.Tensor:
        """The weight, (out, in), unpacked at each use."""
        return unpack(self.packed, self.form, self.scales.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return ``x @ weight.T + bias``.

        Args:
            x: (..., in).
        """
        return product(x, self.packed, self.form, bias=self.bias)

    def extra_repr(self) -> str:
        """Return the sizes and the form, as ``torch.nn.Linear`` shows its own."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.form.name} in groups of {self.form.group}"
        )


def product(
    x: torch.Tensor,
    packed: Packed,
    form: PackedForm,
    *,
    bias: Any = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a packed matrix, or each row by that of its expert.

    Args:
        x: (..., in); rows that are sorted by expert, if there are some.
        packed: The matrix, or one for each expert.
        form: How it is packed.
        bias: (out,), or None; experts have none.
        ends: (experts,), integers: where the rows of each expert end.

    Returns:
        (..., out); with experts, of the dtype of the scales.
    """
    how = (form.bits, form.group, form.fused)
    if ends is None:
        made = packed_linear(x, *packed, bias, *how)
    else:
        made = packed_grouped_linear(x.to(packed.scales.dtype), *packed, ends, *how)
    assert isinstance(made, torch.Tensor)
    return made


def pack_weight(layer: torch.nn.Module, weight: Any, form: PackedForm, name: str) -> PackedWeight:
    """Pack one weight of a linear layer or of fused experts, which keep their own.

    Raises:
        ConfigError: The form does not suit the weight.
    """
    matrices = matrices_of(layer, weight.detach())
    return PackedWeight(pack_once(matrices, form, name), form).train(layer.training)


def matrices_of(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight of a layer as (out, in), or as (experts, out, in).

    That of a ``Conv1D``, and of some experts, lies the other way.
    """
    is_plain = isinstance(layer, torch.nn.Linear) or not getattr(layer, "is_transposed", True)
    return weight if is_plain else weight.transpose(-2, -1)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=False)
