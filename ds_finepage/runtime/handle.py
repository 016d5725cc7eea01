"""The user's end of an attached model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

from ds_finepage.config import DebugConfig, FinepageConfig
from ds_finepage.execution.executor import OpHook
from ds_finepage.execution.large_buffers import LargeBuffers
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.stores import TakeWeights, WeightTable
from ds_finepage.execution.subclasses import TakenApart
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.planning.policies import POLICIES
from ds_finepage.planning.simulator import simulate
from ds_finepage.reporting.results import ObservedPass
from ds_finepage.runtime.calls import AroundCall, CallTaker
from ds_finepage.runtime.device_memory import DeviceMemory
from ds_finepage.runtime.drafts import Draft
from ds_finepage.runtime.interception import PlannedCall
from ds_finepage.runtime.plan_runner import PlanRunner
from ds_finepage.runtime.rank_table import rank_table
from ds_finepage.runtime.ranks import Ranks
from ds_finepage.runtime.report_writer import ReportWriter
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Stats
from ds_finepage.units import require_count


class Handle:
    """ds_finepage at work on one module. Make it with :func:`ds_finepage.attach`."""

    def __init__(
        self,
        module: torch.nn.Module,
        weights: WeightTable,
        settings: RunSettings,
        *,
        apart: TakenApart,
        buffers: LargeBuffers,
        take: TakeWeights,
        around_call: AroundCall,
        ranks: Ranks,
    ) -> None:
        """Attach to a module.

        Args:
            module: The module.
            weights: Its host masters.
            settings: Everything that the user decides.
            apart: The parameters that are taken apart.
            buffers: The large buffers that are weights.
            take: Makes host masters of weights that the module gets later.
            around_call: Makes a context that holds while the module runs.
            ranks: Runs each pass together with other ranks.
        """
        self._ranks = ranks
        self._apart = apart
        self._buffers = buffers
        self._weights = weights
        self._memory = DeviceMemory(weights, settings)
        meter = OpMeter(settings.device, num_streams=settings.num_op_streams)
        self._runner = PlanRunner(settings, weights, self._memory, meter, ranks=ranks)
        try:
            weights.install()
            self._calls = CallTaker(
                module,
                weights,
                self._runner,
                apart=apart,
                buffers=buffers,
                take=take,
                around_call=around_call,
                handle=self,
            )
        except BaseException:
            weights.restore()
            buffers.restore()
            self._memory.close()
            raise
        self._attached = True
        self._report: ReportWriter | None = None
        if settings.config.report is not None:
            self.record()
            self._report = ReportWriter(settings.config.report, self._runner, self.observed)

    @property
    def draft(self) -> Any:
        """The model that drafts for this one; None without a draft."""
        found = self._calls.assistance.draft
        return None if found is None else found.model

    def take_draft(self, draft: Draft | None) -> None:
        """Let a draft run under the budget, in the place of the one before; None ends that.

        Raises:
            FinepageError: A call of the model is running.
            PlanInfeasibleError: The draft leaves nothing of the budget to the model.
        """
        with self._calls.assistance.between_turns("take_draft"):
            if draft is None:
                self._calls.assistance.drop()
            else:
                self._calls.assistance.take(draft)

    @property
    def attached(self) -> bool:
        """True until :meth:`detach`."""
        return self._attached

    @property
    def stats(self) -> Stats:
        """A snapshot of all counters."""
        found, draft = self._runner.stats(), self._calls.assistance.draft
        return found if draft is None else draft.counted(found)

    @property
    def free_host_bytes(self) -> int:
        """Bytes of host memory that the run may take yet."""
        return self._runner.free_host_bytes

    @property
    def settings(self) -> RunSettings:
        """Everything that the user decides, and the rates to plan with."""
        return self._runner.settings

    @property
    def is_shared(self) -> bool:
        """True where several ranks share the model."""
        return self._ranks.share_model

    @property
    def profile(self) -> HardwareProfile:
        """The rates that plans are made for."""
        return self.settings.profile

    def plans(self) -> list[tuple[MemGraph, Timeline]]:
        """Return the plan of every captured pass with its predicted timeline."""
        plans = [p.memgraph for p in self._runner.table.passes if p.memgraph is not None]
        return [(memgraph, simulate(memgraph, self.profile)) for memgraph in plans]

    def rank_table(self) -> Table:
        """Return the counters of all ranks side by side, for ``rich.print``.

        Every rank has to call this, as it has to call the model; each of them gets the table.

        Raises:
            RankError: Another rank is gone.
        """
        with self._calls.lock:
            return rank_table(self._ranks, self.stats)

    def record(self, on: bool = True) -> None:
        """Record the timelines of all later passes that run by plan, or stop.

        A pass with every weight on the device runs by PyTorch, without a plan and without a record.

        Args:
            on: False stops; :meth:`observed` still returns the passes that were recorded.
        """
        if on:
            self._runner.observer.forget()
        self._runner.observer.is_on = on

    def observed(self) -> list[ObservedPass]:
        """Return the last run of each recorded pass: its plan, and it predicted and measured.

        A pass is called "prefill" if it reads more than one token a sequence, "decode" if it reads
        one, and "pass" if it reads none. Later ones of the same kind are "decode_2" and so on. The
        prediction is for the machine that ran it, with the weights in the arena that it found
        there. Another budget or policy begins a new list.
        """
        with self._calls.lock:
            return self._runner.observer.observed(self.profile)

    def register_op_hook(
        self,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> Callable[[], None]:
        """Call ``before(task, operands)`` and ``after(task, results)`` around tasks.

        Copies of new rows of a KV cache to host memory run beside the tasks, without hooks.

        Tensors are valid during the call only. Returns a function that removes both.
        """
        hook = OpHook(before, after)
        self._runner.hooks.append(hook)
        return lambda: self._runner.hooks.remove(hook)

    def replan(
        self,
        *,
        budget_bytes: int | None = None,
        policy: str | None = None,
        debug: DebugConfig | None = None,
    ) -> None:
        """Go on under other settings; every pass is planned again when it runs next.

        Args:
            budget_bytes: The new limit on all device bytes.
            policy: The new policy, by name.
            debug: The new checks.

        Raises:
            ConfigError: The budget is less than 1 byte, or the policy unknown.
            FinepageError: A call of the model is running.
        """
        if budget_bytes is not None:
            require_count(budget_bytes, "budget_bytes")
        with self._calls.lock:
            self._calls.running.refuse("replan")
            before = self._runner.settings
            changes = {"policy": policy, "debug": debug}
            changes = {name: value for name, value in changes.items() if value is not None}
            settings = replace(
                before,
                config=FinepageConfig.from_dict(
                    {**dict(before.config), **changes}, policies=POLICIES
                ),
                budget_bytes=before.budget_bytes if budget_bytes is None else budget_bytes,
            )
            self._memory.use(settings)
            self._runner.use(settings)

    def refresh(self) -> None:
        """Treat every weight as changed.

        Call it after a write that leaves no sign: through NumPy, DLPack or a raw pointer.

        Raises:
            FinepageError: A call of the model is running.
        """
        with self._calls.lock:
            self._calls.running.refuse("refresh")
            self._calls.take_over(self._weights.refresh())

    def detach(self) -> None:
        """Give the model back as it was; a second call does nothing.

        Layers that ``finepage.weights`` has packed stay packed.

        Raises:
            FinepageError: A call of the model is running.
        """
        # While the interpreter ends, torch aborts where a view outlives its base.
        if not self._attached or sys.is_finalizing():
            return
        with self._calls.assistance.between_turns("detach"):
            if not self._attached:
                return  # another thread was first
            if self._report is not None:
                self._report.write()
            self._attached = False
            self._memory.close()
            self._calls.remove()
            self._weights.restore()
            self._buffers.restore()
            self._apart.restore()
            self._runner.kv_offload.handed_out.bring_back()


def handle_in(module: object) -> Handle | None:
    """Return the handle that a module is attached by; None if it is not attached.

    Args:
        module: The module, or a part of it that has parts of its own.
    """
    planned = getattr(module, "_compiled_call_impl", None)
    if not isinstance(planned, PlannedCall):
        return None
    assert isinstance(planned.handle, Handle)
    return planned.handle
