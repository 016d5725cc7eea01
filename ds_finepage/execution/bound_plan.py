"""Binds the nodes of a plan: each one becomes a function without arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ds_finepage.execution import host_attention as _defines_it  # noqa: F401
from ds_finepage.execution.arena import POISON, Arena, HostPool, view_of
from ds_finepage.execution.call_tensors import CallTensors, MovingViews
from ds_finepage.execution.collectives import RankParts
from ds_finepage.execution.disk import FileRange
from ds_finepage.execution.file_weights import FileWeights
from ds_finepage.execution.lanes import Action
from ds_finepage.execution.ops import BoundTask, Patch, bind, unused_results
from ds_finepage.execution.program import Program
from ds_finepage.execution.reload_sources import (
    ReadSlices,
    ReloadSources,
    RoutedReload,
    copy_master,
)
from ds_finepage.execution.replay import can_be_recorded
from ds_finepage.graph.memgraph import Extent, Lane, MemGraph, Node, NodeKind
from ds_finepage.graph.packed import PACKED_GROUPED
from ds_finepage.graph.routes import Route, groups_of
from ds_finepage.graph.taskgraph import BufferKind, Task
from ds_finepage.packing.op import grouped_into, packed_grouped_linear


class BoundPlan:
    """The actions of one plan on one arena. All views of the arena are built here, once.

    Attributes:
        memgraph: The plan.
        arena: The device memory that it runs in.
        poison: Vacated extents are filled with NaN.
        actions: Node id -> what the node does. Nodes that do nothing have no action.
        tensors: The tensors outside the arena.
        sources: The host memory that reloads read.
        reads: Node id -> the bytes of a file that it reads, whatever a router chooses.
        sizes: The graph's tensors in the shapes of the current call.
        patches: Places in bound tasks that take a tensor of the call for one pass.
        recordable: The nodes of tasks that enqueue the same work in each pass.
        routed: The routed reloads.
        route_values: What they and products have read in this pass, by tensor and the task that
            makes it.
    """

    def __init__(
        self,
        memgraph: MemGraph,
        *,
        arena: Arena,
        pool: HostPool,
        masters: Mapping[str, torch.Tensor],
        in_place: frozenset[int] = frozenset(),
        poison: bool = False,
        parts: RankParts | None = None,
        files: FileWeights | None = None,
    ) -> None:
        """Bind every node.

        Args:
            memgraph: A plan that passed the checker.
            arena: At least ``memgraph.arena_bytes``.
            pool: At least ``memgraph.host_bytes``.
            masters: Weight name -> host master, 1-d uint8.
            in_place: Tasks that write into their extents and nowhere else, as a trial has shown.
                The results of all other tasks are copied into their extents.
            poison: Fill vacated extents with NaN.
            parts: The ranks that hold the masters together; None where this rank has all of them.
            files: The weights that lie in files; None where there are none.

        Raises:
            StoreError: A master or a file is missing, or smaller than the captured weight.
        """
        graph = memgraph.graph
        self.memgraph, self._graph = memgraph, graph
        self.arena, self._pool, self.poison = arena, pool, poison
        self._in_place, self._parts = in_place, parts
        self._slots = dict(memgraph.host_slots)
        self._unused = unused_results(graph)
        self.sizes = MovingViews(graph)
        self._files = files
        held = {} if files is None else files.held
        self.sources = ReloadSources(graph, masters, pinned=pool.pinned, held=held)
        self.reads: dict[int, FileRange] = {}
        self.tensors = CallTensors(graph, self.sizes, device=arena.bytes.device, pinned=pool.pinned)
        self.patches: list[Patch] = []
        self.recordable: set[int] = set()
        offloads = [n for n in memgraph.nodes if n.kind is NodeKind.OFFLOAD]
        self._first_offloads = {n.buffer: n.id for n in reversed(offloads)}
        self.routed: list[RoutedReload] = []
        self.route_values: dict[tuple[int, int], list[int]] = {}
        bound = ((node.id, self._bind(node)) for node in memgraph.nodes)
        self.actions: dict[int, Action] = {id: action for id, action in bound if action is not None}
        self.tensors.want(p.tensor for p in self.patches if p.tensor is not None)

    def _bind(self, node: Node) -> Action | None:
        if node.kind is NodeKind.COMPUTE:
            return self._bind_task(node)
        if node.kind in (NodeKind.RELOAD, NodeKind.RESIDENT, NodeKind.OFFLOAD):
            return self._bind_transfer(node)
        if node.kind is NodeKind.COLLECT:
            assert node.extent is not None and node.buffer is not None and self._parts is not None
            whole = self.arena.slice(node.extent, self._graph.buffers[node.buffer].nbytes)
            return partial(self._parts.collect, whole)
        if node.kind is NodeKind.DROP and self.poison:
            assert node.extent is not None
            vacated = self.arena.slice(node.extent, node.extent.nbytes)
            return partial(vacated.fill_, POISON)
        return None

    def _bind_task(self, node: Node) -> Action:
        assert node.task is not None
        extents = self.memgraph.placements[node.id]

        def tensor(index: int) -> torch.Tensor | None:
            return None if self.sizes.varies(index) else self.tensor(index, extents)

        patches: list[Patch] = []
        task = self._graph.tasks[node.task]
        is_host = task.index in self._graph.host_tasks
        into_place = task.index in self._in_place
        bound = bind(task, tensor, patches, self._unused, into_place=into_place, is_host=is_host)
        for patch in patches:
            self._place(patch, extents)
        self._share_ends(task, bound, extents)
        if not patches:  # the arguments stay as they are, so no frame of Python is needed
            if can_be_recorded(task, bound):
                self.recordable.add(node.id)
            return partial(bound.call, *bound.args, **bound.kwargs)
        return lambda: bound.call(*bound.args, **bound.kwargs)

    def tensor(self, index: int, extents: Mapping[int, Extent]) -> torch.Tensor | None:
        """Return a tensor of the graph in the sizes of the current call; None for the caller's.

        Args:
            index: The tensor.
            extents: Where the buffers of its task lie.
        """
        view = self.sizes.view(index)
        if view.buffer in extents:
            return self.arena.view(view, extents[view.buffer])
        if view.buffer in self.tensors.constants:
            return self.tensors.constant(index)
        buffer = self._graph.buffers[view.buffer]
        if buffer.kind is not BufferKind.MASTER:
            return None
        found = self.sources.of_weight(buffer)  # the host reads it in place
        return view_of(found, view, int(found.storage_offset()))

    def _share_ends(self, task: Task, bound: BoundTask, extents: Mapping[int, Extent]) -> None:
        """Let the packed products of a layer of experts read the ends of their rows once a pass.

        Each read is a wait for an accelerator. On a CPU it is none.
        """
        is_read = task.op == PACKED_GROUPED and bound.call is packed_grouped_linear.out
        groups = groups_of(task) if is_read and not self.arena.bytes.is_cpu else None
        if groups is None or self._graph.tensors[groups.ends].buffer not in extents:
            return
        buffer = self._graph.tensors[groups.ends].buffer
        changes = (t for t in self._graph.tasks[: task.index] if buffer in (*t.writes, *t.touches))
        source = max((t.index for t in changes), default=-1)
        read = partial(self._values, groups.ends, source, extents[buffer])
        bound.call, bound.waits = partial(grouped_into, read_ends=read), True

    def _values(self, tensor: int, source: int, extent: Extent) -> list[int]:
        """Read the numbers in a tensor that a task has made, such as a router's choice.

        On an accelerator the host waits here, because it must know the choice before it can issue a
        copy, or which rows each expert has. It reads once a pass: a second read, for another weight
        of the layer, would be behind the copies of the first. The planner weighs the wait against
        the bytes that it saves.
        """
        if (tensor, source) not in self.route_values:
            made = self.arena.view(self.sizes.view(tensor), extent)
            self.route_values[tensor, source] = made.flatten().tolist()
        return self.route_values[tensor, source]

    def _place(self, patch: Patch, extents: Mapping[int, Extent]) -> None:
        """Decide who fills a place: the sizes of a call, or its tensors."""
        buffer = None if patch.tensor is None else self._graph.tensors[patch.tensor].buffer
        if buffer is None:
            self.sizes.add(patch)
        elif buffer in extents:
            self.sizes.add(patch, self.arena.bytes, extents[buffer].offset)
        elif buffer in self.tensors.constants:
            self.sizes.add(patch, self.tensors.constants[buffer])
        else:
            self.patches.append(patch)

    def _bind_transfer(self, node: Node) -> Action:
        assert node.buffer is not None and node.extent is not None
        buffer = self._graph.buffers[node.buffer]
        on_device = self.arena.slice(node.extent, buffer.nbytes)
        # The pass may have written rows of a KV cache, so an offloaded copy of them is the newest.
        is_in_pool = node.id >= self._first_offloads.get(buffer.id, len(self.memgraph.nodes))
        is_handed = self._graph.is_handed(buffer)
        if is_handed and not is_in_pool:
            is_entry = node.kind is NodeKind.RESIDENT
            return self.sources.reload_of_rows(buffer, on_device, is_entry=is_entry)
        is_weight = buffer.kind is BufferKind.WEIGHT and not is_handed
        if buffer.id in self.memgraph.in_files:
            return self._bind_read(node, on_device)
        if is_weight and node.kind is not NodeKind.OFFLOAD:
            on_host = self.sources.of_weight(buffer)  # an offloaded copy has the same bytes
        else:
            on_host = self._pool.slice(self._slots[buffer.id], buffer.nbytes)
        route = self.memgraph.routed_reloads.get(node.id)
        if route is not None:
            return self._bind_routed(route, on_device, on_host)
        if self._graph.num_parts(buffer) > 1 and node.kind is not NodeKind.OFFLOAD:
            return self._bind_part(node, on_device, on_host)
        if node.kind is not NodeKind.OFFLOAD:
            return partial(copy_master, on_device, on_host)
        vacated = self.arena.slice(node.extent, node.extent.nbytes)

        def offload() -> None:
            on_host.copy_(on_device, non_blocking=True)
            if self.poison:
                vacated.fill_(POISON)

        return offload

    def _bind_read(self, node: Node, on_device: torch.Tensor) -> Action:
        """Bind the reload of a weight that lies in a file."""
        assert node.buffer is not None and self._files is not None
        source = self._files.source_of(self._graph.buffers[node.buffer])
        route, reader = self.memgraph.routed_reloads.get(node.id), self._files.reader
        if route is None:
            self.reads[node.id] = source
            return partial(reader.copy, source, on_device)
        nbytes = source.nbytes // route.num_slices

        def read_slices(begin: int, end: int, slices: torch.Tensor) -> None:
            reader.copy(source.part(begin * nbytes, end * nbytes), slices.view(-1))

        return self._bind_routed(route, on_device, read_slices)

    def expect_reads(self, *programs: Program) -> None:
        """Let the disk read ahead what these programs read, one after the other."""
        if self.reads and self._files is not None:
            steps = (step.node.id for each in programs for step in each.lanes[Lane.DISK])
            self._files.reader.expect([self.reads[node] for node in steps if node in self.reads])

    def _bind_part(self, node: Node, whole: torch.Tensor, on_host: torch.Tensor) -> Action:
        """Bind the reload of a part; a resident weight that is not in place is also collected."""
        parts = self._parts
        assert parts is not None
        reload = partial(copy_master, parts.own(whole), on_host)
        if node.kind is NodeKind.RELOAD:
            return reload

        def load() -> None:
            reload()
            parts.collect(whole)

        return load

    def _bind_routed(
        self, route: Route, on_device: torch.Tensor, source: torch.Tensor | ReadSlices
    ) -> RoutedReload:
        view = self._graph.tensors[route.tensor]
        (node,) = (n.id for n in self.memgraph.nodes if n.task == route.task)
        extent = self.memgraph.placements[node][view.buffer]
        read = partial(self._values, route.tensor, route.source, extent)
        self.routed.append(RoutedReload(route, on_device, source, read))
        return self.routed[-1]
