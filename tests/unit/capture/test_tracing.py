"""What is out of the way while Dynamo traces, and that it is back afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import _bytecode_hooks

from ds_finepage.capture import tracing
from ds_finepage.capture.tracing import OwnHooks, QuickTracing, mark_growing
from ds_finepage.capture.unguarded import Unguarded


def ignore(*_: Any) -> None:
    pass


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(self.kept(x))

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        return x


def hooked(model: Pair) -> OwnHooks:
    handles = []
    for part in (model.first, model.second):
        handles.append(part.register_forward_pre_hook(ignore))
        handles.append(part.register_forward_hook(ignore, always_call=True))
    return OwnHooks(model, handles)


def num_hooks(model: Pair) -> list[int]:
    return [
        len(hooks)
        for part in (model.first, model.second)
        for hooks in (
            part._forward_pre_hooks,
            part._forward_hooks,
            part._forward_hooks_always_called,
        )
    ]


@pytest.fixture
def model() -> Pair:
    torch._dynamo.reset()
    return Pair().eval().requires_grad_(False)


def compiled(model: Pair, hooks: OwnHooks, seen: list[tuple[list[int], bool]]) -> Any:
    tracing = QuickTracing(hooks, Unguarded(model), ignore)

    def see(_: Any) -> None:
        seen.append((num_hooks(model), gc.isenabled()))

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        see(None)
        return graph.forward

    call = tracing.wrap(torch.compile(model._call_impl, backend=tracing.wrap_backend(backend)))

    def watched(x: torch.Tensor) -> Any:
        register = callback_handler.register_start_callback

        def after_ours(callback: Any) -> Any:
            register(callback)
            return register(see)

        callback_handler.register_start_callback = after_ours  # type: ignore[method-assign]
        try:
            return call(x)
        finally:
            callback_handler.register_start_callback = register  # type: ignore[method-assign]
            callback_handler.start_callbacks.clear()

    return watched


@pytest.mark.parametrize("breaks", [False, True])
def test_hooks_are_away_while_dynamo_traces_and_the_collector_until_the_call_ends(
    model: Pair, breaks: bool
) -> None:
    """Frames behind a graph break are traced without the hooks too."""
    seen: list[tuple[list[int], bool]] = []
    model.breaks = breaks
    call = compiled(model, hooked(model), seen)
    x = torch.ones(2, 4)
    for _ in range(2):  # the hooks that are back do not make Dynamo trace again
        assert torch.equal(call(x), model.second(model.first(x)))
        assert seen == [([0] * 6, False), ([1] * 6, False)] * (1 + breaks)
    assert num_hooks(model) == [1] * 6 and gc.isenabled()
    assert not callback_handler.end_callbacks


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_status_is_shown_while_dynamo_traces_and_not_afterwards(
    model: Pair,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    order: list[str] = []

    class Terminal:
        def __init__(self, stderr: bool) -> None:
            assert stderr
            self.is_terminal = is_terminal

        @contextmanager
        def status(self, text: str) -> Iterator[None]:
            order.append(text)
            yield
            order.append("gone")

    monkeypatch.setattr(tracing, "Console", Terminal)
    call = compiled(model, hooked(model), [])
    for _ in range(2):
        with caplog.at_level("INFO", tracing.logger.name):
            call(torch.ones(1, 4))
    assert order == ([tracing.TEXT, "gone"] if is_terminal else [])
    assert caplog.text.count(tracing.TEXT) == 1


def test_a_module_with_other_hooks_keeps_all_of_them(model: Pair) -> None:
    hooks = hooked(model)
    model.first.register_forward_pre_hook(ignore)
    hooks.hide()
    assert num_hooks(model) == [2, 1, 1, 0, 0, 0]
    hooks.restore()
    assert num_hooks(model) == [2, 1, 1, 1, 1, 1]


def test_nothing_is_hidden_where_dynamo_guards_on_empty_dictionaries(model: Pair) -> None:
    hooks = hooked(model)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        hooks.hide()
    assert num_hooks(model) == [1] * 6


def test_a_trace_that_fails_leaves_all_as_it_was(model: Pair) -> None:
    hooks = hooked(model)
    tracing = QuickTracing(hooks, Unguarded(model), ignore)

    def fail(*_: Any) -> Any:
        tracing._begin(None)
        raise RuntimeError("no graph")

    with pytest.raises(RuntimeError, match="no graph"):
        tracing.wrap(fail)()
    assert num_hooks(model) == [1] * 6 and gc.isenabled()


def test_the_compiler_of_another_thread_hides_nothing(model: Pair) -> None:
    tracing = QuickTracing(hooked(model), Unguarded(model), ignore)
    tracing._begin(None)  # nobody in this thread has called
    assert num_hooks(model) == [1] * 6 and gc.isenabled()


def test_a_collector_that_was_off_stays_off(model: Pair) -> None:
    gc.disable()
    try:
        compiled(model, hooked(model), [])(torch.ones(2, 4))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_cycles_that_tracing_leaves_are_gone_after_the_call(model: Pair) -> None:
    tracing = QuickTracing(hooked(model), Unguarded(model), ignore)
    left: list[weakref.ref[Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        cycle = torch.nn.Module()
        cycle.__dict__["itself"] = cycle
        left.append(weakref.ref(cycle))
        return graph.forward

    call = tracing.wrap(torch.compile(model._call_impl, backend=tracing.wrap_backend(backend)))
    gc.disable()  # Python's own collections are not what is tested
    try:
        call(torch.ones(2, 4))
    finally:
        gc.enable()
    assert [ref() for ref in left] == [None]


def test_a_call_without_a_trace_collects_nothing(
    model: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, collected = compiled(model, hooked(model), []), []
    monkeypatch.setattr(gc, "collect", collected.append)
    for _ in range(2):
        call(torch.ones(2, 4))
    assert collected == [1]
    assert torch._dynamo.config.run_gc_after_compile


def test_sizes_of_a_growing_cache_and_their_mask_are_marked() -> None:
    class RoomLayer:
        lengths = torch.empty(5, 16, 0)
        key_room = torch.zeros(1, 2, 16, 4)
        value_room = torch.zeros(1, 2, 16, 4)

    class StaticLayer:
        keys = torch.zeros(1, 2, 5, 4)

    mask = torch.ones(1, 6)
    cache = SimpleNamespace(layers=[RoomLayer(), StaticLayer()])
    mark_growing((), {"past_key_values": cache, "attention_mask": mask})
    assert RoomLayer.lengths._dynamo_weak_dynamic_indices == {0, 1}  # type: ignore[attr-defined]
    for room in (RoomLayer.key_room, RoomLayer.value_room):
        assert room._dynamo_weak_dynamic_indices == {2}  # type: ignore[attr-defined]
    assert mask._dynamo_weak_dynamic_indices == {1}  # type: ignore[attr-defined]
    assert not hasattr(StaticLayer.keys, "_dynamo_weak_dynamic_indices")


def test_a_mask_without_a_growing_cache_is_not_marked() -> None:
    class RoomLayer:
        lengths = torch.empty(0, 16, 0)
        key_room = value_room = None

    mask = torch.ones(1, 6)
    mark_growing((SimpleNamespace(layers=[RoomLayer()]), SimpleNamespace(layers=None)), {})
    mark_growing((), {"attention_mask": mask})
    assert not hasattr(mask, "_dynamo_weak_dynamic_indices")


def test_all_code_that_dynamo_makes_graphs_of_is_told(model: Pair) -> None:
    taken: list[str] = []
    hooks, unguarded = hooked(model), Unguarded(model)
    tracing = QuickTracing(hooks, unguarded, lambda code: taken.append(code.co_name))

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        other = threading.Thread(target=tracing._take, args=[Pair.__init__.__code__] * 2)
        other.start()
        other.join()  # what another thread compiles is not for this model
        return graph.forward

    model.breaks = True
    before = len(_bytecode_hooks)
    tracing.wrap(torch.compile(model._call_impl, backend=backend))(torch.ones(2, 4))
    assert taken[0] == "forward" and len(taken) == 2  # and what follows the graph break
    assert len(_bytecode_hooks) == before


def test_what_is_traced_is_looked_at_and_hooks_of_the_forward_are_seen(model: Pair) -> None:
    hooks, unguarded = hooked(model), Unguarded(model)
    tracing = QuickTracing(hooks, unguarded, ignore)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        model.second.register_forward_hook(ignore)
        return graph.forward

    call = torch.compile(model._call_impl, backend=tracing.wrap_backend(backend))
    tracing.wrap(call)(torch.ones(2, 4))
    assert not unguarded.changed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pair, "kept", lambda self, x: x / 2)
        assert unguarded.changed()
