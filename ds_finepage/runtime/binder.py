"""Brings a sized pass into the arena: choose the arena, plan, bind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ds_finepage.checker.checker import check
from ds_finepage.execution.executor import Executor, OpHook
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.parts import on_device
from ds_finepage.planning.finepage.stacking import residents_of
from ds_finepage.planning.pipeline import Planned, plan_checked
from ds_finepage.runtime.device_memory import DeviceMemory
from ds_finepage.runtime.parted_ranks import shape_of
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import NEAR, Pass
from ds_finepage.runtime.ranks import ONE_RANK, Ranks
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters
from ds_finepage.units import NS_PER_S, align_up

LEAST_GROWTH = 1 / 16
"""Of an arena; it does not grow for less."""

REBIND_NS = 50_000_000
"""About the time in which the passes of a generation are bound to another arena."""


def alternating_plan(found: Pass, arena_bytes: int) -> MemGraph | None:
    """Return the plan of the pass that a pass alternates with; forget one in a larger arena."""
    theirs = None if found.alternating is None else found.alternating.memgraph
    if theirs is not None and theirs.arena_bytes <= arena_bytes:
        return theirs
    found.forget_alternating()  # its next plan may differ
    return None


def plan_pass(found: Pass, arena_bytes: int, settings: RunSettings, counters: Counters) -> Planned:
    """Plan a pass; the plan is checked.

    It forgets the pass that it alternates with if that has another arena now.

    Raises:
        PlanInfeasibleError: There is no plan in this arena.
        InvalidPlanError: The plan breaks a rule, which is a fault of the planner.
    """
    theirs = alternating_plan(found, arena_bytes)
    residents = () if theirs is None else residents_of(theirs)
    start = time.perf_counter_ns()
    planned = plan_checked(found.graph, arena_bytes, settings.planning, residents)
    counters.plan_ns += time.perf_counter_ns() - start
    counters.num_plans += 1
    return planned


class Binder:
    """Plans passes and binds them to device memory.

    All passes share one arena, so that weights stay resident between passes. Its size is the rest
    of the budget beside the pass with the most non-arena bytes, and no more than passes need. It
    grows again when passes that have room for more have run for a while, so a long prompt does not
    cost the short ones behind it. A pass that does not fit in there gets an arena of its own.
    """

    def __init__(
        self,
        table: PassTable,
        memory: DeviceMemory,
        counters: Counters,
        hooks: Sequence[OpHook],
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._ranks = ranks
        self._table = table
        self._memory = memory
        self._counters = counters
        self._hooks = hooks
        self._most_arena_bytes: int | None = None  # for the shared arena
        self._missed_bytes = 0  # that passes have reloaded because it is not larger

    def reset_arena(self) -> None:
        """Choose the shared arena size again."""
        self._most_arena_bytes, self._missed_bytes = None, 0

    def bind(self, found: Pass, settings: RunSettings) -> Executor:
        """Bind a pass; plan it first where it has no plan for the present arena.

        Raises:
            PlanInfeasibleError: The pass does not fit in the budget.
        """
        if found.executor is not None and not self._pays_to_grow(found, settings):
            return found.executor
        # Passes have an arena already: with some to spare, or each longer prompt has all of them
        # planned again.
        share = 1 if self._most_arena_bytes is None else NEAR
        while True:
            arena_bytes = -self._ranks.most("arena", -self._arena_bytes(found, settings, share))
            if found.take_plan_for(arena_bytes):
                break
            planned = self._plan(found, arena_bytes, settings)
            found.set_plan(planned)
            if planned.memgraph.graph is not found.graph:
                # The plan rewrote tasks; it is dropped where one needs more room.
                measured = self._table.measured(planned.memgraph.graph, settings)
                if not found.count_rewritten_workspace(measured.workspace_bytes):
                    found.set_costs(measured)
        assert found.memgraph is not None
        in_place = self._table.maker.meter.in_place(found.memgraph.graph)
        return self._memory.bind(found, arena_bytes, in_place, self._hooks)

    def _pays_to_grow(self, found: Pass, settings: RunSettings) -> bool:
        """Choose a larger arena where passes have reloaded as much for want of it as it costs.

        It begins empty, so it costs its own bytes, and the time to bind passes to it.
        """
        if self._ranks is not ONE_RANK:  # they have to do it in one step
            return False
        largest_bytes = min(_allowed_bytes(found, settings), self._wanted_bytes(found, settings))
        more = largest_bytes - self._memory.held_bytes
        if more <= largest_bytes * LEAST_GROWTH:
            self._missed_bytes = 0  # it is soon as small again where such a pass comes back
            return False
        self._missed_bytes += more
        rebind_bytes = REBIND_NS * settings.profile.h2d_bytes_per_s / NS_PER_S
        if self._missed_bytes < largest_bytes + rebind_bytes:
            return False
        self.reset_arena()
        return True

    def _plan(self, found: Pass, arena_bytes: int, settings: RunSettings) -> Planned:
        """Plan a pass; where the ranks collect weights, take the plan of rank 0."""
        if not self._ranks.collects_weights:
            return plan_pass(found, arena_bytes, settings, self._counters)
        alternating_plan(found, arena_bytes)
        memgraph = self._ranks.shared(
            f"plan of {shape_of(found.graph)} in {arena_bytes} bytes",
            lambda: plan_pass(found, arena_bytes, settings, self._counters).memgraph,
        )
        is_rewritten = shape_of(memgraph.graph) != shape_of(found.graph)
        graph = on_device(memgraph.graph, str(settings.device)) if is_rewritten else found.graph
        return Planned(found.graph, check(replace(memgraph, graph=graph)), settings.planning)

    def _arena_bytes(self, found: Pass, settings: RunSettings, share: float) -> int:
        """Return the size of the arena that a pass runs in; refuse one that fits in none.

        A shared arena that is too large becomes this share of what the pass allows.
        """
        needs, allowed = found.needs, _allowed_bytes(found, settings)
        if needs.min_arena_bytes > allowed:
            needs.require_room(settings.budget_bytes)
            return allowed  # a pass that cannot run takes nothing from the others
        if self._most_arena_bytes is None:
            self._most_arena_bytes = allowed
        elif allowed < self._most_arena_bytes:
            alignment = settings.planning.alignment
            self._most_arena_bytes = int(allowed * share) // alignment * alignment
        if needs.min_arena_bytes > self._most_arena_bytes:
            return allowed
        return min(self._most_arena_bytes, self._wanted_bytes(found, settings))

    def _wanted_bytes(self, found: Pass, settings: RunSettings) -> int:
        """Return the bytes of an arena beyond which more have no use."""
        if not settings.is_cyclic:
            return settings.budget_bytes  # where plans leave gaps, more bytes save copies
        wanted = max(self._table.maker.most_arena_bytes, found.needs.needed_arena_bytes)
        return align_up(wanted, settings.planning.alignment)


def _allowed_bytes(found: Pass, settings: RunSettings) -> int:
    """Return the bytes of the largest arena that the budget leaves to a pass."""
    alignment = settings.planning.alignment
    return (settings.budget_bytes - found.needs.non_arena_bytes) // alignment * alignment
