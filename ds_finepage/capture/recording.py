"""Captures calls of a Dynamo graph: for exactly their sizes, or once for a range of sizes.

A cache that grows by a row a step would otherwise need a capture a step. Dynamo passes each size
that has changed before as an integer of its own; here those integers become symbols of a shape
environment of ours, the pass is recorded once, and every size in the recording is an expression
in them. The guards of the recording (its assumptions about the sizes) are kept, and checked before
it is used for other sizes.

Some arguments are views of one block of memory: the keys and the values of all layers of a paged
KV cache. Such a block is one buffer, so its bytes count once. The plan holds for calls whose
arguments lie in the block in the same way.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Interpreter, Node

from ds_finepage._compat.torch import FakeTensorMode, leaving_no_transform
from ds_finepage.capture.dynamo_graph import BufferChangedError, DynamoGraph
from ds_finepage.capture.finishing import finish
from ds_finepage.capture.layouts import LayoutFixer, StridesOf
from ds_finepage.capture.lengths import Size, SymbolicSizes, size_of, symbols_of
from ds_finepage.capture.recorder import Recorder, require_plain
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import BufferKind, GraphInput, GraphOutput, TaskGraph

OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say nothing about a graph; the next call records it. Fake tensors begin with a real
allocation on their device."""

logger = logging.getLogger(__name__)
fake_tensor_logger = logging.getLogger("torch._subclasses.fake_tensor")

MAX_RECORDINGS = 8
"""Recordings of one graph for ranges of sizes; further shapes are captured one by one."""

MIN_BUCKET = 16
"""Calls with fewer rows are planned for this many."""

NEAR = 2
SMALL = 8

MOST_ROOM = 2
"""A call runs in a plan that is there, if its sizes are at most so many times those of its own, or
at most ``MIN_BUCKET``."""

HIGHER_ORDER = "higher_order"
"""The namespace of torch's ops that call graphs, such as ``torch.cond``."""

NOT_MODULES = {"", "_modules", "__dict__"}
"""Parts of Dynamo's source of a module that are attributes of its parent, not modules."""

GRADIENT_FLAGS = {"aten._linalg_svd.default": (2, 1), "aten._linalg_eigh.default": (2, 0)}
"""Ops with an argument, by its position, that asks for vectors too, and is on if it is left out;
and which of their results is the values.

``linalg.svdvals`` and ``linalg.eigvalsh`` need the vectors for gradients alone, so eager PyTorch
does not ask for them then. It always does where a dispatch mode looks on, as capture does.
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The calls of a graph that are planned for the same sizes.

    Attributes:
        key: Tells it from the other buckets of its graph.
        recording: Serves its calls.
        values: The sizes of the call.
        sizes: The sizes to plan for.
        is_new: True where the recording was made just now.
    """

    key: tuple[Any, ...]
    recording: Recording
    values: Mapping[str, int]
    sizes: Mapping[str, int]
    is_new: bool

    def for_sizes(self, sizes: Mapping[str, int]) -> Bucket:
        """Return the bucket of the calls that are planned for other sizes."""
        recording, _, *fixed = self.key
        key = (recording, self.recording.only_deciding(sizes), *fixed)
        return replace(self, key=key, sizes=sizes, is_new=False)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Tell whether calls of these sizes have room in a plan of the bucket."""
        return all(values[name] <= size for name, size in self.sizes.items())

    def has_room_for(self, other: Bucket) -> bool:
        """Tell whether the call of another bucket can run in a plan for these sizes."""
        if self.recording is not other.recording or self.key[2:] != other.key[2:]:
            return False
        most = {name: max(MOST_ROOM * size, MIN_BUCKET) for name, size in other.sizes.items()}
        is_near = all(size <= most[name] for name, size in self.sizes.items())
        return is_near and self.holds(other.values)


class Recordings:
    """The recordings of one graph, each for a range of sizes."""

    def __init__(self, graph: DynamoGraph) -> None:
        self._graph = graph
        self._found: list[Recording] = []
        self._is_of_one_size = False  # the graph cannot be recorded for a range of sizes

    def bucket_of(self, args: Sequence[Any], strides_of: StridesOf) -> Bucket | None:
        """Return the bucket of a call; None where the call must be recorded for its sizes alone."""
        sharing = self._graph.sharing_of(args)
        for recording in self._found:
            values = recording.values_of(args)
            if recording.sharing == sharing and recording.admits(values):
                return self._bucket(recording, args, values, is_new=False)
        if len(self._found) >= MAX_RECORDINGS or self._is_of_one_size:
            return None
        try:
            made = record_range(self._graph, args, strides_of=strides_of)
        except CaptureError as error:
            logger.info("each size of %s is captured by itself: %s", self._graph.name, error)
            made = None
        if made is None:
            self._is_of_one_size = True
            return None
        self._found.append(made)
        return self._bucket(made, args, made.values_of(args), is_new=True)

    def _bucket(
        self, recording: Recording, args: Sequence[Any], values: Mapping[str, int], *, is_new: bool
    ) -> Bucket:
        sizes = recording.upper_end(values)
        fixed = tuple(args[i] for i in self._graph.fixed_positions)
        key = (id(recording), recording.only_deciding(sizes), fixed)
        return Bucket(key, recording, values, sizes, is_new)


@dataclass(frozen=True)
class Recording:
    """A captured call, to be had as the taskgraph of any sizes that it admits.

    ``sharing`` says how arguments lie in blocks of memory that they share.
    """

    name: str
    recorder: Recorder
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    sizes: SymbolicSizes
    sharing: tuple[Any, ...]
    _ends: dict[tuple[tuple[str, int], ...], int] = field(
        default_factory=dict, init=False, compare=False
    )

    def values_of(self, args: Sequence[Any]) -> dict[str, int]:
        """Return what a call passes for the symbols."""
        return {name: args[position] for name, position in self.sizes.positions.items()}

    @cached_property
    def deciding(self) -> frozenset[str]:
        """The symbols that any buffer or view is as large as; others are but counted with."""
        sizes: list[Size] = [buffer.nbytes for buffer in self.recorder.buffers]
        for view in self.recorder.tensors:
            sizes += (*view.shape, *view.stride, view.offset)
        return symbols_of(sizes)

    def only_deciding(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return those of the sizes that a plan depends on."""
        return tuple(size for name, size in sizes.items() if name in self.deciding)

    @cached_property
    def capacities(self) -> frozenset[str]:
        """The symbols that rows of a KV cache are as large as: they have room for later ones."""
        buffers = self.recorder.buffers
        written = (b.nbytes for b in buffers if b.kind is BufferKind.INPUT and b.is_written)
        return symbols_of(written) | self.kept

    @cached_property
    def kept(self) -> frozenset[str]:
        """The symbols that rows in host memory are as large as; a plan may keep a copy of them."""
        buffers = self.recorder.buffers
        return symbols_of(b.nbytes for b in buffers if b.handed is not None)

    def upper_end(self, values: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes to plan for; symbols that are but counted with stay as they are.

        Where a KV cache has room for rows that come later, the sizes that grow fill it.
        """
        rooms = {n: _rounded(values[n]) for n in self.deciding & self.capacities}
        rooms |= {n: values[n] for n in rooms.keys() & self.kept}
        more = 2 if rooms else 0  # a room has a row for the new token, and one that stays free
        others = {n: v + more for n, v in values.items() if n in self.deciding - self.capacities}
        ends = {**values, **upper_end(others), **rooms}
        if not rooms:
            return ends
        growing = self.growing(values)
        least = min(values[n] for n in growing)

        def filled(end: int) -> dict[str, int]:
            return {**ends, **{n: values[n] - least + end for n in growing}}

        key = tuple(sorted(filled(0).items()))  # the same for all rows in a room
        if self._ends.get(key, -1) < least:
            most = max(rooms.values()) - least
            self._ends[key] = least + _most(most, lambda more: self.admits(filled(least + more)))
        return filled(self._ends[key])

    def growing(self, values: Mapping[str, int]) -> frozenset[str]:
        """Return the symbols that grow from step to step."""
        names = self.deciding - self.capacities or self.deciding
        return growing_sizes({n: v for n, v in values.items() if n in names})

    def grown(self, values: Mapping[str, int], more: int) -> dict[str, int]:
        """Return the sizes of a call that is larger by ``more``, as far as its plan may be."""
        top = self.upper_end(values)
        return {name: min(value + more, top[name]) for name, value in values.items()}

    def room_to_grow(self, values: Mapping[str, int], has_room: Callable[[TaskGraph], bool]) -> int:
        """Return by how much a call can grow until it has no room, or needs another plan."""
        top = self.upper_end(values)
        most = max((top[name] - values[name] for name in values), default=0)

        def holds(more: int) -> bool:
            sizes = self.grown(values, more)
            return self.admits(sizes) and has_room(self.at(sizes))

        return _most(most, holds)

    def admits(self, values: Mapping[str, int]) -> bool:
        """Tell whether the recording is that of a call with these sizes too."""
        return self.sizes.admits(values)

    def at(self, values: Mapping[str, int]) -> TaskGraph:
        """Return the taskgraph with buffers as large as these sizes need them."""
        symbols = tuple(self.sizes.positions.items())
        given = self.recorder, self.name, self.inputs, self.outputs
        found = finish(*given, values=values, symbols=symbols)
        _require_ops_of_eager(found)
        return found


def record(
    graph: DynamoGraph, args: Sequence[Any], *, strides_of: StridesOf | None = None
) -> TaskGraph:
    """Capture a call for exactly its sizes.

    Without ``strides_of``, results lie as torch says.

    Raises:
        CaptureError: The graph cannot be written down as a taskgraph: a size or a branch
            depends on data, a weight is changed or returned.
    """
    return _record(graph, args, SymbolicSizes((), ()), strides_of).at({})


def record_range(
    graph: DynamoGraph, args: Sequence[Any], *, strides_of: StridesOf | None = None
) -> Recording | None:
    """Capture a call with the sizes that differ from call to call as symbols.

    Returns:
        None where there are no such sizes.

    Raises:
        CaptureError: As :func:`record`.
    """
    sizes = SymbolicSizes(graph.placeholders, args)
    if not sizes:
        return None
    # An op whose shapes torch cannot work out with symbols is no error here, but torch says so.
    level = fake_tensor_logger.level
    fake_tensor_logger.setLevel(logging.CRITICAL)
    try:
        return _record(graph, args, sizes, strides_of)
    finally:
        fake_tensor_logger.setLevel(level)


def _record(
    graph: DynamoGraph,
    args: Sequence[Any],
    sizes: SymbolicSizes,
    strides_of: StridesOf | None,
) -> Recording:
    recorder = Recorder(None if strides_of is None else LayoutFixer(strides_of, sizes.values))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes.env if sizes else None)
    with torch.inference_mode(False), torch.no_grad(), mode:
        labeller = _Labeller(graph, recorder)
        fakes, inputs = _make_fakes(graph, args, recorder, sizes)
        try:
            with recorder, leaving_no_transform():
                returned = labeller.run(*fakes)
        except OF_THE_DEVICE:
            raise
        except (CaptureError, BufferChangedError) as error:
            error.args = (_without_place(error), *error.args[1:])
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {_without_place(error)}"
            raise CaptureError(f"{graph.name}: {what}") from error
        outputs = recorder.outputs_of(graph.name, returned, fakes)
    if sum(output.host is not None for output in outputs) != graph.num_host_outputs:
        raise CaptureError(f"{graph.name} returns a number that depends on tensor data")
    return Recording(graph.name, recorder, inputs, outputs, sizes, graph.sharing_of(args))


def _make_fakes(
    graph: DynamoGraph, args: Sequence[Any], recorder: Recorder, sizes: SymbolicSizes
) -> tuple[list[Any], tuple[GraphInput, ...]]:
    """Make the fake arguments of a call, and register their buffers.

    Returns:
        The arguments, and the inputs of the taskgraph.

    Raises:
        CaptureError: An argument is no plain strided tensor.
    """
    fakes: list[Any] = []
    inputs = []
    blocks = _fake_blocks(graph, args, recorder)
    for position, arg in enumerate(args):
        example = graph.placeholders[position].meta.get("example_value")
        if not isinstance(arg, torch.Tensor):
            fakes.append(sizes.of(example) if sizes and isinstance(example, torch.SymInt) else arg)
            continue
        if arg.layout is not torch.strided:
            raise CaptureError(f"{graph.name}: argument {position} is {arg.layout}")
        require_plain(arg)
        if position in blocks:
            block = blocks[position]
            whole = block.numel() // arg.element_size() * arg.element_size()
            flat = block[:whole].view(arg.dtype)
            fake = flat.as_strided(arg.shape, arg.stride(), arg.storage_offset())
        else:
            fake = _fake_of(graph, position, arg, recorder, sizes)
        inputs.append(GraphInput(position, recorder.tensor_id(fake)))
        fakes.append(fake)
    return fakes, tuple(inputs)


def _fake_of(
    graph: DynamoGraph, position: int, arg: torch.Tensor, recorder: Recorder, sizes: SymbolicSizes
) -> torch.Tensor:
    """Make the fake tensor of an argument with a buffer of its own."""
    example = graph.placeholders[position].meta.get("example_value")
    shape, stride = tuple(arg.shape), arg.stride()
    varies = False
    if sizes and isinstance(example, torch.Tensor):
        shape, stride = (tuple(map(sizes.of, n)) for n in (example.shape, example.stride()))
        varies = any(isinstance(n, torch.SymInt) for n in (*shape, *stride))
    fake = torch.empty_strided(shape, stride, dtype=arg.dtype, device=arg.device)
    nbytes = fake.untyped_storage().nbytes()
    if position in graph.weights and not varies:
        kind, name = BufferKind.WEIGHT, graph.weights[position][1]
        # A product with a weight that asks for gradients is folded to two dimensions, and
        # its last bits are others than those of a batch of products.
        fake.requires_grad_(arg.requires_grad)
    else:
        kind, name = BufferKind.INPUT, graph.placeholders[position].name
        if not varies:
            nbytes = arg.untyped_storage().nbytes()
    buffer = recorder.add_buffer(fake, kind, size_of(nbytes), name)
    is_parameter = isinstance(arg, torch.nn.Parameter)
    recorder.buffers[buffer].is_module_buffer = kind is BufferKind.WEIGHT and not is_parameter
    return fake


def _fake_blocks(
    graph: DynamoGraph, args: Sequence[Any], recorder: Recorder
) -> dict[int, torch.Tensor]:
    """Make the bytes of each block that arguments share; return them by position."""
    found: dict[int, torch.Tensor] = {}
    for positions in graph.blocks_of(args):
        storage = args[positions[0]].untyped_storage()
        block = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
        name = graph.placeholders[positions[0]].name
        recorder.add_buffer(block, BufferKind.INPUT, storage.nbytes(), name)
        found |= dict.fromkeys(positions, block)
    return found


def _without_place(error: Exception) -> str:
    """Return the message of an error without the node and the source, which torch appends."""
    return str(error).partition("\n\nWhile executing ")[0]


def _require_ops_of_eager(graph: TaskGraph) -> None:
    """Refuse an op that does more than in eager PyTorch: its last bits may be others."""
    named = Counter(b for task in graph.tasks for b in task.buffers)
    named.update(graph.tensors[o.tensor].buffer for o in graph.outputs if o.tensor is not None)
    for task in graph.tasks:
        flag, values = GRADIENT_FLAGS.get(task.op, (0, 0))
        if task.op not in GRADIENT_FLAGS or not (len(task.args) <= flag or task.args[flag]):
            continue
        buffers = [graph.tensors[r].buffer for r in task.results if r is not None]
        if [i for i, b in enumerate(buffers) if named[b] > 1] == [values]:
            raise CaptureError(f"{task.where} makes vectors, which eager PyTorch would not")


class _Labeller(Interpreter):
    """Runs a torch-level graph and tells the recorder which module each op comes from."""

    def __init__(self, graph: DynamoGraph, recorder: Recorder) -> None:
        super().__init__(graph.module)
        self._name, self._recorder = graph.name, recorder

    def run_node(self, n: Node) -> Any:
        stack = n.meta.get("nn_module_stack")
        self._recorder.label = qualified_name(next(reversed(stack.values()))[0]) if stack else ""
        try:
            return super().run_node(n)
        except NotImplementedError as error:
            if getattr(n.target, "namespace", "") != HIGHER_ORDER:
                raise
            raise CaptureError(
                f"{self._name} calls {n.target}, a higher-order op, which no plan can run"
            ) from error


def qualified_name(path: str) -> str:
    """Turn Dynamo's source of a module into its qualified name."""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    # Under a decorator with "*args", as transformers has them, the module is "L['args'][0]".
    path = re.sub(r"^L\.(args\.\d+|\w+)\b", "", path)
    return ".".join(part for part in path.split(".") if part not in NOT_MODULES)


def _most(most: int, holds: Callable[[int], bool]) -> int:
    return bisect_left(range(1, most + 1), True, key=lambda number: not holds(number))


def upper_end(values: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes to plan for, at least as large as those of a call.

    The largest is rounded up to a power of two, so that a growing cache needs one plan for each
    doubling. Sizes next to it (a cache's length, and that of a mask one longer) move by the same
    amount, so that the guards of the recording hold. The others are rounded by themselves, except
    small ones (a batch).
    """
    largest = max(values.values(), default=0)
    if largest <= 1:
        return dict(values)
    growing = growing_sizes(values)
    bucket = max(MIN_BUCKET, _power_above(largest))
    return {
        name: value + bucket - largest if name in growing else _rounded(value)
        for name, value in values.items()
    }


def growing_sizes(values: Mapping[str, int]) -> frozenset[str]:
    """Return the symbols of the largest size, and of those next to it, which grow with it."""
    largest = max(values.values(), default=0)
    return frozenset(name for name, value in values.items() if largest - value <= NEAR)


def _rounded(value: int) -> int:
    return _power_above(value) if value > SMALL else value


def _power_above(value: int) -> int:
    return 1 << (value - 1).bit_length()
