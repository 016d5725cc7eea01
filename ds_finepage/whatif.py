"""Plans a model for a machine without having either.

For the command line: a model's config and a hardware profile in, checked plans with predicted times
and lower bounds out.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from ds_finepage.capture.from_config import capture_config
from ds_finepage.capture.models import default_dtype, load_model_config
from ds_finepage.config import BudgetKind, DeviceBudget
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.measure import estimate_workspaces
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.planning.pipeline import (
    Needs,
    Planned,
    PlanSettings,
    needs_of,
    plan_checked,
)
from ds_finepage.planning.policies import policy_named
from ds_finepage.planning.time_bound import least_time_ns
from ds_finepage.reporting.figures import (
    PlanFigures,
    entry_bytes,
    layout_overhead,
    num_memory_dependencies,
)

CUDA_ALIGNMENT = 512

AUTO_MARGIN_BYTES = 512 << 20
"""Bytes that a budget of "auto" leaves to driver and libraries on such a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A pass of a model that was captured from its config."""

    model: str
    phase: str
    batch: int
    seq: int
    graph: TaskGraph
    capture_seconds: float  # of processor time

    @property
    def needs(self) -> Needs:
        """Device bytes that the pass needs if weights stay whole, embedding tables included."""
        return needs_of(
            self.graph, alignment=CUDA_ALIGNMENT, cuts_weights=False, looks_up_rows=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A checked plan of a captured pass, its predicted times and its figures."""

    memgraph: MemGraph
    timeline: Timeline
    figures: PlanFigures


def capture_model(
    model: str, *, phase: str, batch: int, seq: int, profile: HardwareProfile
) -> CapturedModel:
    """Capture a pass from a model's config, in the dtype that suits the machine.

    Args:
        model: A shipped name, a directory or a transformers config.json.
        phase: "prefill" or "decode".
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass.
        profile: The machine.

    Raises:
        ConfigError: The model or a size cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    start = time.process_time()
    config = load_model_config(model)
    dtype = default_dtype(config, profile)
    graph = capture_config(config, phase=phase, batch=batch, seq=seq, dtype=dtype)
    graph = estimate_workspaces(graph)
    return CapturedModel(
        model=model,
        phase=phase,
        batch=batch,
        seq=seq,
        graph=graph,
        capture_seconds=time.process_time() - start,
    )


def plan_captured(
    captured: CapturedModel,
    *,
    budget_bytes: int,
    profile: HardwareProfile,
    policy: str = "finepage",
    split: bool = True,
) -> PlannedModel:
    """Plan a captured pass under a budget, check the plan, and predict its time.

    Args:
        captured: The pass.
        budget_bytes: The limit on all device bytes.
        profile: The machine.
        policy: A key of ``POLICIES``.
        split: The policy may cut weights, if it can.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: The budget is too small for this policy.
    """
    settings = PlanSettings(policy=policy, split=split, alignment=CUDA_ALIGNMENT, profile=profile)
    needs = needs_of(
        captured.graph,
        alignment=CUDA_ALIGNMENT,
        cuts_weights=settings.cuts_weights,
        looks_up_rows=policy_named(policy).pages,
    )
    # The budget is divided for the whole tables, whatever the policy does with them.
    needs = dataclasses.replace(needs, non_arena_bytes=captured.needs.non_arena_bytes)
    arena_bytes = budget_bytes - needs.non_arena_bytes
    start = time.process_time()
    try:
        if arena_bytes < 1:
            raise PlanInfeasibleError("nothing is left for the arena")
        planned = plan_checked(captured.graph, arena_bytes, settings)
    except PlanInfeasibleError:
        needs.require_room(budget_bytes)  # names the budget, which policies do not know
        raise
    plan_seconds = time.process_time() - start
    figures = _figures(captured, planned, needs, budget_bytes, plan_seconds)
    return PlannedModel(memgraph=planned.memgraph, timeline=planned.timeline, figures=figures)


def _figures(
    captured: CapturedModel, planned: Planned, needs: Needs, budget_bytes: int, plan_seconds: float
) -> PlanFigures:
    graph, profile = captured.graph, planned.settings.profile
    memgraph, timeline = planned.memgraph, planned.timeline
    bound_bytes = planned.lower_bound_bytes
    # The weights that the plan finds but does not leave have to be reloaded in every pass.
    reloaded_bytes = memgraph.reloaded_bytes
    reloaded_bytes += sum(memgraph.graph.buffers[b].nbytes for b in memgraph.lost)

    def of_one_pass(amount: int) -> int:
        return -(-amount // memgraph.graph.num_batches)

    return PlanFigures(
        model=captured.model,
        phase=captured.phase,
        batch=captured.batch,
        seq=captured.seq,
        policy=planned.settings.policy,
        hardware=profile.name,
        weight_bytes=graph.weight_bytes,
        budget_bytes=budget_bytes,
        min_budget_bytes=needs.min_budget_bytes,
        peak_bytes=needs.non_arena_bytes + memgraph.peak_bytes,
        entry_reloaded_bytes=of_one_pass(entry_bytes(memgraph) + memgraph.reloaded_bytes),
        reloaded_bytes=of_one_pass(reloaded_bytes),
        offloaded_bytes=of_one_pass(memgraph.offloaded_bytes),
        lower_bound_bytes=bound_bytes,
        predicted_ns=of_one_pass(timeline.total_ns),
        compute_ns=of_one_pass(timeline.compute_ns),
        transfer_ns=of_one_pass(timeline.transfer_ns),
        lower_bound_ns=least_time_ns(
            graph, profile, arena_bytes=memgraph.arena_bytes, reloaded_bytes=bound_bytes
        ),
        stall_ns=of_one_pass(timeline.stall_ns),
        num_tasks=len(graph.tasks),
        num_memory_dependencies=num_memory_dependencies(memgraph),
        capture_seconds=captured.capture_seconds,
        plan_seconds=plan_seconds,
        layout_overhead=layout_overhead(memgraph),
    )


def budget_on(device_budget: DeviceBudget, weight_bytes: int, profile: HardwareProfile) -> int:
    """Turn a budget into bytes on a machine that is known by its profile only.

    A share of the weights may exceed the device; the plan is then one for a larger device.

    Args:
        device_budget: The budget, as a ds_config has it.
        weight_bytes: Bytes of all weights.
        profile: The machine.

    Raises:
        ConfigError: Another budget is larger than the device, or nothing is left of it.
    """
    device = profile.capacity_bytes
    if device_budget.kind is BudgetKind.WEIGHTS:
        assert device_budget.share is not None
        device = max(device, int(device_budget.share * weight_bytes))
    return device_budget.resolve(
        weight_bytes=weight_bytes,
        device_bytes=device,
        free_bytes=device,
        margin_bytes=AUTO_MARGIN_BYTES,
        name="--device-budget",
    )
