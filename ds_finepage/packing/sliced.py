"""The output layer of a packed model, where its own weight is not packed.

It is the largest weight then. Its product is made a slice of ``OUTPUT_ROWS`` output features at a
time, each as a product of its own. So a plan may cut the weight between two slices, and no bit
changes: the whole weight is never needed at once. See [Note: slices are products of their own] in
``op.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ds_finepage.graph.packed import OUTPUT_ROWS
from ds_finepage.packing.op import define, products


@torch.no_grad()
def _into(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> torch.Tensor:
    """Write ``x @ weight.T + bias`` into ``out``, or into the columns of a cut weight in it.

    The other arguments are those of ``SLICED_LINEAR``.
    """
    rows = x.reshape(-1, x.shape[-1])
    products(rows, weight, bias, out.view(-1, out.shape[-1]), OUTPUT_ROWS)
    return out


sliced_linear = define("sliced_linear", "Tensor x, Tensor weight, Tensor? bias", _into)


class SlicedLinear(torch.nn.Linear):
    """A linear layer that is not trained, and multiplies by its weight a slice at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``.

        Args:
            x: (..., in).
        """
        made = sliced_linear(x, self.weight, self.bias)
        assert isinstance(made, torch.Tensor)
        return made


def slice_output(model: torch.nn.Module) -> None:
    """Let output layers of a model multiply by a slice at a time, if they are plain and large.

    transformers calls these layers the output embeddings. They keep their parameters and hooks.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    for module in model.modules():
        layer: Any = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
        if type(layer) is torch.nn.Linear and len(layer.weight) > OUTPUT_ROWS:
            layer.__class__ = SlicedLinear
