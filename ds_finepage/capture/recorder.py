"""Records a Dynamo graph's ATen ops over fake tensors as a taskgraph.

Reads a torch-level FX graph and the metadata of one call's arguments; produces a ``TaskGraph``. No
bytes are read or moved: everything runs on FakeTensors of the concrete shapes.

[Note: one dispatch mode instead of make_fx]
``make_fx`` builds an ATen graph that would have to be walked a second time. A dispatch mode sees
the same ops with the same arguments, in-place ops included, in one walk; it also sees the storages
themselves, which is what tells a view from a task, and which node of the torch-level graph is
being run, which is where the module names come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_finepage._compat.torch import (
    FakeTensor,
    TorchDispatchMode,
    _disable_current_modes,
    has_free_unbacked_symbols,
    tree_leaves,
)
from ds_finepage.capture.collectives import NAMESPACES
from ds_finepage.capture.counts import FLOP_COUNTS, moved_bytes
from ds_finepage.capture.dynamo_graph import BufferChangedError
from ds_finepage.capture.lengths import Size, size_of, sizes_of, with_known_shapes
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import (
    TO_DEVICE,
    TO_HOST,
    BufferKind,
    GraphOutput,
    ModuleCall,
    Ref,
    Symbol,
    Task,
    TensorView,
)

MAX_CONSTANT_BYTES = 1 << 20
"""Larger lifted constants are refused: they belong into a module buffer."""


@dataclass
class BufferDraft:
    """Bytes that ops make, or that are given to the graph."""

    storage: torch.UntypedStorage  # held: its identity is not given away
    kind: BufferKind
    nbytes: Size
    name: str = ""
    payload: bytes | None = None
    is_written: bool = False
    handed: int | None = None  # tensor in host memory that it is a copy of
    is_module_buffer: bool = False  # of a weight

    def refusal(self, message: str) -> Exception:
        """Return the error of a use that a weight does not allow."""
        return BufferChangedError(self.name) if self.is_module_buffer else CaptureError(message)


class Recorder(TorchDispatchMode):
    """Writes down every op that reaches the dispatcher while the mode is on.

    Sizes that vary are expressions, in tasks and views too; :func:`finish` evaluates them.

    Invariant: every storage that was seen is held, by identity, in ``_storages``.
    """

    def __init__(self, fix_layout: Callable[..., Any] | None = None) -> None:
        """Start empty; ``fix_layout`` is a :class:`LayoutFixer`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._fix_layout = fix_layout
        self._storages: dict[int, int] = {}  # storage identity -> buffer id
        self._tensors: dict[tuple[Any, ...], int] = {}
        self.buffers: list[BufferDraft] = []
        self.tensors: list[TensorView] = []
        self.tasks: list[Task] = []
        self.calls: list[ModuleCall] = []
        self.label = ""
        self._open_calls: list[int] = []

    def enter(self, name: str, class_name: str) -> None:
        """Note that a module is called: tasks are its own until it returns or calls another."""
        at, depth = len(self.tasks), len(self._open_calls)
        self._open_calls.append(len(self.calls))
        self.calls.append(ModuleCall(name, class_name, depth, at, at))
        self.label = name

    def leave(self) -> None:
        """Note that the module that was called last returns."""
        call = self._open_calls.pop()
        self.calls[call] = replace(self.calls[call], end=len(self.tasks))
        self.label = self.calls[self._open_calls[-1]].name if self._open_calls else ""

    def add_buffer(
        self, tensor: torch.Tensor, kind: BufferKind, nbytes: Size, name: str = ""
    ) -> int:
        """Register the storage of a tensor; return its buffer."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = len(self.buffers)
        self.buffers.append(BufferDraft(storage, kind, nbytes, name))
        return len(self.buffers) - 1

    def buffer_of(self, tensor: torch.Tensor) -> int | None:
        """Return the buffer that a tensor lies in; None where it is not known."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Return the id of a tensor, registering its view, and its buffer if it is a constant."""
        if not isinstance(tensor, FakeTensor):
            return self._constant(tensor)
        buffer = self.buffer_of(tensor)
        if buffer is None:
            raise CaptureError("an op returned a tensor whose storage no op made")
        return self._view_id(buffer, tensor)

    def _view_id(self, buffer: int, tensor: torch.Tensor) -> int:
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError("a tensor is conjugated or negated only when it is read")
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, stride = sizes_of(tensor.shape), sizes_of(tensor.stride())
        key = (buffer, dtype, shape, stride, size_of(tensor.storage_offset()))
        if key not in self._tensors:
            self._tensors[key] = len(self.tensors)
            self.tensors.append(TensorView(len(self.tensors), *key))
        return self._tensors[key]

    def outputs_of(
        self, name: str, returned: Sequence[Any], args: Sequence[Any]
    ) -> tuple[GraphOutput, ...]:
        """Describe the values that a graph returns.

        Raises:
            CaptureError: A value is a view of a weight.
            BufferChangedError: It is a view of a buffer.
        """
        positions = {id(arg): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        outputs: list[GraphOutput] = []
        num_host = 0
        for value in returned:
            if value is None:
                outputs.append(GraphOutput())
            elif id(value) in positions:
                outputs.append(GraphOutput(position=positions[id(value)]))
            elif isinstance(value, torch.Tensor):
                tensor = self.tensor_id(value)
                draft = self.buffers[self.tensors[tensor].buffer]
                if draft.kind is BufferKind.WEIGHT:
                    raise draft.refusal(f"{name} returns a view of weight {draft.name}")
                outputs.append(GraphOutput(tensor=tensor))
            else:
                outputs.append(GraphOutput(host=num_host))
                num_host += 1
        return tuple(outputs)

    def _constant(self, tensor: torch.Tensor) -> int:
        require_plain(tensor)
        identity = tensor.untyped_storage()._cdata
        if identity not in self._storages:
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes > MAX_CONSTANT_BYTES:
                raise CaptureError(
                    f"the graph holds a constant of {nbytes} bytes; at most {MAX_CONSTANT_BYTES} "
                    f"can be lifted. Register it as a module buffer."
                )
            buffer = self.add_buffer(tensor, BufferKind.CONSTANT, nbytes)
            with _disable_current_modes():
                flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage().cpu())
                self.buffers[buffer].payload = flat.numpy().tobytes()
        return self._view_id(self._storages[identity], tensor)

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.tensor_id(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._encode(v) for v in value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.SymInt) and not has_free_unbacked_symbols(value):
            return size_of(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError("a size depends on data, so the op cannot be planned")
        for kind in ("dtype", "layout", "memory_format", "device"):
            if isinstance(value, getattr(torch, kind)):
                return Symbol(kind, str(value).removeprefix("torch."))
        raise CaptureError(f"argument of type {type(value).__name__} cannot be written down")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one op on its fake arguments and write it down if it computes."""
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs ops on its inner tensors, and they come here
        if func.namespace in NAMESPACES:
            raise CaptureError(f"{func} may wait for other ranks, and no task stands for it")
        args = with_known_shapes(func, args)
        result = func(*args, **kwargs)
        if self._fix_layout is not None:
            result = self._fix_layout(func, args, kwargs, result)
        flat_args, flat_results = tree_leaves((args, kwargs)), tree_leaves(result)
        if not func._schema.is_mutable and not _tensors(flat_results):
            return result  # a query such as sym_size
        if str(func) == TO_DEVICE:
            self._hand_over(args[0], result)
        else:
            self._record(func, args, kwargs, _tensors(flat_args), flat_results)
        return result

    def _hand_over(self, rows: torch.Tensor, result: torch.Tensor) -> None:
        """Note that a tensor which the call brings in host memory is to be on the device."""
        view = self.tensors[self.tensor_id(rows)]
        # The argument itself: a symbol in its shape may have become a number since.
        given = next(
            t.id for t in self.tensors if (t.buffer, t.offset) == (view.buffer, view.offset)
        )
        draft = self.buffers[view.buffer]
        if draft.kind not in (BufferKind.INPUT, BufferKind.HOST) or not rows.is_contiguous():
            raise CaptureError("only what the caller brings in host memory can be brought in")
        draft.kind = BufferKind.HOST
        nbytes = size_of(result.untyped_storage().nbytes())
        # Their number is the name of the same rows in each graph of a model.
        name = f"KV rows {sum(b.handed is not None for b in self.buffers)}"
        buffer = self.add_buffer(result, BufferKind.WEIGHT, nbytes, name)
        self.buffers[buffer].handed = given

    def _record(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[Any]
    ) -> None:
        for tensor in given:
            self.tensor_id(tensor)
        mutated = [
            value
            for argument, value in _named_arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = {self._buffer_of(t) for t in _tensors(tree_leaves(mutated))}
        fresh = set()
        for value in _tensors(results):
            if not isinstance(value, FakeTensor):
                self._constant(value)  # lift_fresh of a literal and the like
            elif self.buffer_of(value) is None:
                nbytes = value.untyped_storage().nbytes()
                kind = BufferKind.HOST if str(func) == TO_HOST else BufferKind.ACTIVATION
                fresh.add(self.add_buffer(value, kind, size_of(nbytes)))
        if not written and not fresh:
            return  # a view
        for buffer in written:
            draft = self.buffers[buffer]
            is_fixed = draft.kind in (BufferKind.WEIGHT, BufferKind.CONSTANT)
            if is_fixed and draft.handed is None:
                raise draft.refusal(f"{func} writes to {draft.kind.value} {draft.name or buffer}")
            draft.is_written = True
        # An op that changes a buffer in place may leave part of it as it was, so it reads it too.
        reads = {self._buffer_of(t) for t in given} | written
        count = FLOP_COUNTS.get(str(func.overloadpacket))
        made = results[0] if len(results) == 1 else tuple(results)
        self.tasks.append(
            Task(
                index=len(self.tasks),
                op=str(func),
                label=self.label,
                args=self._encode(args),
                kwargs=tuple((k, self._encode(v)) for k, v in kwargs.items()),
                results=tuple(
                    self.tensor_id(r) if isinstance(r, torch.Tensor) else None for r in results
                ),
                reads=tuple(sorted(reads)),
                writes=tuple(sorted(written | fresh)),
                flops=size_of(count(*args, **kwargs, out_val=made)) if count else 0,
                moved_bytes=size_of(
                    moved_bytes(str(func.overloadpacket), given, _tensors(results), args)
                ),
            )
        )

    def _buffer_of(self, tensor: torch.Tensor) -> int:
        return self.tensors[self.tensor_id(tensor)].buffer


def require_plain(tensor: torch.Tensor) -> None:
    """Refuse a tensor that only wraps others, as quantized ones do: there is no storage to place.

    Raises:
        CaptureError: It is such a tensor.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        raise CaptureError(
            f"a tensor of type {type(tensor).__name__} wraps other tensors, and has no bytes of "
            f"its own that could be planned"
        )


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _named_arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    declared = func._schema.arguments
    by_name = {a.name: a for a in declared}
    paired = list(zip(declared, args, strict=False))
    return paired + [(by_name[name], value) for name, value in kwargs.items()]
