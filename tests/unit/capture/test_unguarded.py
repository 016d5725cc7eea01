"""What is noticed of a model's hooks, and of the functions of its classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as of_all

from ds_finepage.capture.unguarded import Unguarded, kernel_settings


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Base(nn.Module):
    @decorated
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def untraced(self) -> None:
        pass

    @staticmethod
    def offset() -> int:
        return 1


class Inner(Base):
    """It inherits ``scaled``, and has no weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) + self.offset()


class Heir(Inner):
    """It inherits ``forward``."""


def ignore(*_: Any) -> None:
    pass


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Inner(), Heir())


@pytest.mark.parametrize("part", (0, 1, 2, None))
@pytest.mark.parametrize("kind", ("register_forward_hook", "register_forward_pre_hook"))
def test_a_hook_that_comes_or_goes_is_noticed_once(
    model: nn.Sequential, part: int | None, kind: str
) -> None:
    seen = Unguarded(model)
    assert not seen.changed()
    handle = getattr(model if part is None else model[part], kind)(ignore)
    assert seen.changed() and not seen.changed()
    handle.remove()
    assert seen.changed() and not seen.changed()


def test_a_hook_in_the_place_of_another_is_noticed(model: nn.Sequential) -> None:
    first = model[1].register_forward_hook(ignore)
    seen = Unguarded(model)
    first.remove()
    model[1].register_forward_hook(ignore)
    assert seen.changed() and not seen.changed()


@pytest.mark.parametrize(
    "register", (of_all.register_module_forward_hook, of_all.register_module_forward_pre_hook)
)
def test_hooks_around_all_modules_are_noticed(
    model: nn.Sequential, register: Callable[..., Any]
) -> None:
    seen = Unguarded(model)
    handle = register(ignore)
    try:
        assert seen.changed()
    finally:
        handle.remove()
    assert seen.changed() and not seen.changed()


def traced(model: nn.Sequential) -> Unguarded:
    """Return what has seen a trace of all methods of ``Inner``."""
    seen = Unguarded(model)
    seen.take(f.__code__ for f in (Inner.forward, Inner.offset, vars(Base)["scaled"].__wrapped__))
    seen.see()
    return seen


@pytest.mark.parametrize(
    ("owner", "name"),
    (
        (Inner, "forward"),
        (Heir, "forward"),
        (Base, "scaled"),
        (Heir, "scaled"),
        (Base, "offset"),
    ),
)
def test_another_method_in_the_place_of_a_traced_one_is_noticed(
    model: nn.Sequential, owner: type, name: str
) -> None:
    seen = traced(model)
    assert not seen.changed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, ignore, raising=False)
        assert seen.changed() and not seen.changed()
        seen.take([ignore.__code__])  # it is traced now
        seen.see()
    assert seen.changed() and not seen.changed()


def test_a_method_that_is_deleted_is_noticed(model: nn.Sequential) -> None:
    seen = traced(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Base, "scaled")
        assert seen.changed() and not seen.changed()


def test_without_a_trace_the_forward_counts_alone(model: nn.Sequential) -> None:
    seen = Unguarded(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "scaled", ignore)
        assert not seen.changed()
        patch.setattr(Inner, "forward", ignore)
        assert seen.changed()


def test_a_method_that_is_not_traced_does_not_count(model: nn.Sequential) -> None:
    seen = traced(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "untraced", ignore)
        patch.setattr(Inner, "__call__", ignore, raising=False)
        assert not seen.changed()


def test_what_is_seen_is_no_change(model: nn.Sequential) -> None:
    seen = Unguarded(model)
    model[1].register_forward_hook(ignore)
    seen.see()
    assert not seen.changed()


def test_settings_of_kernels_are_told_apart() -> None:
    before = kernel_settings()
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_settings() != before
    assert kernel_settings() == before
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # type: ignore[no-untyped-call]
        assert kernel_settings() != before
