"""Runs calls of Dynamo's graphs by plan: find the pass, choose the device state, run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ds_finepage.execution.executor import OpHook, PassCounters
from ds_finepage.execution.fallback import run_unplanned
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.stores import WeightTable
from ds_finepage.runtime.binder import Binder
from ds_finepage.runtime.captured_call import CapturedCall
from ds_finepage.runtime.device_memory import DeviceState, Memory
from ds_finepage.runtime.kv_offload import KVOffload
from ds_finepage.runtime.live_tensors import LiveTensors
from ds_finepage.runtime.pass_maker import GraphCall, PassMaker
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import Pass
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
        binder: Plans passes and binds them.
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
        self.binder = Binder(self.table, memory, self.counters, self.hooks)

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
        self.binder.reset_arena()
        for found in self.table.passes:
            found.invalidate_plan("the settings changed")
            found.forget_alternating()

    def forget(self) -> None:
        """Forget every pass, because the weights have other shapes."""
        self.memory.to_released()
        self.table.forget()
        self.table.maker.forget(self._weights.block_bytes)
        self.binder.reset()
        self.live.forget_pass()

    def warn_unplanned(self, reason: str) -> None:
        """Log and count that something runs without a plan.

        Args:
            reason: Why, in words.
        """
        logger.warning("running without a plan: %s", reason)
        self.counters.unplanned_reasons.append(reason)

    def call(self, call: CapturedCall) -> Any:
        """Run a call of a module; its graphs come to :meth:`run`.

        Args:
            call: The call.

        Raises:
            StoreError: A KV cache belongs to another model.
            PlanInfeasibleError: There is no room, wherever the KV cache is.
        """
        return self.kv_offload.call(call, may_move=self.settings.moves_kv_caches)

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
        self.live.reserve(found, call.args, self.settings.budget_bytes)
        if found is not None and self._may_be_resident(found):
            return self._run_resident(call, found)
        if self.memory.state is DeviceState.RESIDENT:
            self.memory.to_released()
        executor = None
        if found is not None:
            executor = self.binder.bind_next(found, call.args, self.settings)
            if executor is None:
                found = self.table.find_exact(call, self.settings)
                self.live.reserve(found, call.args, self.settings.budget_bytes)
        if found is None:
            self.counters.num_unplanned_graphs += 1
            self.memory.to_released()
            return run_unplanned(call.graph.module, call.args, self._weights)
        if executor is None:
            executor = self.binder.bind(found, self.settings)
            executor.set_sizes(call.args)
        host_outputs = call.graph.host_outputs(call.args)
        result = executor.run(call.args, host_outputs, self.memory.residents)
        self._count(call, found, result, executor.counters)
        return result

    def _run_resident(self, call: GraphCall, found: Pass) -> Any:
        """Let PyTorch run a pass with every weight on the device."""
        if self.memory.state is not DeviceState.RESIDENT:
            self.binder.bind(found, self.settings)  # its plan gives the figures of the pass
        entry_bytes = self.memory.to_resident()
        with torch.no_grad():
            result = call.graph.module(*call.graph.with_weights(call.args, self._weights.on_device))
        self.counters.num_resident_runs += 1
        self._count(call, found, result, PassCounters(entry_bytes, entry_bytes))
        return result

    def _may_be_resident(self, found: Pass) -> bool:
        """Tell whether the whole model may stay on the device, and no hook looks at single ops."""
        # If that held for some passes only, the weights would come and go between passes.
        most = max(found.resident_bytes, self.table.maker.most_resident_bytes)
        return (
            most <= self.settings.budget_bytes
            and self.memory.can_be_resident
            and self.settings.is_cyclic
            and not self.hooks
            and not self.settings.shows_ops
        )

    def _count(self, call: GraphCall, found: Pass, result: Any, counted: PassCounters) -> None:
        self.live.note((*found.inputs(call.args), *found.outputs(result)))
        found.count_run(counted)
        self.counters.reloaded_bytes += counted.reloaded_bytes
        self.counters.offloaded_bytes += counted.offloaded_bytes
