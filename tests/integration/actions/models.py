"""Actions that change, move, cast, wrap or trace a whole model, and hooks on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.integration.actions.subjects import Actions, Subject, equal_results, run

ACTIONS = Actions()
X = torch.linspace(-1, 1, 80).view(5, 16)


def _changes(name: str, change: Callable[[Any], Any]) -> None:
    """Add an action that changes both models; the next calls give the same, by plan."""

    def act(subject: Subject) -> None:
        subject.both(change)
        subject.same()
        subject.both(lambda m: [p.data.mul_(1.5) for p in m.parameters()])
        subject.same()
        assert not subject.handle.stats.unplanned_reasons

    ACTIONS[name] = act


# Parts and parameters.


def _replace_a_parameter(model: Any) -> None:
    model.up.weight = nn.Parameter(torch.linspace(-1, 1, 48 * 16).view(48, 16))


def replace_a_module(model: Any) -> None:
    torch.manual_seed(5)
    model.up = nn.Linear(16, 48)


def _replace_and_go_back(model: Any) -> None:
    before = model.up
    replace_a_module(model)
    run(model, torch.randn(5, 16))
    model.up = before


def _add_a_module(model: Any) -> None:
    torch.manual_seed(5)
    model.blocks.append(nn.Linear(48, 48))


def _remove_a_module(model: Any) -> None:
    del model.blocks[1]


def _tie_two_weights(model: Any) -> None:
    torch.manual_seed(5)
    model.blocks[1] = nn.Linear(48, 48)
    model.blocks.append(nn.Linear(48, 48))
    model.blocks[-1].weight = model.blocks[1].weight


def _swap_two_modules(model: Any) -> None:
    model.blocks.append(nn.Linear(48, 48, bias=True))
    with torch.no_grad():
        model.blocks[3].weight.fill_(0.01), model.blocks[3].bias.fill_(0.02)
    run(model, torch.randn(5, 16))
    model.blocks[1], model.blocks[3] = model.blocks[3], model.blocks[1]


class WithAdapter(nn.Module):
    """A product beside a low-rank one, as adapters have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * base.in_features).view(2, -1))
        self.up = nn.Parameter(torch.linspace(-1, 1, 2 * base.out_features).view(-1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def _add_an_adapter(model: Any) -> None:
    model.up = WithAdapter(model.up)


def _merge_an_adapter(model: Any) -> None:
    _add_an_adapter(model)
    run(model, torch.ones(5, 16))
    adapter = model.up
    adapter.base.weight.data += adapter.up.data @ adapter.down.data
    model.up = adapter.base


_changes("replace_a_parameter", _replace_a_parameter)
_changes("replace_a_module", replace_a_module)
_changes("replace_a_module_and_go_back", _replace_and_go_back)
_changes("add_a_module", _add_a_module)
_changes("remove_a_module", _remove_a_module)
_changes("tie_two_weights", _tie_two_weights)
_changes("swap_two_modules", _swap_two_modules)
_changes("add_an_adapter", _add_an_adapter)
_changes("merge_an_adapter", _merge_an_adapter)
_changes("requires_no_grad", lambda m: m.requires_grad_(False))
_changes("train_and_eval", lambda m: m.train().eval())
_changes("zero_grad", lambda m: m.zero_grad())
_changes("share_memory", lambda m: m.share_memory())
_changes("move_to_the_cpu", lambda m: m.to("cpu"))
_changes("move_to_float", lambda m: m.float())


@ACTIONS.add
def train_with_dropout(subject: Subject) -> None:
    subject.both(lambda m: m.train())
    subject.same()
    subject.both(lambda m: m.eval())


def _casts(name: str, *casts: str) -> None:
    def act(subject: Subject) -> None:
        subject.make_room()
        for cast in casts:
            subject.both(lambda m, cast=cast: getattr(m, cast)())  # type: ignore[misc]
            subject.x = getattr(subject.x, cast)()
            subject.same()
            assert subject.model.up.weight.dtype is subject.x.dtype

    ACTIONS[name] = act


_casts("cast_to_bfloat16", "bfloat16")
_casts("cast_to_half", "half")
_casts("cast_to_double_and_back", "double", "float")


# Wrappers and tracers.


def _compiles(name: str, caller: Callable[[Any], Callable[[torch.Tensor], Any]]) -> None:
    """Add an action that compiles a caller of the model, which runs by plan."""

    def act(subject: Subject) -> None:
        compiled = torch.compile(caller(subject.model), backend="eager")
        before = subject.handle.stats.passes[-1].num_runs
        assert equal_results(compiled, caller(subject.plain), subject.x)
        assert subject.handle.stats.passes[-1].num_runs > before, "it ran by plan"

    ACTIONS[name] = act


_compiles("compile_the_model", lambda m: m)
_compiles("compile_a_caller", lambda m: lambda x: m(x * 2) + 1)


@ACTIONS.add
def compile_in_place(subject: Subject) -> None:
    subject.model.compile(backend="eager")


@ACTIONS.add
def export_the_model(subject: Subject) -> None:
    exported = torch.export.export(subject.model, (subject.x,), strict=False)
    assert torch.equal(run(exported.module(), subject.x), run(subject.plain, subject.x))


@ACTIONS.add
def functional_call(subject: Subject) -> None:
    subject.make_room()

    def call(model: Any) -> torch.Tensor:
        values = {k: v.detach() * 2 for k, v in model.named_parameters()}
        with torch.no_grad():
            return torch.func.functional_call(model, values, (subject.x,))

    captures = subject.handle.stats.num_captures
    for _ in range(2):
        found, expected = subject.both(call)
        assert torch.equal(found, expected)
        subject.same()
    assert subject.handle.stats.num_captures <= captures + 1


ACTIONS.gives("trace_with_jit", lambda m: run(torch.jit.trace(m, X, check_trace=False), X))
ACTIONS.gives(
    "map_over_a_batch", torch.no_grad()(lambda m: torch.func.vmap(m)(torch.stack([X, -X])))
)
ACTIONS.gives("call_within_a_wrapper", lambda m: run(nn.Sequential(m, nn.ReLU()), X))
ACTIONS.gives("call_with_gradients", lambda m: m(X).detach())


def _within(name: str, context: Callable[[], Any], *, needs_room: bool = False) -> None:
    """Add an action that calls both models within a context."""

    def act(subject: Subject) -> None:
        if needs_room:
            subject.make_room()
        with context():
            subject.same()

    ACTIONS[name] = act


_within("count_flops", lambda: FlopCounterMode(display=False))
_within("profile_a_call", torch.profiler.profile)
_within("call_in_inference_mode", torch.inference_mode)
_within("call_under_autocast", partial(torch.autocast, "cpu", torch.bfloat16), needs_room=True)


# Hooks.


@ACTIONS.add
def hook_that_reads(subject: Subject) -> None:
    seen: list[float] = []
    for model in (subject.model, subject.plain):
        model.up.register_forward_hook(lambda m, *_: seen.append(m.weight.sum().item()))
    subject.same()
    assert len(set(seen)) == 1


@ACTIONS.add
def hook_that_writes(subject: Subject) -> None:
    @torch._dynamo.disable
    def write(part: Any, *_: Any) -> None:
        with torch.no_grad():
            part.bias.add_(0.5)

    for model in (subject.model, subject.plain):
        model.up.register_forward_hook(write)


@ACTIONS.add
def op_hook_that_reads(subject: Subject) -> None:
    sums: list[torch.Tensor] = []
    remove = subject.handle.register_op_hook(
        after=lambda task, results: sums.append(subject.model.up.weight.sum())
    )
    subject.same(times=1)
    assert sums and all(torch.equal(s, subject.plain.up.weight.sum()) for s in sums)
    remove()


@ACTIONS.add
def wrong_input(subject: Subject) -> None:
    with pytest.raises(Exception, match="shape|size"):
        run(subject.model, torch.randn(5, 3))
