"""Packed layers as DeepSpeed's own ``weight_quantization`` keeps them: one parameter a layer.

DeepSpeed puts the numbers, the scales and the minima of a layer behind each other into one flat
parameter of the model's dtype, since ZeRO fetches parameters of one dtype. So it fetches the packed
bytes, and its settings count elements of that dtype. See ``inference/quantization/utils.py`` of
DeepSpeed 0.19.8. The numbers here are ours, and so is the product, which unpacks a slice at a time;
DeepSpeed unpacks the whole weight first.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from ds_finepage.packing.form import Packed, PackedForm
from ds_finepage.packing.linear import PackedWeight, product
from ds_finepage.packing.model import pack_model


class StockPacked(torch.nn.Module):
    """A packed layer, or the packed matrices of experts, whose weight is one flat parameter.

    Attributes:
        form: How the weight is packed.
        weight: The numbers, scales and minima behind each other, in the dtype of the scales.
        bias: (out,), or None.
    """

    def __init__(self, layer: PackedWeight) -> None:
        """Take the tensors of a packed layer; it may be on the meta device."""
        super().__init__()
        self.form = layer.form
        self._shapes = [part.shape for part in layer.packed]
        dtype = layer.scales.dtype
        numbers = layer.numbers.flatten()
        missing = -numbers.numel() % dtype.itemsize
        numbers = torch.nn.functional.pad(numbers, (0, missing)).view(dtype)
        parts = (numbers, layer.scales.flatten(), layer.minima.flatten())
        self._ends = [0, *accumulate(part.numel() for part in parts)]
        self.weight = torch.nn.Parameter(torch.cat(parts), requires_grad=False)
        self.register_parameter("bias", layer._parameters.get("bias"))
        self.train(layer.training)

    def _parts(self) -> Packed:
        packed, *others = (
            self.weight.narrow(0, begin, end - begin) for begin, end in pairwise(self._ends)
        )
        numbers = packed.view(torch.uint8).narrow(0, 0, self._shapes[0].numel())
        parts = zip((numbers, *others), self._shapes, strict=True)
        return Packed(*(part.view(shape) for part, shape in parts))

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the packed layer returns, or the packed matrices.

        Args:
            x: (..., in); rows that are sorted by expert, if there are some.
            ends: (experts,), where the rows of each expert end.
        """
        return product(x, self._parts(), self.form, bias=self.bias, ends=ends)


def pack_as_stock(model: torch.nn.Module, form: PackedForm) -> None:
    """Pack the linear layers and experts of a model, in place, as DeepSpeed keeps them.

    Raises:
        ConfigError: The form does not suit the model.
    """
    pack_model(model, form)
    made: dict[torch.nn.Module, StockPacked] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, PackedWeight):
            if layer not in made:
                made[layer] = StockPacked(layer)
            model.set_submodule(name, made[layer])
