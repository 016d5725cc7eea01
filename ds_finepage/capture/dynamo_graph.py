"""One graph that Dynamo handed over, and the taskgraphs of its concrete shapes.

Dynamo brings guards, graph breaks and symbolic shapes. Its graphs are
torch-level, with parameters, tensors and integers as arguments. Here each combination of integers
that the tensors depend on becomes a taskgraph of its own.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ds_finepage._compat.torch import FakeTensor, FakeTensorMode, free_symbols
from ds_finepage.capture.layouts import LayoutFixer, StridesOf
from ds_finepage.capture.lengths import SymbolicSizes, size_of, upper_end
from ds_finepage.capture.plain import require_plain
from ds_finepage.capture.recorder import Recorder, finish
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import BufferKind, GraphInput, GraphOutput, TaskGraph

fake_tensor_logger = logging.getLogger("torch._subclasses.fake_tensor")

GRADIENT_FLAGS = {"aten._linalg_svd.default": (2, 1), "aten._linalg_eigh.default": (2, 0)}
"""Ops with an argument, by its position, that asks for vectors too, and is on if it is left out;
and which of their results is the values.

``linalg.svdvals`` and ``linalg.eigvalsh`` need the vectors for gradients alone, so eager PyTorch
does not ask for them then. It always does where a dispatch mode looks on, as capture does.
"""


class DynamoGraph:
    """A torch-level graph, its weights by position, and the integers that its shape depends on.

    Attributes:
        weights: Call position -> (parameter, name).
        key_positions: Call positions of the integers that tensors depend on.
    """

    def __init__(
        self,
        module: GraphModule,
        example_args: Sequence[Any],
        weight_names: dict[int, str],
        name: str,
    ) -> None:
        """Look at a graph once, before any call.

        Args:
            module: What Dynamo handed to its backend.
            example_args: The arguments that came with it; parameters enter as the objects
                themselves, so they are recognised by identity and never by address.
            weight_names: ``id(parameter)`` -> qualified name, of the weights to page.
            name: For messages.
        """
        self.module = module
        self.name = name
        self.weights: dict[int, tuple[torch.Tensor, str]] = {
            position: (arg, weight_names[id(arg)])
            for position, arg in enumerate(example_args)
            if isinstance(arg, torch.Tensor) and id(arg) in weight_names
        }
        self._placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._outputs = _returned_nodes(module)
        self.key_positions = tuple(
            position
            for position, arg in enumerate(example_args)
            if not isinstance(arg, torch.Tensor) and self._shapes_depend_on(position)
        )
        self._host_module = self._slice_host_outputs()

    def with_weights(self, args: Sequence[Any], on_device: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return a call's arguments with other tensors in the place of the weights.

        Args:
            args: The call's arguments.
            on_device: Weight name -> the tensor.
        """
        found = list(args)
        for position, (parameter, name) in self.weights.items():
            weight = on_device[name]
            if weight.requires_grad != parameter.requires_grad:
                # Products with weights that ask for gradients have other last bits.
                weight.requires_grad_(parameter.requires_grad)
            found[position] = weight
        return found

    def key_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return what selects the taskgraph of a call.

        Dynamo passes every symbol of a shape as an argument of its own, so the integers say it
        all. One that only counts (transformers' sliding-window cache hands its length through) is
        left out, else every token would need its own capture.
        """
        return tuple(args[i] for i in self.key_positions)

    def fixed_key_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the part of :meth:`key_of` that no symbol stands for."""
        return tuple(
            args[i]
            for i in self.key_positions
            if not isinstance(self._placeholders[i].meta.get("example_value"), torch.SymInt)
        )

    def host_outputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Compute the returned Python numbers of a call."""
        if self._host_module is None:
            return ()
        found = self._host_module(*args)
        assert isinstance(found, tuple)
        return found

    def record(self, args: Sequence[Any], *, strides_of: StridesOf | None = None) -> TaskGraph:
        """Capture the call's concrete shape.

        Args:
            args: Of the call.
            strides_of: Tells how ops lay out their results; by default, what torch says is taken.

        Raises:
            CaptureError: The graph cannot be written down as a taskgraph: a size or a branch
                depends on data, a weight is changed or returned.
        """
        return self._record(args, None, strides_of).at({})

    def record_lengths(
        self, args: Sequence[Any], *, strides_of: StridesOf | None = None
    ) -> Recording | None:
        """Capture the call with the sizes that differ from call to call as symbols.

        Args:
            args: Of the call.
            strides_of: As in :meth:`record`.

        Returns:
            None where there are no such sizes.

        Raises:
            CaptureError: As :meth:`record`.
        """
        sizes = SymbolicSizes(self._placeholders, args)
        if not sizes:
            return None
        # An op whose shapes torch cannot work out with symbols is no error here, but torch says so.
        level = fake_tensor_logger.level
        fake_tensor_logger.setLevel(logging.CRITICAL)
        try:
            return self._record(args, sizes, strides_of)
        finally:
            fake_tensor_logger.setLevel(level)

    def _record(
        self, args: Sequence[Any], sizes: SymbolicSizes | None, strides_of: StridesOf | None
    ) -> Recording:
        values = {} if sizes is None else sizes.values
        recorder = Recorder(None if strides_of is None else LayoutFixer(strides_of, values))
        mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=None if sizes is None else sizes.env
        )
        with torch.inference_mode(False), torch.no_grad(), mode:
            fakes, inputs = self._fake_args(args, recorder, sizes)
            try:
                with recorder:
                    returned = _Labeller(self.module, recorder).run(*fakes)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(f"{self.name}: {type(error).__name__}: {error}") from error
            outputs = self._describe_outputs(returned, fakes, recorder)
        return Recording(self.name, recorder, inputs, outputs, sizes)

    def _fake_args(
        self, args: Sequence[Any], recorder: Recorder, sizes: SymbolicSizes | None
    ) -> tuple[list[Any], tuple[GraphInput, ...]]:
        fakes: list[Any] = []
        inputs = []
        for position, arg in enumerate(args):
            example = self._placeholders[position].meta.get("example_value")
            if not isinstance(arg, torch.Tensor):
                varies = sizes is not None and isinstance(example, torch.SymInt)
                fakes.append(sizes.of(example) if sizes is not None and varies else arg)
                continue
            if arg.layout is not torch.strided:
                raise CaptureError(f"{self.name}: argument {position} is {arg.layout}")
            require_plain(arg)
            shape, stride = tuple(arg.shape), arg.stride()
            varies = False
            if sizes is not None and isinstance(example, torch.Tensor):
                shape, stride = sizes.all(example.shape), sizes.all(example.stride())
                varies = any(isinstance(n, torch.SymInt) for n in (*shape, *stride))
            fake = torch.empty_strided(shape, stride, dtype=arg.dtype, device=arg.device)
            nbytes = fake.untyped_storage().nbytes()
            if position in self.weights:
                kind, name = BufferKind.WEIGHT, self.weights[position][1]
                # A product with a weight that asks for gradients is folded to two dimensions, and
                # its last bits are others than those of a batch of products.
                fake.requires_grad_(arg.requires_grad)
            else:
                kind, name = BufferKind.INPUT, self._placeholders[position].name
                if not varies:
                    nbytes = arg.untyped_storage().nbytes()
            recorder.add_buffer(fake, kind, size_of(nbytes), name)
            inputs.append(GraphInput(position, recorder.tensor_id(fake)))
            fakes.append(fake)
        return fakes, tuple(inputs)

    def _describe_outputs(
        self, returned: Any, fakes: list[Any], recorder: Recorder
    ) -> tuple[GraphOutput, ...]:
        positions = {id(f): i for i, f in enumerate(fakes) if isinstance(f, torch.Tensor)}
        outputs, num_host = [], 0
        for value in returned:
            if value is None:
                outputs.append(GraphOutput())
            elif id(value) in positions:
                outputs.append(GraphOutput(position=positions[id(value)]))
            elif isinstance(value, FakeTensor):
                tensor = recorder.tensor_id(value)
                draft = recorder.buffers[recorder.tensors[tensor].buffer]
                if draft.kind is BufferKind.WEIGHT:
                    raise CaptureError(f"{self.name} returns a view of weight {draft.name}")
                outputs.append(GraphOutput(tensor=tensor))
            elif isinstance(value, torch.Tensor):
                outputs.append(GraphOutput(tensor=recorder.tensor_id(value)))
            else:
                outputs.append(GraphOutput(host=num_host))
                num_host += 1
        if num_host != self._num_host_outputs:
            raise CaptureError(f"{self.name} returns a number that depends on tensor data")
        return tuple(outputs)

    def _shapes_depend_on(self, position: int) -> bool:
        """Tell whether any tensor depends on an integer argument, through shape or value."""
        placeholder = self._placeholders[position]
        symbols = free_symbols(placeholder.meta.get("example_value", 0))
        for other in self._placeholders:
            value = other.meta.get("example_value")
            if isinstance(value, torch.Tensor) and symbols & free_symbols(value):
                return True
        reached = {placeholder}
        for node in self.module.graph.nodes:
            if reached.isdisjoint(node.all_input_nodes) or node.op == "output":
                continue
            if not _is_number(node):
                return True
            reached.add(node)
        return False

    def _slice_host_outputs(self) -> GraphModule | None:
        """Cut out the part of the graph that computes the returned Python numbers."""
        wanted = [n for n in self._outputs if isinstance(n, Node) and _is_number(n)]
        constants = [n for n in self._outputs if n is not None and not isinstance(n, Node)]
        self._num_host_outputs = len(wanted) + len(constants)
        if not self._num_host_outputs:
            return None
        needed = set(wanted)
        for node in reversed(self.module.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        graph = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        for node in self.module.graph.nodes:
            if node.op == "placeholder" or node in needed:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(
            tuple(
                copies[n] if isinstance(n, Node) else n
                for n in self._outputs
                if n is not None and (not isinstance(n, Node) or _is_number(n))
            )
        )
        return GraphModule(self.module, graph)


@dataclass(frozen=True)
class Recording:
    """A captured call, to be had as the taskgraph of any sizes that it admits."""

    name: str
    recorder: Recorder
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    sizes: SymbolicSizes | None

    def values_of(self, args: Sequence[Any]) -> dict[str, int]:
        """Return what a call passes for the symbols."""
        assert self.sizes is not None
        return {name: args[position] for name, position in self.sizes.positions.items()}

    @cached_property
    def deciding(self) -> frozenset[str]:
        """The symbols that any buffer or view is as large as; others are but counted with."""
        sizes: list[Any] = [buffer.nbytes for buffer in self.recorder.buffers]
        for view in self.recorder.tensors:
            sizes += [*view.shape, *view.stride, view.offset]
        expressions = {s for s in sizes if not isinstance(s, int)}
        return frozenset(str(symbol) for e in expressions for symbol in e.free_symbols)

    def upper_end(self, values: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes to plan for; symbols that are but counted with stay as they are."""
        deciding = {name: value for name, value in values.items() if name in self.deciding}
        return {**values, **upper_end(deciding)}

    def admits(self, values: Mapping[str, int]) -> bool:
        """Tell whether the recording is that of a call with these sizes too."""
        return self.sizes is not None and self.sizes.admits(values)

    def at(self, values: Mapping[str, int]) -> TaskGraph:
        """Return the taskgraph with buffers as large as these sizes need them."""
        positions = {} if self.sizes is None else self.sizes.positions
        found = finish(
            self.recorder,
            self.name,
            self.inputs,
            self.outputs,
            versions(),
            values=values,
            symbols=tuple(positions.items()),
        )
        _require_ops_of_eager(found)
        return found


def _require_ops_of_eager(graph: TaskGraph) -> None:
    """Refuse a graph in which an op does more than it would in eager PyTorch.

    Raises:
        CaptureError: There is one; the last bits of its results may be others.
    """
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

    def __init__(self, module: GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: Node) -> Any:
        stack = n.meta.get("nn_module_stack")
        self._recorder.label = _qualified_name(next(reversed(stack.values()))[0]) if stack else ""
        return super().run_node(n)


def _qualified_name(path: str) -> str:
    """Turn Dynamo's source of a module into its qualified name."""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    path = re.sub(r"^L\.self\.?|^L\.\w+\.?", "", path)
    return path.replace("_modules.", "").replace("._modules", "").strip(".")


def _is_number(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _returned_nodes(module: GraphModule) -> tuple[Any, ...]:
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    returned = output.args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def versions() -> tuple[tuple[str, str], ...]:
    """The versions on which a captured taskgraph depends."""
    return tuple((name, version(name)) for name in ("torch", "transformers"))
