"""Records nodes of a graph that are alike once, because layers repeat.

torch dispatches each op of a node several times to run it over fake tensors. So the tasks of a node
are kept as a template. For a node that is like it, the recorder gets the same tasks over that
node's own buffers. Its results become fake tensors only when a node without a template reads them.

[Note: nodes that are alike]
They call the same function of torch with equal numbers. Their tensors have equal layouts, in
buffers of equal kinds and sizes, and share buffers in the same way. Sizes that vary are compared as
expressions. A node can change state that other nodes depend on: autocast, or gradients. Such a node
returns no tensor, and all templates are dropped after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate

from ds_finepage._compat.torch import (
    FakeTensor,
    FakeTensorMode,
    _disable_current_modes,
    has_free_unbacked_symbols,
)
from ds_finepage.capture.drafts import BufferDraft, TaskDraft
from ds_finepage.capture.lengths import Size, size_of
from ds_finepage.capture.recorder import DraftLayout, Recorder, layout_of
from ds_finepage.graph.taskgraph import BufferKind, Ref

MODULES = ("torch", "operator", "_operator", "math")
"""Packages whose functions do the same to equal arguments, wherever they are called."""

PLAIN = (bool, int, str, NoneType, EllipsisType)
SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


class Form(NamedTuple):
    """The arguments that make a tensor; its sizes may be symbols of torch."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of a tensor as it is now: an op may turn or resize it later."""
        place = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        return cls(*place, tensor.dtype, tensor.device)

    def new(self) -> torch.Tensor:
        """Make a tensor of this form in a storage of its own."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(eq=False, slots=True)
class Unmade:
    """A tensor of a repeated node, to be made as a fake tensor when an op needs it.

    Attributes:
        buffer: That it lies in.
        form: To make it in.
        layout: The same, as the taskgraph has it.
        made: The fake tensor.
    """

    buffer: int
    form: Form
    layout: DraftLayout
    made: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Given:
    """A result that is one of the node's tensors."""

    index: int


@dataclass(frozen=True, slots=True)
class _View:
    """A result that lies in one of the node's buffers."""

    place: int
    form: Form
    layout: DraftLayout


@dataclass(frozen=True)
class _Template:
    """The tasks of one node; its buffers are numbered by place.

    The places of the buffers of the node's arguments come first, then those of new buffers.
    """

    buffers: list[tuple[BufferKind, Size]]  # the new ones
    views: list[tuple[int, int, DraftLayout]]  # id of a tensor in the tasks, its place, its layout
    tasks: list[TaskDraft]
    written: list[int]
    whole: dict[int, Form]  # place of a new buffer -> a view of all of it
    result: Any


@dataclass
class _Arguments:
    """The arguments of a node."""

    recorder: Recorder
    tensors: list[Any] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)  # of the tensors
    buffers: list[int] = field(default_factory=list)

    def describe(self, value: Any) -> Any:
        """Return a key that is equal for values that are alike.

        Raises:
            _UnlikeError: The value is like no other.
        """
        kind = type(value)
        if kind is Unmade:
            return self._tensor(value, value.buffer, (value.layout, value.form.device, False))
        if kind is FakeTensor:
            return self._fake(value)
        if kind is float:
            return value.hex()  # 0.0 is equal to -0.0
        if kind in PLAIN or kind in SETTINGS:
            return (kind, value)  # 1 is equal to True
        if isinstance(value, (tuple, list)):
            return tuple(map(self.describe, value))
        if kind is torch.SymInt:
            return (kind, size_of(value))
        if kind is slice:
            return (kind, *map(self.describe, (value.start, value.stop, value.step)))
        raise _UnlikeError

    def kinds(self) -> tuple[Any, ...]:
        """Describe the buffers."""
        drafts = (self.recorder.buffers[buffer] for buffer in self.buffers)
        return tuple((d.kind, d.nbytes, d.is_module_buffer, d.handed is None) for d in drafts)

    def _fake(self, value: FakeTensor) -> Any:
        if not _is_plain(value):
            raise _UnlikeError
        buffer = self.recorder.buffer_of(value)
        if buffer is None:
            raise _UnlikeError
        return self._tensor(value, buffer, _described(value))

    def _tensor(self, value: Any, buffer: int, description: Any) -> Any:
        self.tensors.append(value)
        self.layouts.append(description)
        if buffer not in self.buffers:
            self.buffers.append(buffer)
        return (self.buffers.index(buffer), description)


class _UnlikeError(Exception):
    """A value does not allow a template."""


class Repeats:
    """Runs the nodes of one graph, each kind of node once."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        """Start without templates.

        Args:
            recorder: Writes down the ops.
            mode: That the graph's fake tensors belong to.
        """
        self._recorder, self._mode = recorder, mode
        self._templates: dict[Any, _Template] = {}
        self._whole: dict[int, Form] = {}  # unmade buffer -> a view of all of it
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def run(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Return the result of a node, in which tensors may be unmade.

        Args:
            target: Function or name of a method.
            args: Of the node; tensors may be unmade.
            kwargs: Likewise.
            call: Runs the node with arguments whose tensors are made.
        """
        if target is operator.getitem and type(args[0]) in (tuple, list):
            return args[0][args[1]]
        given = _Arguments(self._recorder)
        try:
            if not _is_of_torch(target):
                raise _UnlikeError
            described = given.describe(args), *((k, given.describe(v)) for k, v in kwargs.items())
        except _UnlikeError:
            return self._run(call, args, kwargs)
        key = target, described, given.kinds()
        self._note_bases(given)
        if key not in self._templates:
            return self._learn(key, given, call, args, kwargs)
        return self._repeat(self._templates[key], given)

    def made(self, values: Any) -> Any:
        """Return values with fake tensors in the place of unmade ones."""
        return map_aggregate(values, self._made)

    def _made(self, value: Any) -> Any:
        return self._make(value) if type(value) is Unmade else value

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = call(self.made(tuple(args)), self.made(kwargs))
        if not _is_data(result):
            self._templates.clear()
        return result

    def _learn(
        self, key: Any, given: _Arguments, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        recorder = self._recorder
        num_buffers, num_tasks = len(recorder.buffers), len(recorder.tasks)
        made = self.made(given.tensors)
        recorder.viewed.clear()
        result = self._run(call, args, kwargs)
        if list(map(_described, made)) != given.layouts:
            _follow(given.tensors)  # the node has turned or resized a tensor in place
        elif given.kinds() == key[-1]:
            with suppress(_UnlikeError):
                self._templates[key] = self._template(
                    [*given.buffers, *range(num_buffers, len(recorder.buffers))],
                    len(given.buffers),
                    recorder.tasks[num_tasks:],
                    made,
                    result,
                )
        return result

    def _template(
        self,
        buffers: list[int],
        num_given: int,
        tasks: list[TaskDraft],
        given: list[torch.Tensor],
        result: Any,
    ) -> _Template:
        """Make a template of a node that was just recorded.

        Args:
            buffers: The buffer at each place.
            num_given: How many of them the arguments lie in.
            tasks: Of the node.
            given: The tensors of the arguments.
            result: Of the node.
        """
        drafts = [self._recorder.buffers[b] for b in buffers]
        if any(d.payload is not None or d.handed is not None for d in drafts[num_given:]):
            raise _UnlikeError
        places = {buffer: place for place, buffer in enumerate(buffers)}
        views = [self._recorder.tensors[i] for i in dict.fromkeys(self._recorder.viewed)]
        if any(view.buffer not in places for view in views):
            raise _UnlikeError
        found = self._described_result(result, places, given, num_given)
        return _Template(
            buffers=[(draft.kind, draft.nbytes) for draft in drafts[num_given:]],
            views=[(v.id, places[v.buffer], (v.dtype, v.shape, v.stride, v.offset)) for v in views],
            tasks=[
                replace(
                    task,
                    reads={places[b] for b in task.reads},
                    writes={places[b] for b in task.writes},
                )
                for task in tasks
            ],
            written=[
                place
                for place, (buffer, draft) in enumerate(zip(buffers, drafts, strict=True))
                if draft.is_written and any(buffer in task.writes for task in tasks)
            ],
            whole=self._whole_of(found, drafts, num_given),
            result=found,
        )

    def _described_result(
        self, value: Any, places: dict[int, int], given: list[torch.Tensor], num_given: int
    ) -> Any:
        if type(value) in (tuple, list):
            found = (self._described_result(v, places, given, num_given) for v in value)
            return type(value)(found)
        for index, tensor in enumerate(given):
            if value is tensor:
                return _Given(index)
        if type(value) is not FakeTensor or not _is_plain(value) or value.requires_grad:
            raise _UnlikeError
        buffer = self._recorder.buffer_of(value)
        if buffer not in places or has_free_unbacked_symbols(value):
            raise _UnlikeError
        # Where the node is repeated, a tensor of this dtype has to be known in the buffer.
        known = {(self._recorder.buffer_of(t), t.dtype) for t in given}
        if places[buffer] < num_given and (buffer, value.dtype) not in known:
            raise _UnlikeError
        return _View(places[buffer], Form.of(value), layout_of(value))

    def _whole_of(self, result: Any, drafts: list[BufferDraft], num_given: int) -> dict[int, Form]:
        """Return, for each new buffer that a result lies in, a result that is all of it."""
        found: dict[int, Form] = {}
        views = [v for v in _flat(result) if isinstance(v, _View) and v.place >= num_given]
        with _disable_current_modes(), self._mode:
            for view in views:
                nbytes = size_of(view.form.new().untyped_storage().nbytes())
                if view.layout[-1] == 0 and nbytes == drafts[view.place].nbytes:
                    found.setdefault(view.place, view.form)
        if any(v.place not in found or found[v.place].dtype != v.form.dtype for v in views):
            raise _UnlikeError
        return found

    def _repeat(self, template: _Template, given: _Arguments) -> Any:
        """Write down a template's tasks for other arguments; return the results."""
        recorder = self._recorder
        num_buffers = len(recorder.buffers)
        recorder.buffers += [BufferDraft(None, *new) for new in template.buffers]
        buffers = [*given.buffers, *range(num_buffers, len(recorder.buffers))]
        ids = {i: recorder.view_id(buffers[at], layout) for i, at, layout in template.views}
        for place in template.written:
            recorder.buffers[buffers[place]].is_written = True
        self._whole.update((buffers[place], form) for place, form in template.whole.items())
        recorder.tasks += [
            replace(
                task,
                label=recorder.label,
                args=_with_ids(task.args, ids),
                kwargs=_with_ids(task.kwargs, ids),
                results=tuple(None if r is None else ids[r] for r in task.results),
                reads={buffers[place] for place in task.reads},
                writes={buffers[place] for place in task.writes},
            )
            for task in template.tasks
        ]
        return _result(template.result, given.tensors, buffers)

    def _note_bases(self, given: _Arguments) -> None:
        for tensor in given.tensors:
            if type(tensor) is FakeTensor:
                buffer = self._recorder.buffer_of(tensor)
                assert buffer is not None, "it was described"
                self._bases.setdefault((buffer, tensor.dtype), tensor)

    def _make(self, unmade: Unmade) -> torch.Tensor:
        if unmade.made is None:
            with _disable_current_modes(), self._mode:
                # A tensor of its own, because an op may turn it in place.
                base = self._base(unmade.buffer, unmade.form.dtype)
                unmade.made = base.as_strided(*unmade.form[:3])
        return unmade.made

    def _base(self, buffer: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a fake tensor in a buffer, and make the buffer's storage if there is none."""
        if (buffer, dtype) not in self._bases:
            base = self._whole[buffer].new()
            self._recorder.set_storage(buffer, base)
            self._bases[buffer, dtype] = base
        return self._bases[buffer, dtype]


def _described(tensor: torch.Tensor) -> tuple[DraftLayout, torch.device, bool]:
    return layout_of(tensor), tensor.device, tensor.requires_grad


def _follow(tensors: list[Any]) -> None:
    """Describe tensors that were made, and changed since, as they are now."""
    for tensor in tensors:
        if type(tensor) is Unmade and tensor.made is not None:
            tensor.form, tensor.layout = Form.of(tensor.made), layout_of(tensor.made)


def _result(described: Any, given: list[Any], buffers: list[int]) -> Any:
    if isinstance(described, _Given):
        return given[described.index]
    if isinstance(described, _View):
        return Unmade(buffers[described.place], described.form, described.layout)
    return type(described)(_result(d, given, buffers) for d in described)


def _flat(value: Any) -> list[Any]:
    if type(value) in (tuple, list):
        return [found for v in value for found in _flat(v)]
    return [value]


def _with_ids(value: Any, ids: dict[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(ids[value.tensor])
    if isinstance(value, tuple):
        return tuple(_with_ids(v, ids) for v in value)
    return value


def _is_plain(tensor: FakeTensor) -> bool:
    """Tell whether the layout of a fake tensor says all about it."""
    is_strided = tensor.layout is torch.strided and tensor.constant is None
    return is_strided and not tensor.is_conj() and not tensor.is_neg()


def _is_data(result: Any) -> bool:
    """Tell whether a node returned tensors and numbers, and so did not change torch's state."""
    if isinstance(result, (tuple, list)):
        return all(map(_is_data, result))
    return isinstance(result, (torch.Tensor, *NUMBERS))


def _is_of_torch(target: Any) -> bool:
    package = "torch" if isinstance(target, str) else getattr(target, "__module__", None)
    return str(package).partition(".")[0] in MODULES
