"""The taskgraph: one forward pass as a list of tasks over buffers.

Capture writes it. The planner reads sizes and uses only; the executor reads the arguments too. It
has no addresses and no transfers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import NonNegativeInt

from ds_finepage.graph.arguments import Argument
from ds_finepage.graph.arguments import Length as Length
from ds_finepage.graph.arguments import Ref as Ref
from ds_finepage.graph.arguments import Symbol as Symbol


class BufferKind(str, enum.Enum):
    """The contents of a buffer, and its owner."""

    WEIGHT = "weight"  # read-only, host master copy: always clean
    STATE = "state"  # KV cache: mutable, the caller owns it, lives across calls
    ACTIVATION = "activation"  # made and last used inside one pass
    INPUT = "input"  # from the caller, for one pass
    OUTPUT = "output"  # made in the pass, returned to the caller
    CONSTANT = "constant"  # small, part of the program text
    HOST = "host"  # in host memory, from the caller or returned to the caller
    MASTER = (
        "master"  # a weight, or rows of a KV cache, that a task reads where it lies on the host
    )

    @property
    def is_paged(self) -> bool:
        """True where the planner places the buffer in the arena."""
        return self in (BufferKind.WEIGHT, BufferKind.ACTIVATION)

    @property
    def is_on_host(self) -> bool:
        """True where the buffer takes no device bytes."""
        return self in (BufferKind.HOST, BufferKind.MASTER)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The bytes of one torch storage, or of a slice of a weight: the unit that is paged.

    Invariant: ``id`` is the position in ``TaskGraph.buffers``.
    """

    id: NonNegativeInt
    kind: BufferKind
    nbytes: NonNegativeInt
    name: str = ""  # weight: the parameter's qualified name; else free text
    payload: bytes | None = None  # CONSTANT only: its contents
    offset: NonNegativeInt = 0  # WEIGHT, MASTER: first byte in the host master ``name``
    gather: NonNegativeInt | None = None  # WEIGHT only: see ``TaskGraph.is_handed``

    @property
    def key(self) -> str:
        """A name of the buffer that is the same in all taskgraphs of a model, slices included."""
        return f"{self.name}[{self.offset}:{self.offset + self.nbytes}]"


def name_of_key(key: str) -> str:
    """Return the name of the weight in a ``Buffer.key``."""
    return key.rpartition("[")[0]


def layer_of(label: str) -> str | None:
    """Return the layer of a label, the path up to its first number; None outside all layers."""
    parts = label.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def block_of(weight: str) -> str:
    """Return the layer of a weight by its name, or its module outside of all layers."""
    return layer_of(weight) or weight.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: a typed, strided view of a buffer. Offsets and strides are in elements.

    Invariant: ``id`` is the position in ``TaskGraph.tensors``.
    """

    id: NonNegativeInt
    buffer: NonNegativeInt
    dtype: str  # "float32", "bfloat16", ...: the attribute of torch
    shape: tuple[NonNegativeInt, ...]
    stride: tuple[NonNegativeInt, ...]
    offset: NonNegativeInt = 0


@dataclass(frozen=True, slots=True)
class Task:
    """One captured ATen op call that computes.

    ``reads`` holds the buffers whose contents must be valid before. ``writes`` holds the buffers
    that the task creates or changes; a buffer in both is changed in place. ``touches`` holds
    buffers in which the task writes one region; touches run in any order. A task with
    ``op == JOIN`` reads such a buffer: it runs after the touches and before every use.

    Invariant: ``index`` is the position in ``TaskGraph.tasks`` and is program order. Each tuple of
    buffer ids is sorted and free of repeats.
    """

    index: NonNegativeInt
    op: str  # "aten.mm.default"
    label: str = ""  # qualified name of the module that called it
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    results: tuple[
        NonNegativeInt | None, ...
    ] = ()  # tensor ids, in the order in which the op returns them
    reads: tuple[NonNegativeInt, ...] = ()
    writes: tuple[NonNegativeInt, ...] = ()
    touches: tuple[NonNegativeInt, ...] = ()
    workspace_bytes: NonNegativeInt = 0  # device bytes the op takes for itself while it runs
    flops: NonNegativeInt = 0
    moved_bytes: NonNegativeInt = 0  # read plus written in device memory
    time_ns: NonNegativeInt | None = None  # measured; None: derive it from a hardware profile

    @property
    def buffers(self) -> tuple[int, ...]:
        """The buffers that must be resident while the task runs, sorted."""
        return tuple(sorted({*self.reads, *self.writes, *self.touches}))

    @property
    def where(self) -> str:
        """The task as an error names it."""
        return f"task {self.index} {self.op}" + (f" ({self.label})" if self.label else "")


ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of an element, by dtype; for the dtypes of weights."""

PACKED_ITEMSIZE = {**ITEMSIZE, "uint8": 1}
"""The same, and for packed numbers."""

JOIN = "finepage.join"
TO_DEVICE = "finepage.to_device.default"
TO_HOST = "finepage.to_host.default"
"""Ops that move rows of a KV cache in host memory; see ``execution/host_ops.py``."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """Says which call argument carries a tensor."""

    position: NonNegativeInt
    tensor: NonNegativeInt


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """Says what one returned value is: at most one of the three is set; none of them is None.

    ``tensor``: a tensor of the graph. ``position``: the call argument itself, returned as it is.
    ``host``: a Python number computed on the host, by its index among the host outputs.
    """

    tensor: NonNegativeInt | None = None
    position: NonNegativeInt | None = None
    host: NonNegativeInt | None = None


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: it ran the tasks ``[begin, end)``, with those of its submodules.

    Calls are in the order in which they began. ``depth`` counts the calls around this one; it names
    the caller of a module that runs no task.
    """

    name: str  # qualified
    class_name: str
    depth: NonNegativeInt
    begin: NonNegativeInt
    end: NonNegativeInt


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A weight that holds one matrix an expert, and that is cut into slices.

    Each slice holds the same rows of every matrix, those of one expert after those of another. Its
    ``offset`` counts the bytes of these rows in all matrices. A kernel for groups of rows takes
    such a slice as it takes the whole weight.
    """

    name: str  # the parameter's qualified name
    num_matrices: NonNegativeInt
    matrix_bytes: NonNegativeInt

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return self.num_matrices * self.matrix_bytes


@dataclass(frozen=True)
class TaskGraph:
    """Tasks, buffers and tensors of one pass of one concrete shape.

    ``calls`` says which module ran which tasks, for policies that work module by module. It is
    empty if capture cannot tell; such policies then use the labels of tasks. ``symbols`` are the
    sizes that differ from call to call, and the call position that carries each. Buffers have the
    sizes of the largest planned call; sizes that depend on a symbol are a :class:`Length`.
    ``experts`` describes weights whose slices take rows of several matrices. ``parted`` names the
    weights whose host masters lie in equal parts on ``num_ranks`` ranks, one part after the other;
    their buffers have room for all parts.
    """

    name: str
    buffers: tuple[Buffer, ...]
    tensors: tuple[TensorView, ...]
    tasks: tuple[Task, ...]
    inputs: tuple[GraphInput, ...] = ()
    outputs: tuple[GraphOutput, ...] = ()
    versions: tuple[tuple[str, str], ...] = field(default=())  # ("torch", "2.13.0"), ...
    calls: tuple[ModuleCall, ...] = ()
    symbols: tuple[tuple[str, int], ...] = ()
    experts: tuple[ExpertMatrices, ...] = ()
    parted: tuple[str, ...] = ()
    num_ranks: NonNegativeInt = 1

    @cached_property
    def _parted(self) -> frozenset[str]:
        return frozenset(self.parted)

    def num_parts(self, buffer: Buffer) -> int:
        """Return the number of ranks that hold the host master of a buffer together."""
        is_parted = buffer.kind is BufferKind.WEIGHT and buffer.name in self._parted
        return self.num_ranks if is_parted else 1

    @cached_property
    def experts_by_name(self) -> dict[str, ExpertMatrices]:
        """The entries of ``experts`` by the name of the weight."""
        return {e.name: e for e in self.experts}

    def num_pieces(self, buffer: Buffer) -> int:
        """Return the number of separate ranges of the host master that a weight's bytes lie in."""
        experts = self.experts_by_name.get(buffer.name) if self.experts else None
        return 1 if experts is None or buffer.nbytes == experts.nbytes else experts.num_matrices

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights; tied weights count once, rows of a KV cache not at all."""
        weights = [b for b in self.buffers if b.kind in (BufferKind.WEIGHT, BufferKind.MASTER)]
        return sum(b.nbytes for b in weights if not self.is_handed(b))

    @cached_property
    def host_tasks(self) -> frozenset[int]:
        """The tasks that the host computes: those that read what lies in its memory."""
        masters = (b.id for b in self.buffers if b.kind is BufferKind.MASTER)
        return frozenset(task for b in masters for task in self.uses[b])

    @cached_property
    def workspace_bytes(self) -> int:
        """The most workspace at one time: copies to the host, and its tasks, run beside others."""
        largest: dict[tuple[bool, bool], int] = {}
        for task in self.tasks:
            lane = task.op == TO_HOST, task.index in self.host_tasks
            largest[lane] = max(largest.get(lane, 0), task.workspace_bytes)
        return sum(largest.values())

    def is_handed(self, buffer: Buffer) -> bool:
        """Tell whether a buffer's contents are a tensor that the call gives in host memory.

        If so, ``gather`` is that tensor. Otherwise ``gather`` is the tensor of the row indices, and
        the contents are those rows of the weight ``name``.
        """
        if buffer.gather is None:
            return False
        return self.buffers[self.tensors[buffer.gather].buffer].kind is BufferKind.HOST

    def can_be_kept(self, buffer: Buffer) -> bool:
        """Tell whether a buffer may stay in the arena from pass to pass."""
        return buffer.kind is BufferKind.WEIGHT and (
            buffer.gather is None or self.is_handed(buffer)
        )

    def paged(self, task: Task) -> tuple[int, ...]:
        """Return the buffers of a task that live in the arena, sorted."""
        return self._paged[task.index]

    @cached_property
    def buffers_of(self) -> tuple[tuple[int, ...], ...]:
        """For each task, by index: :attr:`Task.buffers`."""
        return tuple(task.buffers for task in self.tasks)

    @cached_property
    def _paged(self) -> tuple[tuple[int, ...], ...]:
        is_paged = [b.kind.is_paged for b in self.buffers]
        return tuple(tuple(b for b in used if is_paged[b]) for used in self.buffers_of)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each buffer, the indices of the tasks that read, write or touch it, ascending."""
        found: list[list[int]] = [[] for _ in self.buffers]
        for index, used in enumerate(self.buffers_of):
            for buffer in used:
                found[buffer].append(index)
        return tuple(map(tuple, found))
