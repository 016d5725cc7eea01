"""Runs calls of Dynamo's graphs by plan: find the pass, choose the device state, run."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.executor import OpHook, PassCounters
from ds_finepage.execution.fallback import run_unplanned
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.stores import WeightTable
from ds_finepage.runtime.device_memory import DeviceState, Memory
from ds_finepage.runtime.kv_offload import KVOffload
from ds_finepage.runtime.live_tensors import LiveTensors
from ds_finepage.runtime.pass_maker import GraphCall, PassMaker
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import BoundPass, Pass
from ds_finepage.runtime.plan_cache import plan_pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters, Stats

logger = logging.getLogger(__name__)


class PlanRunner:
    """Runs graph calls under one :class:`RunSettings` at a time.

    Attributes:
        settings: The settings of now.
        memory: The device memory.
        table: The passes so far.
        kv_offload: Runs calls whose KV cache may have to move to host memory.
        counters: Events so far.
        hooks: The user's op hooks.
        live: Device tensors that earlier passes have seen.
    """

    def __init__(
        self,
        settings: RunSettings,
        weights: WeightTable,
        memory: Memory,
        meter: OpMeter,
        *,
        live: LiveTensors | None = None,
        on_unplanned: Callable[[str], None] | None = None,
    ) -> None:
        """Start without a pass.

        Args:
            settings: The settings.
            weights: The host masters.
            memory: The device memory.
            meter: What ops take on the device.
            live: Device tensors that are known already.
            on_unplanned: Called with the reason where something must run without a plan; by
                default that is logged and counted.
        """
        self.settings = settings
        self.memory = memory
        self.counters = Counters()
        self.hooks: list[OpHook] = []
        self.live = live or LiveTensors()
        self.kv_offload = KVOffload(self.counters, pinned=settings.pins_memory)
        maker = PassMaker(meter, model_bytes=weights.block_bytes, free_device=memory.to_released)
        self.table = PassTable(maker, self.counters, on_unplanned or self.warn_unplanned)
        self._weights = weights
        self._shared_arena_bytes = settings.budget_bytes  # only ever shrinks
        self._last_entered: Pass | None = None
        self._last_paged: Pass | None = None

    def stats(self) -> Stats:
        """Return a snapshot of all counters."""
        counted = {name: getattr(self.counters, name) for name in Counters.__slots__}
        counted["unplanned_reasons"] = tuple(self.counters.unplanned_reasons)
        return Stats(
            budget_bytes=self.settings.budget_bytes,
            weight_bytes=self._weights.nbytes,
            passes=tuple(found.stats() for found in self.table.passes),
            **counted,
        )

    def use(self, settings: RunSettings) -> None:
        """Go on under other settings; every pass is planned again when it runs next.

        Args:
            settings: The new settings; the device memory follows them already.
        """
        self.settings = settings
        self._shared_arena_bytes = settings.budget_bytes
        for found in self.table.passes:
            found.invalidate_plan("the settings changed")
            found.forget_alternating()

    def forget(self) -> None:
        """Forget every pass, because the weights have other shapes."""
        self.memory.to_released()
        self.table.forget()
        self.table.maker.forget(self._weights.block_bytes)
        self._last_entered = self._last_paged = None
        self._shared_arena_bytes = self.settings.budget_bytes

    def warn_unplanned(self, reason: str) -> None:
        """Log and count that something runs without a plan.

        Args:
            reason: Why, in words.
        """
        logger.warning("running without a plan: %s", reason)
        self.counters.unplanned_reasons.append(reason)

    def call(
        self,
        compiled: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of a module; its graphs come to :meth:`run`.

        Args:
            compiled: The call as Dynamo compiled it.
            module: The module that is called.
            args: Its positional arguments.
            kwargs: Its named arguments.

        Raises:
            StoreError: A KV cache belongs to another model.
            PlanInfeasibleError: There is no room, wherever the KV cache is.
        """
        may_move = self.settings.moves_kv_caches
        return self.kv_offload.call(compiled, module, args, kwargs, may_move=may_move)

    # One call of a graph.

    def run(self, call: GraphCall) -> Any:
        """Run a graph call.

        Args:
            call: The graph and its arguments.

        Returns:
            What the graph returns.

        Raises:
            PlanInfeasibleError: There is no room for it in the budget.
        """
        found = self.table.find(call, self.settings)
        self._leave_room(found, call)
        if found is None:
            return self._run_unplanned(call)
        if self._may_be_resident(found):
            return self._run_resident(call, found)
        if self.memory.state is DeviceState.RESIDENT:
            self.memory.to_released()
        found.follow(self._last_paged, may_adapt=self.settings.is_cyclic)
        self._last_paged = found
        executor = self._executor_of_sizes(found, call)
        if executor is None:
            found = self.table.find_exact(call, self.settings)
            self._leave_room(found, call)
            if found is None:
                return self._run_unplanned(call)
            executor = self._executor(found)
            executor.set_sizes(call.args)
        return self._run_paged(call, found, executor)

    def _run_paged(self, call: GraphCall, found: Pass, executor: BoundPass) -> Any:
        host_outputs = call.graph.host_outputs(call.args)
        result = executor.run(call.args, host_outputs, self.memory.residents)
        self._count(call, found, result, executor.counters)
        return result

    def _run_resident(self, call: GraphCall, found: Pass) -> Any:
        """Let PyTorch run a pass with every weight on the device."""
        if self.memory.state is not DeviceState.RESIDENT:
            self._executor(found)  # its plan gives the figures of the pass
        entry_bytes = self.memory.to_resident()
        with torch.no_grad():
            result = call.graph.module(*call.graph.with_weights(call.args, self._weights.on_device))
        self.counters.num_resident_runs += 1
        self._count(call, found, result, PassCounters(entry_bytes, entry_bytes))
        return result

    def _run_unplanned(self, call: GraphCall) -> Any:
        self.counters.num_unplanned_graphs += 1
        self.memory.to_released()
        return run_unplanned(call.graph.module, call.args, self._weights)

    def _count(self, call: GraphCall, found: Pass, result: Any, counted: PassCounters) -> None:
        self.live.note((*found.inputs(call.args), *found.outputs(result)))
        found.count_run(counted)
        self.counters.reloaded_bytes += counted.reloaded_bytes
        self.counters.offloaded_bytes += counted.offloaded_bytes

    def _leave_room(self, found: Pass | None, call: GraphCall) -> None:
        """Let a pass leave room for live tensors that are no arguments of its call."""
        before, self._last_entered = self._last_entered, found
        budget_bytes = self.settings.budget_bytes
        # A pass that repeats mostly finds that its own earlier results are gone.
        if found is None or (before is found and found.has_room(found.live_bytes, budget_bytes)):
            return
        inputs = found.inputs(call.args)
        live_bytes = self.live.bytes_beside(inputs)
        if not found.has_room(live_bytes, budget_bytes):
            gc.collect()  # tensors in dead cycles are still there
            live_bytes = self.live.bytes_beside(inputs)
        found.leave_room(live_bytes, budget_bytes)

    def _may_be_resident(self, found: Pass) -> bool:
        """Tell whether the whole model may stay on the device, and nobody looks at single ops."""
        # If that held for some passes only, the weights would come and go between passes.
        most = max(found.resident_bytes, self.table.maker.most_resident_bytes)
        return (
            most <= self.settings.budget_bytes
            and self.memory.can_be_resident
            and self.settings.is_cyclic
            and not self.hooks
            and not self.settings.shows_ops
        )

    # Plans.

    def _executor_of_sizes(self, found: Pass, call: GraphCall) -> BoundPass | None:
        """Return a pass's executor, prepared for a call; None where only the exact sizes may fit.

        A pass that serves a bucket of sizes is as large as the largest of them.
        """
        try:
            executor = self._executor(found)
        except PlanInfeasibleError:
            if not found.graph.symbols:
                raise
            return None
        return executor if executor.set_sizes(call.args) else None

    def _executor(self, found: Pass) -> BoundPass:
        """Return a pass's executor; plan and bind the pass where it is not."""
        if found.executor is not None:
            return found.executor
        arena_bytes = self._arena_bytes(found)
        if found.memgraph is None or found.memgraph.arena_bytes != arena_bytes:
            found.set_plan(plan_pass(found, arena_bytes, self.settings, self.counters))
            assert found.memgraph is not None
            if found.memgraph.graph is not found.graph and self._needs_more_workspace(found):
                return self._executor(found)
        in_place = self.table.maker.meter.in_place(found.memgraph.graph)
        return self.memory.bind(found, in_place, self.hooks)

    def _needs_more_workspace(self, found: Pass) -> bool:
        """Measure the tasks of a rewritten graph; True where one needs more than was known."""
        assert found.memgraph is not None
        measured = self.table.measured(found.memgraph.graph, self.settings)
        return found.count_rewritten_workspace(measured.workspace_bytes)

    def _arena_bytes(self, found: Pass) -> int:
        """Return the size of the arena that a pass runs in.

        All passes share one size, so that weights stay resident between passes: the rest of the
        budget beside the pass with the most non-arena bytes. A pass that does not fit in there
        gets an arena of its own, of the rest that it leaves itself.

        Raises:
            PlanInfeasibleError: The pass does not fit in any arena within the budget.
        """
        needs, alignment = found.needs, self.settings.planning.alignment
        allowed = (self.settings.budget_bytes - needs.non_arena_bytes) // alignment * alignment
        if needs.min_arena_bytes > allowed:
            needs.require_room(self.settings.budget_bytes)
        else:  # a pass that cannot run takes nothing from the others
            self._shared_arena_bytes = min(self._shared_arena_bytes, allowed)
        if needs.min_arena_bytes > self._shared_arena_bytes:
            return allowed
        return self._shared_arena_bytes
