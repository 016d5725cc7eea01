"""Runs one memgraph. The plan has made every decision; the executor follows it.

All views of the arena are built once (``bound_plan.py``). Inputs, KV cache and outputs differ from
call to call: they go into the bound tasks before a pass and come out after it, so the executor
keeps no tensor of the caller alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch

from ds_finepage.execution.bound_plan import BoundPlan
from ds_finepage.execution.host_ops import identity_of
from ds_finepage.execution.lanes import Action, Lanes
from ds_finepage.execution.program import Program, lower
from ds_finepage.execution.replay import Graphs
from ds_finepage.execution.spans import SpanRecorder
from ds_finepage.graph.arguments import refs
from ds_finepage.graph.collectives import collects_of
from ds_finepage.graph.memgraph import Extent, Lane, Node, NodeKind
from ds_finepage.graph.taskgraph import Task


class Residents(dict[str, Extent]):
    """The weights and the rows of KV caches that are valid in the arena: ``Buffer.key`` -> extent.

    Attributes:
        rows: Key of rows -> whose rows they are, and how many bytes of them are valid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, tuple[object, int]] = {}


MOST_PROGRAMS = 4
"""Lowered programs that an executor keeps: one for each way in which it found the arena."""


@dataclass(frozen=True, slots=True)
class OpHook:
    """The user's functions around every task of the compute lane.

    ``before(task, operands)`` and ``after(task, results)`` get the task and its tensors. The
    tensors are valid during the call only and must not be changed.
    """

    before: Callable[[Task, tuple[torch.Tensor, ...]], None] | None = None
    after: Callable[[Task, tuple[torch.Tensor, ...]], None] | None = None


@dataclass(frozen=True, slots=True)
class PassCounters:
    """The bytes that one pass really moved, counted by the executor."""

    reloaded_bytes: int = 0
    entry_reloaded_bytes: int = 0
    offloaded_bytes: int = 0


class Executor:
    """Runs one plan on one arena.

    Lanes: reloads write extents on h2d, tasks read and write them on compute, offloads read them
    on d2h. The waits of the lowered program are the only order between lanes.

    Attributes:
        memgraph: The plan.
        counters: The bytes that the last pass moved.
        recorder: Records when each step of the next passes begins and ends; None for no record.
        entry_missing: The buffers of ``memgraph.entry`` that the last pass did not find in place.
    """

    def __init__(
        self,
        bound: BoundPlan,
        *,
        lanes: Lanes,
        hooks: Sequence[OpHook] = (),
        graphs: Graphs | None = None,
    ) -> None:
        """Prepare the passes of a plan.

        Args:
            bound: The plan on its arena.
            lanes: Where the nodes run.
            hooks: The user's hooks; the executor reads the sequence in every pass.
            graphs: Records the runs of tasks of steady passes; None records none.
        """
        self._bound, self._lanes, self._hooks = bound, lanes, hooks
        self.memgraph = memgraph = bound.memgraph
        self._graph = memgraph.graph
        lowered = partial(lower, memgraph, poison=bound.poison)
        self._steady, self.actions = lowered(), bound.actions
        self._replayed = None
        if graphs is not None:
            self._replayed = graphs.replayed(self._steady, self.actions, bound.recordable)
        reloads = (n.buffer for n in memgraph.nodes if n.kind is NodeKind.RELOAD)
        buffers = self._graph.buffers
        position_of = {i.tensor: i.position for i in self._graph.inputs}
        # Rows of KV caches -> the argument that has them.
        self._rows = {
            b.id: position_of[b.gather]
            for b in buffers
            if b.gather is not None and self._graph.is_handed(b)
        }
        reloaded = [b for b in reloads if b is not None]
        self._row_reloads = [b for b in reloaded if b in self._rows]
        weights = (b for b in reloaded if b not in self._rows)
        self._weight_reload_bytes = sum(self._host_bytes(b) for b in weights)
        self._entry = [(r.buffer, buffers[r.buffer].key, r.extent) for r in memgraph.entry]
        self._row_entry = [entry for entry in self._entry if entry[0] in self._rows]
        self._exit = {buffers[r.buffer].key: r.extent for r in memgraph.exit}
        self._offloaded_bytes = memgraph.offloaded_bytes
        # By the missing buffers of ``entry``: prefills find the arena as decode steps left it.
        self._collects = cache(partial(collects_of, memgraph))
        self._lowered = lru_cache(MOST_PROGRAMS)(lowered)
        self.counters = PassCounters()
        self.recorder: SpanRecorder | None = None
        self.entry_missing: frozenset[int] = frozenset()

    def set_sizes(self, args: Sequence[Any]) -> bool:
        """Prepare for the sizes of a call; return False if the plan is too small for them."""
        return self._bound.sizes.set_sizes(args)

    def run(self, args: Sequence[Any], host_outputs: Sequence[Any], residents: Residents) -> Any:
        """Run a pass. Call :meth:`set_sizes` with the same arguments first.

        Args:
            args: The call's arguments, as Dynamo passes them.
            host_outputs: The returned Python numbers.
            residents: The weights in the arena before the pass; replaced by those after it: the
                plan's own, and others where it writes nothing. It is empty while the pass runs, so
                after an error no weight counts as valid.

        Returns:
            The outputs, as a tuple.

        Raises:
            TaskMismatchError: An argument has another shape, or other strides, than planned.
        """
        live = {b: (identity_of(args[p]), args[p].nbytes) for b, p in self._rows.items()}
        in_place = self._rows_in_place(live, residents)
        missing = self._missing(residents)
        missing |= {b for b, nbytes in in_place.items() if nbytes < live[b][1]}
        self.entry_missing = missing
        others = {k: e for k, e in residents.items() if k not in self._exit and self._leaves(e)}
        residents.clear()
        bound = self._bound
        program, actions = self._steady, self.actions
        if missing:
            program = self._lowered(missing=missing)
        elif self._replayed is not None and not self._hooks and self.recorder is None:
            program, actions = self._replayed  # else something runs between two tasks
        tensors = bound.tensors.of_call(args)
        bound.route_values.clear()
        self._lanes.follow()  # it may still read the rows that are filled now
        bound.sources.fill(args, in_place)
        for patch in bound.patches:
            assert patch.tensor is not None
            patch.container[patch.key] = tensors[patch.tensor]
        bound.expect_reads(program, self._steady)
        try:
            self._lanes.run(program, self._hooked_actions(program, actions, tensors))
        finally:
            for patch in bound.patches:
                patch.container[patch.key] = None
            bound.sources.clear()
        self.counters = self._counted(missing, live, in_place)
        residents |= {**others, **self._exit}
        for buffer in in_place:  # another plan may keep others, which have no new rows now
            found = self._graph.buffers[buffer]
            residents.rows[found.key] = live[buffer][0], bound.sizes.nbytes(found)
        return bound.tensors.outputs(args, host_outputs, tensors)

    def collects(self, residents: Residents) -> str:
        """Return what stands for the collects of a pass, in order.

        Args:
            residents: The weights in the arena before the pass.
        """
        return self._collects(self._missing(residents))  # rows of KV caches are collected nowhere

    def _host_bytes(self, buffer: int) -> int:
        """Return the bytes that a reload of a buffer copies from this rank's host memory."""
        found = self._graph.buffers[buffer]
        return found.nbytes // self._graph.num_parts(found)

    def _leaves(self, extent: Extent) -> bool:
        """Tell whether the plan has nothing in an extent."""
        return not any(used.overlaps(extent) for used in self.memgraph.used)

    def _missing(self, residents: Residents) -> frozenset[int]:
        return frozenset(b for b, key, extent in self._entry if residents.get(key) != extent)

    def _rows_in_place(
        self, live: Mapping[int, tuple[object, int]], residents: Residents
    ) -> dict[int, int]:
        """Return the bytes of each kept buffer of rows that are in its extent already.

        Rows that the caller has cut off since are valid nowhere any more.
        """
        lengths = dict(live.values())
        residents.rows = {
            key: (identity, min(nbytes, lengths.get(identity, nbytes)))
            for key, (identity, nbytes) in residents.rows.items()
            if key in residents
        }
        found = {}
        for buffer, key, extent in self._row_entry:
            identity, nbytes = residents.rows.get(key, (None, 0))
            is_valid = residents.get(key) == extent and identity is live[buffer][0]
            found[buffer] = nbytes if is_valid else 0
        return found

    def _counted(
        self,
        missing: frozenset[int],
        live: Mapping[int, tuple[object, int]],
        in_place: Mapping[int, int],
    ) -> PassCounters:
        skipped = sum(reload.skipped_bytes for reload in self._bound.routed)

        def copied(buffer: int) -> int:
            return live[buffer][1] if buffer in live else self._host_bytes(buffer)

        entry = sum(copied(b) - in_place.get(b, 0) for b in missing)
        rows = sum(map(copied, self._row_reloads))
        return PassCounters(
            reloaded_bytes=self._weight_reload_bytes + rows - skipped + entry,
            entry_reloaded_bytes=entry,
            offloaded_bytes=self._offloaded_bytes,
        )

    # Hooks and spans. They cost nothing while there are none.

    def _hooked_actions(
        self, program: Program, actions: dict[int, Action], tensors: dict[int, torch.Tensor]
    ) -> dict[int, Action]:
        recorder = self.recorder
        if not self._hooks and recorder is None:
            return actions
        actions = dict(actions)
        if self._hooks:
            for node in self.memgraph.nodes:
                if self.memgraph.lane_of(node) in (Lane.COMPUTE, Lane.HOST):
                    actions[node.id] = self._hooked(node, actions[node.id], tensors)
        if recorder is not None:
            actions |= recorder.begin(program.merged, actions)
        return actions

    def _hooked(self, node: Node, action: Action, tensors: dict[int, torch.Tensor]) -> Action:
        assert node.task is not None
        task = self._graph.tasks[node.task]
        extents = self.memgraph.placements[node.id]

        def tensor(index: int) -> torch.Tensor:
            found = self._bound.tensor(index, extents)
            return tensors[index] if found is None else found

        def hooked() -> None:
            operands = tuple(tensor(ref.tensor) for ref in refs((task.args, task.kwargs)))
            for hook in self._hooks:
                if hook.before is not None:
                    hook.before(task, operands)
            action()
            results = tuple(tensor(i) for i in task.results if i is not None)
            for hook in self._hooks:
                if hook.after is not None:
                    hook.after(task, results)

        return hooked
