"""Runs calls of Dynamo's graphs by plan: find the pass, choose the device state, run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.device import DeviceMemoryError
from ds_finepage.execution.executor import Executor, OpHook, PassCounters, Residents
from ds_finepage.execution.fallback import run_resident, run_unplanned
from ds_finepage.execution.host_memory import host_memory
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.stores import WeightTable
from ds_finepage.integrations.transformers.preflight import CacheUse
from ds_finepage.planning.budget import HOST_PROGRAM_SLACK_BYTES
from ds_finepage.planning.pipeline import collector_off
from ds_finepage.runtime.binder import Binder
from ds_finepage.runtime.device_memory import DeviceMemory, DeviceState
from ds_finepage.runtime.kv_offload import KVOffload
from ds_finepage.runtime.live_tensors import LiveTensors
from ds_finepage.runtime.observing import Observer
from ds_finepage.runtime.pass_maker import PassMaker
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.ranks import ONE_RANK, Ranks
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters, Stats

logger = logging.getLogger(__name__)

MAX_WARNINGS = 5
"""Reasons for running without a plan that are logged. A model that Dynamo does not capture at all
has one for each of its modules."""


class PlanRunner:
    """Runs graph calls under one :class:`RunSettings` at a time."""

    def __init__(
        self,
        settings: RunSettings,
        weights: WeightTable,
        memory: DeviceMemory,
        meter: OpMeter,
        *,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.settings = settings
        self.memory = memory
        self.counters = Counters()
        self.hooks: list[OpHook] = []
        self.live = LiveTensors()
        self.kv_offload = KVOffload(
            self.counters,
            make_room=self._make_room,
            note_live=self.live.note,
            require_host=self.require_host,
        )
        memory.require_host = self.require_host
        memory.free_host = lambda: self.free_host_bytes
        maker = PassMaker(
            meter,
            model_bytes=weights.block_bytes,
            free_device=memory.to_released,
            prepare=weights.parted,
            ranks=ranks,
        )
        self.table = PassTable(maker, self.counters, self.warn_unplanned)
        self._weights = weights
        self.binder = Binder(self.table, memory, self.counters, self.hooks, ranks)
        self.observer = Observer(settings.device)
        self.ranks = ranks
        self.draft_home_bytes = 0  # of weights that are a draft's meanwhile
        self._last: Pass | None = None  # that ran on the arena

    def stats(self) -> Stats:
        """Return a snapshot of all counters."""
        counted = {name: getattr(self.counters, name) for name in Counters.__slots__}
        counted["unplanned_reasons"] = tuple(self.counters.unplanned_reasons)
        return Stats(
            budget_bytes=self.settings.budget_bytes,
            weight_bytes=self._weights.nbytes,
            file_bytes=self._weights.files.reader.read_bytes,
            host_bytes=self.host_bytes,
            host_budget_bytes=self.settings.host_budget_bytes,
            passes=tuple(found.stats() for found in self.table.passes),
            **counted,
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of the run in host memory: weights, pinned pool, and caches."""
        pool_bytes, cache_bytes = self.memory.pool_bytes, self.kv_offload.host_bytes
        return self._weights.host_bytes + self.draft_home_bytes + pool_bytes + cache_bytes

    @property
    def free_host_bytes(self) -> int:
        """Bytes that are free, and within the host budget; copies of files can be made free."""
        (free_bytes, _), budget_bytes = host_memory(), self.settings.host_budget_bytes
        held_bytes = self._weights.files.held_bytes
        if budget_bytes is not None:
            free_bytes = min(free_bytes, max(0, budget_bytes - self.host_bytes))
        return free_bytes + held_bytes

    def require_host(self, more: int) -> None:
        """Refuse to take more bytes of host memory than its budget has.

        Raises:
            PlanInfeasibleError: It has less.
        """
        need, budget_bytes = self.host_bytes + more, self.settings.host_budget_bytes
        if budget_bytes is None:
            return
        held_bytes = self._weights.files.held_bytes
        if budget_bytes < need <= budget_bytes + held_bytes:
            self.memory.drop_copies(need - budget_bytes)
        elif need > budget_bytes:
            raise PlanInfeasibleError(
                f"the run needs {need} bytes of host memory, {more} of them for what is not on "
                f"the device; host_budget is {budget_bytes} bytes. Raise finepage.host_budget to "
                f">= {need}, or lower the batch, the beams or max_new_tokens."
            )

    def use(self, settings: RunSettings) -> None:
        """Go on under other settings; every pass is planned again when it runs next.

        The device memory follows them already.
        """
        self.settings = settings
        self.binder.reset_arena()
        self.observer.forget()
        for found in self.table.passes:
            found.invalidate_plan("the settings changed")
            found.forget_alternating()

    def forget(self) -> None:
        """Forget every pass, because the weights have other shapes."""
        self.memory.to_released()
        self.table.forget()
        self.table.maker.forget(self._weights.block_bytes)
        self.binder.reset_arena()
        self._last = None
        self.observer.forget()

    def leave_no_room(self) -> None:
        """Let every pass count again which tensors live beside it: a draft has gone."""
        self.binder.reset_arena()
        for found in self.table.passes:
            found.leave_room(0, budget_bytes=0)

    def warn_unplanned(self, reason: str) -> None:
        """Log and count that something runs without a plan."""
        num_before = len(self.counters.unplanned_reasons)
        if num_before < MAX_WARNINGS:
            logger.warning("running without a plan: %s", reason)
        elif num_before == MAX_WARNINGS:
            logger.warning("running without a plan: more; stats.unplanned_reasons has all")
        self.counters.unplanned_reasons.append(reason)

    def generation(self, use: CacheUse) -> AbstractContextManager[None]:
        """Return the context of a generation.

        Ranks that run the same steps give it the same room.

        Raises:
            RankError: Another rank does not generate, or fails.
        """
        if self.ranks.collects_weights:
            with self.ranks.together():
                longest = self.ranks.most("a generation", use.longest or 0)
            use = replace(use, longest=longest or None)
        return self.kv_offload.generation(use)

    def _make_room(self, rooms: Sequence[torch.Tensor], after: Sequence[int]) -> bool:
        """Make room for a KV cache that moves to other tensors; the arena makes way if it must.

        ``after`` are the bytes of the tensors that take the places of ``rooms``, in order.

        Returns:
            True where the old and the new room of a tensor do not fit together beside the arena.

        Raises:
            PlanInfeasibleError: The budget has no room for the bytes that it has then.
        """
        budget_bytes = self.settings.budget_bytes
        before, nbytes = [room.untyped_storage().nbytes() for room in rooms], sum(after)
        beside = self.live.bytes_beside(rooms) + HOST_PROGRAM_SLACK_BYTES
        beside += self.table.maker.meter.library_bytes
        if nbytes + beside > budget_bytes:
            raise _no_room(nbytes, beside, budget_bytes)
        apart = beside + max(sum(before), nbytes)  # where no tensor has two rooms at once
        if apart + self.memory.held_bytes > budget_bytes:
            self.memory.to_released()
        return apart + max(*before, *after) + self.memory.held_bytes > budget_bytes

    # One call of a graph.

    def run(self, graph: DynamoGraph, args: Sequence[Any]) -> Any:
        """Run a call of a graph.

        Returns:
            What the graph returns.

        Raises:
            PlanInfeasibleError: There is no room for it in the budget.
            DeviceMemoryError: The device has no room for the budget.
            RankError: Another rank fails, or is about to run something else.
        """
        try:
            with self.ranks.together(args), collector_off():
                return self._run(graph, args)
        except torch.OutOfMemoryError as error:
            where, budget_bytes = self.settings.device, self.settings.budget_bytes
            raise DeviceMemoryError.of(error, where, budget_bytes) from error

    def _run(self, graph: DynamoGraph, args: Sequence[Any]) -> Any:
        settings, memory = self.settings, self.memory
        refusal: PlanInfeasibleError | None = None
        for found in self.table.candidates(graph, args, settings):
            if found is None:
                self._weights.require_whole("a graph")
                self.counters.num_unplanned_graphs += 1
                memory.to_released()
                self.ranks.agree(None, args)
                return run_unplanned(graph.module, args, self._weights)
            is_reordered = self.kv_offload.use.is_reordered
            self.live.reserve(
                found, args, settings.budget_bytes, is_reordered=is_reordered, ranks=self.ranks
            )
            most = self.table.maker.most_resident_bytes
            if self._keeps_weights and found.may_be_resident(most, settings.budget_bytes):
                if memory.state is not DeviceState.RESIDENT:
                    self.binder.bind(found, settings)  # its plan gives the figures of the pass
                    self.ranks.most("all weights on the device", 1)
                entry_bytes = memory.to_resident()
                self.ranks.agree(found.collectives, args)
                on_device = self._weights.on_device
                result = run_resident(graph.module, args, graph.weights, on_device)
                self.counters.num_resident_runs += 1
                counted = PassCounters(entry_bytes, entry_bytes)
            else:
                if memory.state is DeviceState.RESIDENT:
                    memory.to_released()
                found.follow(self._last, may_adapt=settings.is_cyclic)
                self._last = found
                try:
                    executor = self.binder.bind(found, settings)
                except PlanInfeasibleError as error:
                    refusal = error.bare()
                    continue  # smaller sizes may still have room
                if not executor.set_sizes(args):
                    continue  # the plan is too small for these sizes
                self.ranks.agree(_collectives(found, executor, memory.residents), args)
                self.observer.before_run(found, executor)
                result = executor.run(args, graph.host_outputs(args), memory.residents)
                counted = executor.counters
                self.observer.after_run(found, executor)
            self.live.note((*found.inputs(args), *found.outputs(result)))
            found.count_run(counted)
            self.counters.reloaded_bytes += counted.reloaded_bytes
            self.counters.offloaded_bytes += counted.offloaded_bytes
            return result
        assert refusal is not None, "a pass for exactly the sizes of a call runs or is refused"
        raise refusal

    @property
    def _keeps_weights(self) -> bool:
        """True where the whole model may stay on the device; no hook looks at single ops then."""
        return self.settings.is_cyclic and not self.hooks and not self.settings.shows_ops


def _no_room(nbytes: int, beside: int, budget_bytes: int) -> PlanInfeasibleError:
    need = nbytes + beside
    return PlanInfeasibleError(
        f"the KV cache takes {nbytes} bytes with room for new rows, beside {beside} bytes of the "
        f"caller, which makes min_budget_bytes {need}; device_budget is {budget_bytes} bytes. "
        f"Raise finepage.device_budget to >= {need} or lower the batch, the beams or "
        f"max_new_tokens.",
        need,
    )


def _collectives(found: Pass, executor: Executor, residents: Residents) -> str:
    """Return what stands for the collectives of a pass: those of its tasks, and its collects."""
    if found.graph.parted:
        return f"{found.collectives} {executor.collects(residents)}"
    return found.collectives
