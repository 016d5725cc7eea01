"""Fused experts whose matrices are packed, as transformers 5 holds them.

transformers keeps the matrices of a layer's experts in two parameters of three dimensions. Its
decorator ``use_experts_implementation`` gives all such modules one protocol, so that one way of
computing serves every model. Here is another way of that kind, with packed matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ds_finepage.packing.linear import PackedWeight

PROTOCOL = "transformers.integrations.moe"
"""The module of transformers whose decorator makes the forward pass of fused experts."""


class PackedExperts(torch.nn.Module):
    """Stands for a module of fused experts; all but the matrices stays the same.

    The matrices are submodules, named like the parameters without "_proj". So transformers, which
    takes apart parameters of those names when it saves a model, leaves them alone.
    """

    def __init__(self, experts: torch.nn.Module, matrices: Mapping[str, PackedWeight]) -> None:
        """Take what a module of :func:`expert_weights` has, and packed matrices by its names."""
        super().__init__()
        for name, value in vars(experts).items():
            vars(self)[name] = value.copy() if isinstance(value, dict) else value
        self._kind: Any = type(experts)
        self._names = [submodule_of(name) for name in matrices]
        self._num_experts = len(next(iter(matrices.values())).numbers)
        for name, packed in matrices.items():
            del self._parameters[name]
            self.add_module(submodule_of(name), packed)

    @property
    def matrices(self) -> list[PackedWeight]:
        """The packed matrices, in the order of their use."""
        found: list[Any] = [self._modules[name] for name in self._names]
        return found

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: (tokens, k), the experts of each token.
            top_k_weights: (tokens, k), their weights.

        Returns:
            (tokens, hidden).
        """
        own: Any = self  # has what the module that it stands for has
        num_top_k = top_k_index.shape[-1]
        experts, order = torch.sort(top_k_index.reshape(-1))
        numbers = torch.arange(self._num_experts, dtype=experts.dtype, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        x = self._product(0, hidden_states[order // num_top_k], ends, experts)
        x = self._kind._apply_gate(self, x) if own.has_gate else own.act_fn(x)
        x = self._product(1, x, ends, experts)
        if getattr(self, "has_post_expert_norm", False):
            x = own.post_expert_norm(x)
        x = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        x = x[back].view(-1, num_top_k, x.shape[-1]).sum(dim=1)
        return x.to(hidden_states.dtype)

    def _product(
        self, at: int, x: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows by the first or the second matrices, and add biases if there are some."""
        made = self.matrices[at](x, ends)
        if self.has_bias:
            made = made + getattr(self, f"{self._names[at]}_proj_bias")[experts]
        assert isinstance(made, torch.Tensor)
        return made


def submodule_of(weight: str) -> str:
    """Return the name of the packed matrices that stand for a parameter."""
    return weight.removesuffix("_proj")


def expert_weights(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights of fused experts by name, in the order of their use.

    Returns:
        Nothing if it has none, or is one whose forward pass is not known; see :func:`unknown`.
    """
    if not _follows_protocol(module) or unknown(module) is not None:
        return {}
    return {name: module._parameters[name] for name in _names(module)}  # type: ignore[misc]


def unknown(module: torch.nn.Module) -> str | None:
    """Say why the weights of several matrices that a module has cannot be packed.

    Returns:
        None if they can be packed, or it has none.
    """
    own: Any = module
    found = {n: p for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    several = list(found)
    is_torchs = type(module).__module__.startswith("torch.")  # such as a convolution
    if not several or is_torchs or all(len(p) < 2 for p in found.values()):
        return None
    if not _follows_protocol(module):
        return f"how it uses {several[0]} is not known"
    if getattr(own, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    if not set(_names(module)) <= {*several}:
        return f"its weights are not {' and '.join(_names(module))}"
    default = getattr(sys.modules[PROTOCOL], "_default_apply_gate", None)
    has_own_gate = own.has_gate and type(own)._apply_gate is not default
    if not has_own_gate and not callable(getattr(own, "act_fn", None)):
        return "its activation is not known"
    return None


def _names(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _follows_protocol(module: torch.nn.Module) -> bool:
    """Tell whether the forward pass of a module is the one that transformers' decorator makes."""
    if PROTOCOL not in sys.modules or "forward" in vars(module):
        return False
    made = getattr(type(module).forward, "__globals__", {})
    return made.get("__name__") == PROTOCOL and hasattr(module, "has_gate")
