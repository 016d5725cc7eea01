"""Changes of an attached model on which Dynamo has no guard; results stay those of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as of_all

from ds_finepage.api import attach
from ds_finepage.runtime.handle import Handle

X = torch.linspace(-2, 2, 640).view(1, 40, 16)


class Half(nn.Module):
    """It has no weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.product(x).view(1, 2, -1, 8)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Half(), Half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sin()


def doubled(module: nn.Module, *given: Any) -> Any:
    """Double the result of a module as a hook after it, or its argument as one before it."""
    if not isinstance(module, Half):
        return None
    return given[-1] * 2 if len(given) == 2 else (given[0][0] * 2,)


@contextmanager
def hooked(register: Callable[..., Any]) -> Any:
    handle = register(doubled)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def patched(_: nn.Module) -> Any:
    before = Half.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Half, "forward", lambda self, x: before(self, x) * 2)
        yield


CHANGES: dict[str, Callable[[Whole], AbstractContextManager[Any]]] = {
    "hook": lambda model: hooked(model.second.register_forward_hook),
    "hook before": lambda model: hooked(model.second.register_forward_pre_hook),
    "hook around all": lambda _: hooked(of_all.register_module_forward_hook),
    "hook before all": lambda _: hooked(of_all.register_module_forward_pre_hook),
    "method": patched,
    "kernel": lambda _: sdpa_kernel(SDPBackend.MATH),
}


@pytest.fixture
def attached() -> Iterator[tuple[Whole, Handle]]:
    torch._dynamo.reset()
    model = Whole().eval()
    handle = attach(model, device_budget="1MiB", device="cpu")
    with torch.no_grad():
        yield model, handle
    assert handle.stats.num_unplanned_modules == 0


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_call_counts_and_so_does_its_end(
    name: str, attached: tuple[Whole, Handle]
) -> None:
    plain, (model, _) = Whole().eval(), attached
    before = plain(X)
    assert torch.equal(model(X), before)
    for _ in range(2):
        with CHANGES[name](plain):
            changed = plain(X)
            assert not torch.equal(changed, before)
        with CHANGES[name](model):
            assert torch.equal(model(X), changed)
            assert torch.equal(model(X), changed)
        assert torch.equal(model(X), before)


def test_a_call_without_a_change_is_not_traced_again(attached: tuple[Whole, Handle]) -> None:
    model, handle = attached
    for _ in range(3):
        model(X)
    assert handle.stats.num_captures == 1


def test_other_kernels_need_a_plan_of_their_own(attached: tuple[Whole, Handle]) -> None:
    """Their workspaces differ, even where an op of the plan chooses the kernel itself."""
    model, handle = attached
    for _ in range(2):
        model(X)
        with sdpa_kernel(SDPBackend.MATH):
            model(X)
    assert handle.stats.num_captures == 2


def test_hooks_that_the_forward_installs_itself_cost_no_second_trace() -> None:
    class Installs(Whole):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.install()
            return super().forward(x)

        @torch.compiler.disable
        def install(self) -> None:
            if not self.first._forward_hooks:
                self.first.register_forward_hook(doubled)

    torch._dynamo.reset()
    plain, model = Installs().eval(), Installs().eval()
    with torch.no_grad():
        handle = attach(model, device_budget="1MiB", device="cpu")
        for _ in range(3):
            assert torch.equal(model(X), plain(X))
    assert handle.stats.num_captures == 1
