"""Binds a task to a callable that writes its results where the plan wants them.

An op with an ``out=`` overload writes into the arena itself, if it was seen to write there and
nowhere else (``trial.py``). Any other runs as it is and its result is copied; what it took
meanwhile is its workspace, which is measured and budgeted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ds_finepage.errors import TaskMismatchError
from ds_finepage.graph.taskgraph import (
    JOIN,
    TO_HOST,
    BufferKind,
    Length,
    Ref,
    Symbol,
    Task,
    TaskGraph,
)

COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::lift_fresh", "aten::lift_fresh_copy"})
FILLS = {"aten::zeros": 0, "aten::new_zeros": 0, "aten::zeros_like": 0, "aten::ones": 1}
EMPTIES = frozenset(
    {
        "aten::empty",
        "aten::new_empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty_strided",
        "aten::empty_permuted",
    }
)  # their contents mean nothing
TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


@dataclass(slots=True)
class BoundTask:
    """A task ready to run: ``call(*args, **kwargs)``.

    ``args`` and the lists in it are filled in place for tensors that change from call to call. If
    ``waits``, the host waits for a router, or for the activations of its own product.
    """

    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    waits: bool = False


@dataclass(slots=True)
class Patch:
    """A place in a bound task's arguments that each call fills: a tensor, or a size."""

    container: Any  # list or dict
    key: Any
    tensor: int | None
    size: Length | None = None


def resolve_op(name: str) -> Any:
    """Find an overload by the name that capture wrote down.

    Raises:
        TaskMismatchError: This torch has no such op.
    """
    namespace, op, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError as error:
        raise TaskMismatchError(
            f"this torch {torch.__version__} has no op {name}; capture the model again"
        ) from error


@functools.cache
def out_overload(op: Any) -> Any | None:
    """Return the overload of ``op`` that takes the same arguments and writes into given tensors.

    It may leave out options that follow from the tensors it writes into, but it must not ask for
    one that ``op`` does not have. Among several, take the one that leaves out least.
    """
    packet, wanted = op.overloadpacket, _named_types(op._schema.arguments)
    best, fewest = None, None
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.is_out]
        if not outs or len(outs) != len(op._schema.returns):
            continue
        given = _named_types(a for a in arguments if not a.is_out)
        left_out = [pair for pair in wanted if pair not in given]
        if (
            given == [pair for pair in wanted if pair in given]
            and all(name in TENSOR_OPTIONS for name, _ in left_out)
            and all(str(a.type) == "Tensor" for a in outs)
            and (fewest is None or len(left_out) < fewest)
        ):
            best, fewest = candidate, len(left_out)
    return best


def _named_types(arguments: Iterable[Any]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments]


def has_out_form(task: Task) -> bool:
    """Tell whether :func:`bind` may bind a task to an ``out=`` overload."""
    bound = bind(task, lambda _: None, patches=[], into_place=True)
    return task.op != JOIN and bound.call is out_overload(resolve_op(task.op))


def contents_mean_nothing(task: Task) -> bool:
    """Tell whether a task computes nothing: a join, or an op that leaves its result unfilled."""
    return task.op == JOIN or resolve_op(task.op)._schema.name in EMPTIES


def is_random(task: Task) -> bool:
    """Tell whether a task draws random numbers."""
    return task.op != JOIN and torch.Tag.nondeterministic_seeded in resolve_op(task.op).tags


def unused_results(graph: TaskGraph) -> frozenset[int]:
    """Return the tensors of activations that only the task that makes them, among others, names."""
    times_named = [0] * len(graph.buffers)
    for task in graph.tasks:
        for buffer in task.buffers:
            times_named[buffer] += 1
    return frozenset(
        result
        for task in graph.tasks
        if len(task.results) > 1
        for result in task.results
        if result is not None and times_named[buffer := graph.tensors[result].buffer] == 1
        if graph.buffers[buffer].kind is BufferKind.ACTIVATION
    )


def bind(
    task: Task,
    tensor: Callable[[int], torch.Tensor | None],
    patches: list[Patch],
    unused: frozenset[int] = frozenset(),
    *,
    into_place: bool,
    is_host: bool = False,
) -> BoundTask:
    """Bind one task.

    Args:
        task: What to run.
        tensor: Tensor id -> the tensor, or None where each call brings its own.
        patches: Places of such tensors are appended here.
        unused: Results that no task reads; they are not copied (attention kernels return the state
            of a random generator, which may lie in host memory).
        into_place: Let the op write its results into their extents where it has an ``out=``
            overload. Only for ops that were seen to write nothing else; see ``trial.py``.
        is_host: The host computes the task.
    """
    if task.op == JOIN:
        return BoundTask(_nothing, [], {})
    op, args, kwargs = plain_call(task, tensor, patches)
    outs: list[Any] = [None] * len(task.results)
    for i, result in enumerate(task.results):
        if result is not None:
            outs[i] = _decode(outs, i, Ref(result), tensor, patches)
    if is_host:
        return BoundTask(run_on_host, [op, args, kwargs, outs], {}, waits=True)
    bound = _choose(op, args, kwargs, outs, patches, into_place)
    if bound.call is run_and_copy:
        for i, result in enumerate(task.results):
            if result in unused:
                outs[i] = None
                patches[:] = [p for p in patches if p.container is not outs or p.key != i]
    return bound


def plain_call(
    task: Task, tensor: Callable[[int], torch.Tensor | None], patches: list[Patch] | None = None
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the op of a task with its arguments, as it was captured; see :func:`bind`."""
    patches = [] if patches is None else patches
    args: list[Any] = [None] * len(task.args)
    for i, value in enumerate(task.args):
        args[i] = _decode(args, i, value, tensor, patches)
    kwargs: dict[str, Any] = {}
    for name, value in task.kwargs:
        kwargs[name] = _decode(kwargs, name, value, tensor, patches)
    return resolve_op(task.op), args, kwargs


def _decode(
    container: Any,
    key: Any,
    value: Any,
    tensor: Callable[[int], torch.Tensor | None],
    patches: list[Patch],
) -> Any:
    """Turn a written-down argument, to be put into ``container[key]``, into the real one.

    Not a closure: one that calls itself is a reference cycle, and would keep the tensors, and so
    the arena, until the garbage collector comes by.
    """
    if isinstance(value, Ref):
        found = tensor(value.tensor)
        if found is None:
            patches.append(Patch(container, key, value.tensor))
        return found
    if isinstance(value, Length):
        patches.append(Patch(container, key, None, value))
        return int(value)
    if isinstance(value, Symbol):
        is_device = value.kind == "device"
        return torch.device(value.name) if is_device else getattr(torch, value.name)
    if isinstance(value, tuple):
        items: list[Any] = [None] * len(value)
        for i, item in enumerate(value):
            items[i] = _decode(items, i, item, tensor, patches)
        return items
    return value


def _choose(
    op: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    outs: list[Any],
    patches: list[Patch],
    into_place: bool,
) -> BoundTask:
    """Choose how the op gets its results into place."""
    name = op._schema.name
    if op._schema.is_mutable:
        if all(r.alias_info is not None for r in op._schema.returns):
            return BoundTask(op, args, kwargs)
        return BoundTask(run_and_copy, [op, args, kwargs, outs], {})  # makes tensors as well
    if name in COPIES:
        return BoundTask(_copy, [outs, args], {})
    if str(op) == TO_HOST:
        return BoundTask(copy_to_host, [outs, args], {})
    if name in EMPTIES:
        return BoundTask(_nothing, [], {})
    if name in FILLS:
        return BoundTask(_fill, [outs, FILLS[name]], {})
    out = out_overload(op) if into_place else None
    if out is None:
        return BoundTask(run_and_copy, [op, args, kwargs, outs], {})
    declared = {a.name for a in out._schema.arguments}
    kept = {k: v for k, v in kwargs.items() if k in declared}
    for patch in patches:
        if patch.container is kwargs:
            patch.container = kept
        elif patch.container is outs:
            patch.container, patch.key = kept, _out_names(out)[patch.key]
    kept.update(zip(_out_names(out), outs, strict=True))
    return BoundTask(out, args, kept)


def _out_names(op: Any) -> list[str]:
    return [a.name for a in op._schema.arguments if a.is_out]


def _nothing() -> None:
    pass


def _copy(outs: list[torch.Tensor], args: list[Any]) -> None:
    outs[0].copy_(args[0])


def copy_to_host(outs: list[torch.Tensor], args: list[Any]) -> None:
    """Copy a result to host memory; the host does not wait."""
    outs[0].copy_(args[0], non_blocking=True)


def _fill(outs: list[torch.Tensor], value: int) -> None:
    outs[0].fill_(value)


def run_and_copy(op: Any, args: list[Any], kwargs: dict[str, Any], outs: list[Any]) -> None:
    """Run an op without ``out=``; what it returns is workspace until it is copied.

    Raises:
        TaskMismatchError: The op returns another shape or dtype than it did when it was captured.
    """
    for out, result in zip(outs, flat_results(op(*args, **kwargs)), strict=True):
        if out is None:
            continue
        if out.shape != result.shape or out.dtype != result.dtype:
            raise TaskMismatchError(
                f"{op} returns {result.dtype} of shape {tuple(result.shape)}; captured were "
                f"{out.dtype}, {tuple(out.shape)}"
            )
        out.copy_(result)


def run_on_host(op: Any, args: list[Any], kwargs: dict[str, Any], outs: list[Any]) -> None:
    """Run an op on the host: its activations come down, and its results go up to their place.

    The host waits for the activations.

    Raises:
        TaskMismatchError: torch cannot compute the op on a CPU.
    """
    down, named = [on_host(a) for a in args], {name: on_host(a) for name, a in kwargs.items()}
    try:
        run_and_copy(op, down, named, outs)
    except NotImplementedError as error:
        raise TaskMismatchError(
            f"this host cannot compute {op}: {error}. Set finepage.host_compute to 'off'."
        ) from error


def on_host(value: Any) -> Any:
    """Return a tensor in host memory; any other argument as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def flat_results(results: Any) -> list[Any]:
    """List what an op returned, the tensors of lists one by one."""
    if isinstance(results, torch.Tensor):
        return [results]
    flat: list[Any] = []
    for value in results:
        flat.extend(value if isinstance(value, (list, tuple)) else [value])
    return flat
