"""Executes one memgraph: every decision was made before, this only follows.

All views of the arena are built once. What changes from call to call (inputs, KV cache, outputs)
is patched into the bound tasks before the pass and taken out again after it, so that the executor
keeps nothing alive that belongs to the caller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_finepage.errors import StoreError, TaskMismatchError
from ds_finepage.execution.arena import POISON, Arena, HostPool, view_of
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.lanes import Action, Lanes
from ds_finepage.execution.moving import MovingViews
from ds_finepage.execution.ops import BoundTask, Patch, bind, unused_results
from ds_finepage.execution.program import Program, lower
from ds_finepage.execution.routed import RoutedReload
from ds_finepage.graph.memgraph import Extent, Lane, MemGraph, Node, NodeKind
from ds_finepage.graph.routes import Route
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph
from ds_finepage.graph.timeline import Span

Residents = dict[str, Extent]
"""Which weights are valid where in the arena, by ``Buffer.key``."""


@dataclass(frozen=True, slots=True)
class OpHook:
    """Functions of the user around every task, on the compute lane.

    ``before(task, operands)`` and ``after(task, results)`` get the task and its tensors, which are
    valid during the call only and must not be changed.
    """

    before: Callable[[Task, tuple[torch.Tensor, ...]], None] | None = None
    after: Callable[[Task, tuple[torch.Tensor, ...]], None] | None = None


@dataclass(slots=True)
class PassCounters:
    """What one pass really moved, counted by the executor as it goes."""

    reloaded_bytes: int = 0
    entry_reloaded_bytes: int = 0
    offloaded_bytes: int = 0


def copy_master(target: torch.Tensor, master: torch.Tensor) -> None:
    """Copy a host master into an extent; both are 1-d uint8 tensors of the same length."""
    target.copy_(master, non_blocking=True)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a 1-d uint8 tensor on the same storage."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().reshape(-1).view(torch.uint8)


class Executor:
    """Runs one plan on one arena.

    Lanes: reloads write extents on h2d, tasks read and write them on compute, offloads read them
    on d2h; the waits of the lowered program are all there is between them.
    """

    def __init__(
        self,
        memgraph: MemGraph,
        *,
        arena: Arena,
        pool: HostPool,
        lanes: Lanes,
        masters: Mapping[str, torch.Tensor],
        in_place: frozenset[int] = frozenset(),
        poison: bool = False,
        hooks: Sequence[OpHook] = (),
    ) -> None:
        """Bind every node.

        Args:
            memgraph: A plan that passed the checker.
            arena: At least ``memgraph.arena_bytes``.
            pool: At least ``memgraph.host_bytes``.
            lanes: Where the nodes run.
            masters: Weight name -> host master copy, 1-d uint8.
            in_place: Tasks that were seen to write their results into their extents and nowhere
                else. The results of any other are copied there.
            poison: Fill vacated extents with NaN.
            hooks: The user's, looked at anew in every pass.

        Raises:
            StoreError: A master is missing or has another size than the captured weight.
        """
        self.memgraph = memgraph
        self._graph: TaskGraph = memgraph.graph
        self._arena, self._pool, self._lanes = arena, pool, lanes
        self._masters = masters
        self._in_place = in_place
        self._poison = poison
        self._hooks = hooks
        self._patches: list[Patch] = []  # of tensors outside the arena: filled for one pass
        self._moving = MovingViews(self._graph)
        self._gathers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._given: dict[int, list[torch.Tensor]] = {}  # tensor in host memory -> its bytes
        self._constants = self._make_constants()
        self._unused = unused_results(self._graph)
        self._slots = dict(memgraph.host_slots)
        self._tasks: dict[int, BoundTask] = {}
        self._routed: list[RoutedReload] = []
        self.actions: dict[int, Action] = {
            node.id: action
            for node in memgraph.nodes
            if (action := self._bind_node(node)) is not None
        }
        self._planned_reload_bytes = sum(
            self._graph.buffers[n.buffer].nbytes
            for n in memgraph.nodes
            if n.kind is NodeKind.RELOAD and n.buffer is not None
        )
        self._external = self._external_tensors()
        self._steady = lower(memgraph, poison=poison)
        self.counters = PassCounters()
        self.spans: list[Span] | None = None

    # One pass.

    def set_sizes(self, args: Sequence[Any]) -> bool:
        """Prepare for the sizes of a call; False where the plan has no room for them."""
        return self._moving.set_sizes(args)

    def run(self, args: Sequence[Any], host_outputs: Sequence[Any], residents: Residents) -> Any:
        """Run a pass, for whose sizes :meth:`set_sizes` has prepared.

        Args:
            args: The call's arguments, as Dynamo passes them.
            host_outputs: The returned Python numbers.
            residents: What the arena holds; updated to what it holds after the pass. Empty while
                the pass runs, so that an error leaves nothing behind that is taken for valid.

        Returns:
            The outputs, as a tuple.
        """
        missing = self._missing(residents)
        residents.clear()
        program = self._steady
        if missing:
            program = lower(self.memgraph, missing=missing, poison=self._poison)
        self._gather(args)
        external = self._bind_external(args)
        for given in self._graph.inputs:
            if given.tensor in self._given:
                self._given[given.tensor][:] = [byte_view(args[given.position])]
        for patch in self._patches:
            assert patch.tensor is not None
            patch.container[patch.key] = external[patch.tensor]
        try:
            self._lanes.run(program, self._actions(program, external))
        finally:
            for patch in self._patches:
                patch.container[patch.key] = None
            for held in self._given.values():
                held.clear()
        self._count(missing)
        for residency in self.memgraph.exit:
            residents[self._graph.buffers[residency.buffer].key] = residency.extent
        return tuple(self._output(o, args, host_outputs, external) for o in self._graph.outputs)

    def _missing(self, residents: Residents) -> frozenset[int]:
        return frozenset(
            r.buffer
            for r in self.memgraph.entry
            if residents.get(self._graph.buffers[r.buffer].key) != r.extent
        )

    def _count(self, missing: frozenset[int]) -> None:
        skipped = sum(reload.skipped_bytes for reload in self._routed)
        entry = sum(self._graph.buffers[b].nbytes for b in missing)
        self.counters = PassCounters(
            reloaded_bytes=self._planned_reload_bytes - skipped + entry,
            entry_reloaded_bytes=entry,
            offloaded_bytes=self.memgraph.offloaded_bytes,
        )

    # Tensors that each call brings.

    def _bind_external(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return this call's tensors outside the arena, by tensor id; outputs are made here."""
        bases: dict[int, tuple[torch.Tensor, int]] = {}
        for given in self._graph.inputs:
            view = self._moving.views[given.tensor]
            if self._graph.buffers[view.buffer].kind is BufferKind.WEIGHT:
                continue
            arg = args[given.position]
            if tuple(arg.shape) != view.shape or arg.stride() != view.stride:
                raise TaskMismatchError(
                    f"argument {given.position} of {self._graph.name} has shape "
                    f"{tuple(arg.shape)}, strides {arg.stride()}; captured were {view.shape}, "
                    f"{view.stride}. This is a fault of the plan's key; please report it."
                )
            bases[view.buffer] = (arg, (arg.storage_offset() - view.offset) * arg.element_size())
        device = self._arena.bytes.device
        for buffer in self._graph.buffers:
            if buffer.kind is BufferKind.OUTPUT:
                nbytes = self._moving.nbytes(buffer)
                bases[buffer.id] = (torch.empty(nbytes, dtype=torch.uint8, device=device), 0)
            elif buffer.kind is BufferKind.HOST and buffer.id not in bases:
                nbytes = self._moving.nbytes(buffer)
                bases[buffer.id] = (host_bytes(nbytes, pinned=self._pool.pinned), 0)
        found = {}
        for index in self._external:
            tensor = self._moving.views[index]
            base = bases.get(tensor.buffer)
            if base is not None:
                found[index] = view_of(base[0], tensor, base[1])
        return found

    def _external_tensors(self) -> list[int]:
        wanted = {p.tensor for p in self._patches if p.tensor is not None}
        return sorted(wanted | {o.tensor for o in self._graph.outputs if o.tensor is not None})

    def _output(
        self, output: Any, args: Sequence[Any], host: Sequence[Any], external: dict[int, Any]
    ) -> Any:
        if output.position is not None:
            return args[output.position]
        if output.host is not None:
            return host[output.host]
        if output.tensor is None:
            return None
        found = external.get(output.tensor)
        if found is None:  # a constant: the caller may change what it gets
            found = self._constant_view(output.tensor).clone()
        return found

    def _make_constants(self) -> dict[int, torch.Tensor]:
        device = self._arena.bytes.device
        with torch.inference_mode(False):
            return {
                b.id: torch.frombuffer(bytearray(b.payload or b"\0"), dtype=torch.uint8).to(device)
                for b in self._graph.buffers
                if b.kind is BufferKind.CONSTANT
            }

    def _constant_view(self, tensor: int) -> torch.Tensor:
        view = self._moving.views[tensor]
        return view_of(self._constants[view.buffer], view)

    # Nodes.

    def _bind_node(self, node: Node) -> Action | None:
        if node.kind is NodeKind.COMPUTE:
            return self._bind_task(node)
        if node.kind in (NodeKind.RELOAD, NodeKind.RESIDENT, NodeKind.OFFLOAD):
            return self._bind_transfer(node)
        if node.kind is NodeKind.DROP and self._poison:
            assert node.extent is not None
            vacated = self._arena.slice(node.extent, node.extent.nbytes)
            return lambda: _fill_poison(vacated)
        return None

    def _bind_task(self, node: Node) -> Action:
        assert node.task is not None
        places = self.memgraph.placements[node.id]

        def tensor(index: int) -> torch.Tensor | None:
            view = self._graph.tensors[index]
            if self._moving.varies(index):
                return None
            if view.buffer in places:
                return self._arena.view(view, places[view.buffer])
            if view.buffer in self._constants:
                return self._constant_view(index)
            return None

        patches: list[Patch] = []
        task = self._graph.tasks[node.task]
        into_place = task.index in self._in_place
        bound = bind(task, tensor, patches, self._unused, into_place=into_place)
        for patch in patches:
            buffer = None if patch.tensor is None else self._graph.tensors[patch.tensor].buffer
            if buffer is None:
                self._moving.add(patch)
            elif buffer in places:
                self._moving.add(patch, self._arena.bytes, places[buffer].offset)
            elif buffer in self._constants:
                self._moving.add(patch, self._constants[buffer])
            else:
                self._patches.append(patch)
        self._tasks[node.id] = bound
        call, args, kwargs = bound.call, bound.args, bound.kwargs

        def action() -> None:
            call(*args, **kwargs)

        return action

    def _bind_transfer(self, node: Node) -> Action:
        assert node.buffer is not None and node.extent is not None
        buffer = self._graph.buffers[node.buffer]
        on_device = self._arena.slice(node.extent, buffer.nbytes)
        if self._graph.is_handed(buffer):
            return self._bind_handed(buffer, on_device)
        if buffer.kind is BufferKind.WEIGHT:
            on_host = self._master(buffer)
        else:
            on_host = self._pool.slice(self._slots[buffer.id], buffer.nbytes)
        route = self.memgraph.routed_reloads.get(node.id)
        if route is not None:
            return self._bind_routed(route, on_device, on_host)
        if node.kind is not NodeKind.OFFLOAD:
            return lambda: copy_master(on_device, on_host)
        vacated = self._arena.slice(node.extent, node.extent.nbytes)

        def offload() -> None:
            on_host.copy_(on_device, non_blocking=True)
            if self._poison:
                _fill_poison(vacated)

        return offload

    def _bind_routed(
        self, route: Route, on_device: torch.Tensor, on_host: torch.Tensor
    ) -> RoutedReload:
        """Bind a reload of the slices that a tensor of the pass tells."""
        view = self._graph.tensors[route.tensor]
        place = self._place_at(route.task, view.buffer)

        def tells() -> torch.Tensor:
            return self._arena.view(self._moving.views[view.id], place)

        self._routed.append(RoutedReload(route, on_device, on_host, tells))
        return self._routed[-1]

    def _place_at(self, task: int, buffer: int) -> Extent:
        """Return where a buffer of a task lies while it runs."""
        (node,) = (n.id for n in self.memgraph.nodes if n.task == task)
        return self.memgraph.placements[node][buffer]

    def _bind_handed(self, buffer: Buffer, on_device: torch.Tensor) -> Action:
        """Bind a reload of what the call brings, which may be less than was planned for."""
        assert buffer.gather is not None
        given = self._given.setdefault(buffer.gather, [])

        def reload() -> None:
            (on_host,) = given
            copy_master(on_device[: on_host.numel()], on_host)

        return reload

    def _master(self, buffer: Buffer) -> torch.Tensor:
        master = self._masters.get(buffer.name)
        if master is None:
            raise StoreError(f"no host master for weight {buffer.name!r}")
        if buffer.gather is not None:
            return self._rows_of(buffer, master)
        end = buffer.offset + buffer.nbytes
        if master.numel() < end:
            raise StoreError(
                f"the host master of {buffer.name!r} has {master.numel()} bytes; captured were "
                f"bytes up to {end}"
            )
        return master[buffer.offset : end]

    def _rows_of(self, buffer: Buffer, master: torch.Tensor) -> torch.Tensor:
        """Return the staging bytes of an embedding's rows; each pass fills them, see _gather."""
        if buffer.id not in self._gathers:
            assert buffer.gather is not None
            num_rows = math.prod(self._graph.tensors[buffer.gather].shape)
            staging = host_bytes(buffer.nbytes, pinned=self._pool.pinned)
            row_bytes = buffer.nbytes // num_rows
            self._gathers[buffer.id] = (master.view(-1, row_bytes), staging.view(-1, row_bytes))
        return self._gathers[buffer.id][1].view(-1)

    def _gather(self, args: Sequence[Any]) -> None:
        """Fill the staging rows of embeddings, before the pass begins.

        The indices are needed on the host for it: on CUDA the one wait of the host, between two
        passes. The last pass has read the staging rows by then, for it made the indices.
        """
        positions = {i.tensor: i.position for i in self._graph.inputs}
        for buffer, (table, staging) in self._gathers.items():
            tensor = self._graph.buffers[buffer].gather
            assert tensor is not None
            indices = args[positions[tensor]].to("cpu")
            planned = self._graph.tensors[tensor].shape
            if indices.shape == planned:
                torch.index_select(table, 0, indices.reshape(-1), out=staging)
            else:  # a shorter call: its rows lie where those of the planned one would
                rows = table.index_select(0, indices.reshape(-1))
                target = staging.view(*planned, -1)[tuple(slice(n) for n in indices.shape)]
                target.copy_(rows.view(*indices.shape, -1))

    # Hooks and measurement, which cost nothing while nobody asks for them.

    def _actions(self, program: Program, external: dict[int, torch.Tensor]) -> dict[int, Action]:
        if not self._hooks and self.spans is None:
            return self.actions
        actions = dict(self.actions)
        for node in self.memgraph.nodes:
            if self._hooks and node.kind is NodeKind.COMPUTE:
                actions[node.id] = self._hooked(node, actions[node.id], external)
        if self.spans is not None:
            self.spans.clear()
            origin = time.perf_counter_ns()
            for step in program.merged:
                actions[step.node.id] = self._timed(
                    step.node, step.lane, actions[step.node.id], origin
                )
        return actions

    def _hooked(self, node: Node, action: Action, external: dict[int, torch.Tensor]) -> Action:
        assert node.task is not None
        task = self._graph.tasks[node.task]
        places = self.memgraph.placements[node.id]

        def tensor(index: int) -> torch.Tensor:
            view = self._moving.views[index]
            if view.buffer in places:
                return self._arena.view(view, places[view.buffer])
            return external[index] if index in external else self._constant_view(index)

        def hooked() -> None:
            operands = tuple(tensor(i) for i in _refs(task.args) + _refs(task.kwargs))
            for hook in self._hooks:
                if hook.before is not None:
                    hook.before(task, operands)
            action()
            results = tuple(tensor(i) for i in task.results if i is not None)
            for hook in self._hooks:
                if hook.after is not None:
                    hook.after(task, results)

        return hooked

    def _timed(self, node: Node, lane: Lane, action: Action, origin: int) -> Action:
        spans = self.spans
        assert spans is not None

        def timed() -> None:
            start = time.perf_counter_ns()
            action()
            spans.append(Span(node.id, lane, start - origin, time.perf_counter_ns() - origin))

        return timed

    @property
    def steady_program(self) -> Program:
        """The program of a pass that finds ``entry`` in place."""
        return self._steady


def _fill_poison(vacated: torch.Tensor) -> None:
    vacated.fill_(POISON)


def _refs(value: Any) -> tuple[int, ...]:
    """Tensor ids in a task's arguments, in order."""
    if isinstance(value, tuple):
        return tuple(i for item in value for i in _refs(item))
    return (value.tensor,) if hasattr(value, "tensor") else ()
