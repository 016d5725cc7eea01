"""Packed layers as DeepSpeed's own ``weight_quantization`` keeps them: one parameter a layer.

DeepSpeed puts the numbers, the scales and the minima of a layer behind each other into one flat
parameter of the model's dtype, since ZeRO fetches parameters of one dtype. So it fetches the packed
bytes, and its settings count elements of that dtype. See ``inference/quantization/utils.py`` of
DeepSpeed 0.19.8. The numbers here are ours, and so is the product, which unpacks a slice at a time;
DeepSpeed unpacks the whole weight first.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ds_finepage.packing.experts import PackedMatrices
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import PACKED_LAYERS, pack_model
from ds_finepage.packing.op import packed_grouped_linear, packed_linear


class _Flat(torch.nn.Module):
    """Holds a packed weight as one flat parameter."""

    def __init__(self, layer: PackedLinear | PackedMatrices) -> None:
        """Take the tensors of a packed layer; it may be on the meta device."""
        super().__init__()
        self.form = layer.form
        self._shapes = [part.shape for part in (layer.numbers, layer.scales, layer.minima)]
        dtype = layer.scales.dtype
        numbers = layer.numbers.flatten()
        missing = -numbers.numel() % dtype.itemsize
        numbers = torch.nn.functional.pad(numbers, (0, missing)).view(dtype)
        parts = (numbers, layer.scales.flatten(), layer.minima.flatten())
        self._ends = [0]
        for part in parts:
            self._ends.append(self._ends[-1] + part.numel())
        self.weight = torch.nn.Parameter(torch.cat(parts), requires_grad=False)
        self.train(layer.training)

    def _parts(self) -> list[torch.Tensor]:
        """Return the numbers, scales and minima."""
        packed, scales, minima = (
            self.weight.narrow(0, begin, end - begin) for begin, end in pairwise(self._ends)
        )
        numbers = packed.view(torch.uint8).narrow(0, 0, self._shapes[0].numel())
        parts = zip((numbers, scales, minima), self._shapes, strict=True)
        return [part.view(shape) for part, shape in parts]


class StockPackedLinear(_Flat):
    """A packed layer whose weight is one flat parameter.

    Attributes:
        form: How the weight is packed.
        weight: The numbers, scales and minima behind each other, in the dtype of the scales.
        bias: (out,), or None.
    """

    def __init__(self, layer: PackedLinear) -> None:
        """Take the tensors of a packed layer; it may be on the meta device."""
        super().__init__(layer)
        bias = layer.bias
        assert bias is None or isinstance(bias, torch.nn.Parameter)
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the packed layer returns.

        Args:
            x: (..., in).
        """
        form = self.form
        made = packed_linear(x, *self._parts(), self.bias, form.bits, form.group, form.fused)
        assert isinstance(made, torch.Tensor)
        return made


class StockPackedMatrices(_Flat):
    """The packed matrices of experts as one flat parameter.

    Attributes:
        form: How the matrices are packed.
        weight: The numbers, scales and minima behind each other, in the dtype of the scales.
    """

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return what the packed matrices return.

        Args:
            x: (rows, in), sorted by expert.
            ends: (experts,), where the rows of each expert end.
        """
        rows, form = x.to(self.weight.dtype), self.form
        made = packed_grouped_linear(rows, *self._parts(), ends, form.bits, form.group, form.fused)
        assert isinstance(made, torch.Tensor)
        return made


def pack_as_stock(model: torch.nn.Module, form: PackedForm) -> None:
    """Pack the linear layers and experts of a model, in place, as DeepSpeed keeps them.

    Args:
        model: Any module; it may be on the meta device.
        form: How to pack.

    Raises:
        ConfigError: The form does not suit the model.
    """
    pack_model(model, form)
    made: dict[torch.nn.Module, _Flat] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, PACKED_LAYERS):
            if layer not in made:
                if isinstance(layer, PackedLinear):
                    made[layer] = StockPackedLinear(layer)
                else:
                    made[layer] = StockPackedMatrices(layer)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, made[layer])
