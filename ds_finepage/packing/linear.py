"""A linear layer whose weight is packed."""

from __future__ import annotations

from typing import Any

import torch

from ds_finepage.packing.form import Packed, PackedForm, pack, unpack
from ds_finepage.packing.op import packed_linear


class PackedLinear(torch.nn.Module):
    """Stands for a ``torch.nn.Linear``, with a packed weight that is not trained.

    Attributes:
        form: How the weight is packed.
        in_features: Width of the input.
        out_features: Width of the output.
        numbers: Of the packed weight; see :class:`ds_finepage.packing.form.Packed`.
        scales: Of the packed weight.
        minima: Of the packed weight.
        bias: (out,), or None.
    """

    def __init__(self, packed: Packed, form: PackedForm, bias: torch.Tensor | None = None) -> None:
        """Take the tensors as they are.

        Args:
            packed: The weight.
            form: How it is packed.
            bias: (out,); a parameter stays the one that it is.
        """
        super().__init__()
        self.form = form
        self.in_features = packed.numbers.shape[1] * 8 // form.bits
        self.out_features = packed.numbers.shape[0]
        self.numbers, self.scales, self.minima = (_parameter(part) for part in packed)
        self.register_parameter("bias", None if bias is None else _parameter(bias))

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Module, form: PackedForm, name: str = "a weight"
    ) -> PackedLinear:
        """Pack the weight of a layer; the layer keeps its own.

        Args:
            linear: A ``torch.nn.Linear``, or a transformers ``Conv1D``; it may be on the meta
                device.
            form: How to pack its weight.
            name: Of the weight, for messages.

        Raises:
            ConfigError: The form does not suit the weight.
        """
        weight = matrix_of(linear).detach()
        bias: Any = linear.bias
        return cls(pack(weight, form, name), form, bias).train(linear.training)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, (out, in), unpacked at each use."""
        return unpack(Packed(self.numbers, self.scales, self.minima), self.form, self.scales.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``.

        Args:
            x: (..., in).
        """
        parts, form = (self.numbers, self.scales, self.minima), self.form
        made = packed_linear(x, *parts, self.bias, form.bits, form.group, form.fused)
        assert isinstance(made, torch.Tensor)
        return made

    def extra_repr(self) -> str:
        """Return the sizes and the form, as ``torch.nn.Linear`` shows its own."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.form.name} in groups of {self.form.group}"
        )


def matrix_of(linear: torch.nn.Module) -> torch.Tensor:
    """Return the weight of a layer as (out, in); that of a ``Conv1D`` lies the other way."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    return weight if isinstance(linear, torch.nn.Linear) else weight.t()


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=False)
