"""A captured pass on its way: sized -> planned -> bound.

[Note: the states of a pass]
A pass is *sized* when its ops were measured and its needs are known. It is *planned* when it has a
checked memgraph, and *bound* when an executor points into device memory. Only the methods here
change these fields. ``invalidate_plan`` leads back to sized, ``unbind`` back to planned.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ds_finepage.execution.executor import Executor, PassCounters
from ds_finepage.graph.collectives import order_of
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.budget import HOST_PROGRAM_SLACK_BYTES
from ds_finepage.planning.host_share import with_files
from ds_finepage.planning.pipeline import Needs, Planned
from ds_finepage.runtime.stats import PassStats

logger = logging.getLogger(__name__)

IGNORED_LIVE_BYTES = HOST_PROGRAM_SLACK_BYTES // 2
"""Live tensors of earlier passes count only above this; the slack of the budget covers less."""

SPARE_SHARE = 64
"""A first reservation for live tensors has at most one part in so many of the budget to spare: in
the rounds of a draft they differ a little."""

NEAR = 63 / 64
"""A plan for so much of an arena is good enough for it."""

MOST_PLANS = 4
"""Plans that a pass keeps, each for another arena."""


class Habit:
    """How often passes of one graph, for calls of any size, follow another pass."""

    def __init__(self) -> None:
        self.num_runs = self.num_entries = 0

    @property
    def is_alternating(self) -> bool:
        """True where most runs followed another pass."""
        return 2 * self.num_entries > self.num_runs


class Pass:
    """One captured shape of one graph; see [Note: the states of a pass].

    Attributes:
        graph: The measured taskgraph.
        needs: Device bytes that it needs, live tensors of other passes included.
        resident_bytes: Budget under which the whole model may stay on the device.
        memgraph: The checked plan; None while the pass is only sized.
        executor: The plan on device memory; None while the pass is not bound.
        alternating: The pass that this one keeps following, whose resident weights it leaves in
            place; None where there is none.
        live_bytes: Bytes of live tensors beside the pass that its needs include.
        unfit_bytes: Those that left it no room the last time, dead ones collected; -1 for none.
        habit: That of its graph.
    """

    def __init__(self, graph: TaskGraph, needs: Needs, *, resident_bytes: int = 0) -> None:
        self.graph = graph
        self.needs = needs
        self.resident_bytes = resident_bytes
        self.memgraph: MemGraph | None = None
        # Bytes of the arena -> plan, and the bytes that any plan reloads there.
        self._plans: dict[int, tuple[MemGraph, int]] = {}
        self.executor: Executor | None = None
        self.alternating: Pass | None = None
        self.live_bytes, self.unfit_bytes = 0, -1
        self._rewrite_workspace_bytes = 0  # beyond the workspace of the captured tasks
        self._arena_bytes = self._lower_bound_bytes = 0
        self.habit = Habit()
        self._num_runs = 0
        self._last_run = PassCounters()

    # Transitions.

    def set_plan(self, planned: Planned) -> None:
        """Take a checked plan."""
        self._take(planned.memgraph, planned.lower_bound_bytes)

    def _take(self, memgraph: MemGraph, lower_bound_bytes: int) -> None:
        self.executor, self.memgraph = None, memgraph
        self._arena_bytes, self._lower_bound_bytes = memgraph.arena_bytes, lower_bound_bytes
        self._plans[memgraph.arena_bytes] = memgraph, lower_bound_bytes
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]

    def take_plan_for(self, arena_bytes: int) -> bool:
        """Take a plan that was made for about this arena, or has all that it needs in it.

        Returns:
            False where there is none.
        """
        enough = min(arena_bytes * NEAR, self.needs.needed_arena_bytes)
        near = [n for n in self._plans if enough <= n <= arena_bytes]
        if near:
            self._take(*self._plans[max(near)])
        return bool(near)

    def set_costs(self, graph: TaskGraph) -> None:
        """Take the measured costs of the tasks that the plan rewrote."""
        assert self.memgraph is not None
        self._take(replace(self.memgraph, graph=graph), self._lower_bound_bytes)

    def set_files(self, names: Collection[str], held: Collection[str]) -> None:
        """Take the weights that lie in files, and what has a copy in host memory."""
        assert self.memgraph is not None
        planned = with_files(self.memgraph, names, held)
        if planned.filed != self.memgraph.filed:
            self._take(planned, self._lower_bound_bytes)

    def bind(self, executor: Executor) -> None:
        """Take the executor of the plan."""
        assert self.memgraph is not None
        self.executor = executor

    def unbind(self) -> None:
        """Let go of the executor, whose views hold device memory."""
        self.executor = None

    def invalidate_plan(self, why: str) -> None:
        """Drop the plan; the next run plans again."""
        if self.memgraph is not None:
            logger.debug("%s is planned again: %s", self.graph.name, why)
        self.executor = self.memgraph = None
        self._plans.clear()

    # Needs.

    def add_non_arena_bytes(self, nbytes: int) -> None:
        """Count device bytes outside the arena that were not known before."""
        non_arena_bytes = self.needs.non_arena_bytes + nbytes
        self.needs = replace(self.needs, non_arena_bytes=non_arena_bytes)

    def count_rewritten_workspace(self, workspace_bytes: int) -> bool:
        """Count the workspace of a plan's rewritten tasks.

        It is the largest of any task of the plan.

        Returns:
            True where it is more than was known; the plan is dropped then.
        """
        more = workspace_bytes - self.graph.workspace_bytes - self._rewrite_workspace_bytes
        if more <= 0:
            return False
        self._rewrite_workspace_bytes += more
        self.invalidate_plan("its rewritten tasks need more workspace")
        self.add_non_arena_bytes(more)
        return True

    def has_room(self, live_bytes: int, budget_bytes: int) -> bool:
        """Tell whether the pass can run beside live tensors of other passes."""
        counted = live_bytes if live_bytes > IGNORED_LIVE_BYTES else 0
        return self.needs.min_budget_bytes - self.live_bytes + counted <= budget_bytes

    def leave_room(self, live_bytes: int, budget_bytes: int) -> None:
        """Reserve bytes for live tensors of other passes; a change drops the plan.

        The reservation has up to a quarter more, and grows in such steps, since a plan for each
        size is too many. It shrinks only where the budget is too small for it.
        """
        wanted = live_bytes if live_bytes > IGNORED_LIVE_BYTES else 0
        if wanted > self.live_bytes:
            spare = min(wanted // 4, budget_bytes // SPARE_SHARE)
            ample = max(wanted + spare, self.live_bytes * 5 // 4)
            wanted = ample if self.has_room(ample, budget_bytes) else wanted
        elif wanted == self.live_bytes or self.has_room(self.live_bytes, budget_bytes):
            return
        more = wanted - self.live_bytes
        self.live_bytes += more
        self.resident_bytes += more
        self.add_non_arena_bytes(more)
        self.invalidate_plan("it leaves other room for live tensors")

    def may_be_resident(self, most_resident_bytes: int, budget_bytes: int) -> bool:
        """Tell whether the whole model may stay on the device.

        The largest ``resident_bytes`` of any pass counts. If only some passes had room, the weights
        would come and go between passes.
        """
        return max(self.resident_bytes, most_resident_bytes) <= budget_bytes

    # The order of passes.

    def follow(self, before: Pass | None, *, may_adapt: bool) -> None:
        """Note that the pass runs after another one.

        A decode step repeats, and a prefill comes between decode steps. Weights that the prefill
        keeps for itself are gone each time, so it should leave those of the decode step in place.
        """
        if before is self:
            return
        may_adapt = may_adapt and self.habit.is_alternating
        self.habit.num_entries += 1
        if before is None or before.memgraph is None or not may_adapt:
            return
        if not self.graph.weight_bytes or not before.memgraph.entry:
            return  # one is a draft's, whose weights stay beside the arena
        # Only once in an arena: where many lengths take turns, each step follows another pass.
        theirs = None if self.alternating is None else self.alternating.memgraph
        is_new = theirs is None or theirs.arena_bytes > before.memgraph.arena_bytes
        if is_new and before.alternating is not self:
            self.alternating = before
            self.invalidate_plan("it keeps following another pass")

    def forget_alternating(self) -> None:
        """Plan without regard to another pass from now on."""
        self.alternating = None

    # Calls.

    @cached_property
    def collectives(self) -> str:
        """A digest of the collectives, in order."""
        return order_of(self.graph)

    @cached_property
    def _tensor_inputs(self) -> list[int]:
        kinds = (BufferKind.INPUT, BufferKind.STATE)
        return [i.position for i in self.graph.inputs if self._kind_of(i.tensor) in kinds]

    @cached_property
    def _tensor_outputs(self) -> list[int]:
        return [
            at
            for at, output in enumerate(self.graph.outputs)
            if output.tensor is not None and self._kind_of(output.tensor) is BufferKind.OUTPUT
        ]

    def _kind_of(self, tensor: int) -> BufferKind:
        return self.graph.buffers[self.graph.tensors[tensor].buffer].kind

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Return the device tensors among a call's arguments, without the weights."""
        return [args[position] for position in self._tensor_inputs]

    def outputs(self, results: Sequence[Any]) -> list[Any]:
        """Return the device tensors that a call created among its results."""
        return [results[at] for at in self._tensor_outputs]

    # Counters.

    def count_run(self, counted: PassCounters) -> None:
        """Count a run and its transfers."""
        self._num_runs += 1
        self.habit.num_runs += 1
        self._last_run = counted

    def stats(self) -> PassStats:
        """Return a snapshot of the counters."""
        return PassStats(
            name=self.graph.name,
            num_tasks=len(self.graph.tasks),
            arena_bytes=self._arena_bytes,
            non_arena_bytes=self.needs.non_arena_bytes,
            min_budget_bytes=self.needs.min_budget_bytes,
            needed_budget_bytes=self.needs.needed_budget_bytes,
            lower_bound_bytes=self._lower_bound_bytes,
            num_runs=self._num_runs,
            last_reloaded_bytes=self._last_run.reloaded_bytes,
            last_entry_reloaded_bytes=self._last_run.entry_reloaded_bytes,
            last_offloaded_bytes=self._last_run.offloaded_bytes,
        )
