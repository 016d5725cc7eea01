"""Tensor subclasses for tests: packed weights as a library for quantisation makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Scale(torch.Tensor):
    """One factor a row: a subclass inside another."""

    def __new__(cls, values: torch.Tensor) -> Scale:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Any], *_: Any) -> Scale:
        return Scale(tensors["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*[a.values if isinstance(a, Scale) else a for a in args], **(kwargs or {}))
        return Scale(made) if func in (aten.detach.default, aten.clone.default) else made


class Packed(torch.Tensor):
    """Numbers of 8 bits with a scale a row; a product unpacks them."""

    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["numbers", "scale"], object()  # a context that Dynamo cannot trace

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Any], *_: Any) -> Packed:
        return Packed(tensors["numbers"], tensors["scale"])

    def unpacked(self) -> torch.Tensor:
        return self.numbers.to(torch.float32) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default):
            made = Packed(func(args[0].numbers, **kwargs), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func is aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.values.copy_(args[1].scale.values)
            return args[0]
        return func(*[a.unpacked() if isinstance(a, Packed) else a for a in args], **kwargs)


class Opaque(torch.Tensor):
    """A subclass that says nothing about its inner tensors."""

    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def packed_linear(num_in: int, num_out: int) -> nn.Linear:
    linear = nn.Linear(num_in, num_out)
    weight = linear.weight.detach()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight / scale).round().to(torch.int8)
    linear.weight = nn.Parameter(Packed(numbers, Scale(scale)), requires_grad=False)
    return linear
