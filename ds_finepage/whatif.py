"""Plans a model for a machine without having either.

For the command line: a model's config and a hardware profile in, checked plans with predicted times
and lower bounds out.

[Note: where the KV cache is]
As in a run, it is on the device if the pass fits so, and a user does not want it in host memory,
unless it competes with the weights (``planning/budget.py``). Otherwise a policy that pages has it
in host memory: :mod:`ds_finepage.integrations.transformers.host_cache`. The plan then keeps the
keys or the values of some layers, as it keeps weights. The pass reloads the others before their
attention, and its tasks write the new rows to host memory. A cache that is on the device alone
counts once: the rows are there before the pass, and new ones are written among them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PretrainedConfig

from ds_finepage.capture.from_config import SOURCE_ROWS, capture_config
from ds_finepage.capture.models import default_dtype, load_model_config
from ds_finepage.capture.shards import cutting
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.execution import collectives as _defines_them  # noqa: F401
from ds_finepage.execution import host_ops
from ds_finepage.execution.device import Accelerator
from ds_finepage.execution.disk import staging_bytes
from ds_finepage.execution.measure import estimate_workspaces
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.graph.packed import GROUP, UNPACKED
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.integrations.transformers.room import in_steps
from ds_finepage.packing.form import packed_form
from ds_finepage.packing.model import pack_model
from ds_finepage.packing.stock import pack_as_stock
from ds_finepage.planning.budget import competes
from ds_finepage.planning.host_share import Division, divided
from ds_finepage.planning.liveness import ample_arena_bytes
from ds_finepage.planning.pipeline import Needs, Planned, PlanSettings, needs_of, plan_checked
from ds_finepage.planning.policies import EngineSettings, policy_named
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_products import host_bytes
from ds_finepage.planning.simulator import Costs
from ds_finepage.reporting.figures import (
    PlanFigures,
    entry_bytes,
    kv_reloaded_bytes,
    sent_bytes,
    written_bytes,
)
from ds_finepage.units import format_bytes

AS_STOCK = ", modelled as DeepSpeed packs"
"""Follows the form where a policy ``zero*`` stands for DeepSpeed's own packing."""


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """A pass of a model that was captured from its config.

    Attributes:
        model: The model's name or path; of a config, its type.
        phase: "prefill" or "decode".
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass.
        graph: The pass.
        weights: The packed form of the weights in words, such as "int4, group 64"; None if they are
            not packed.
        num_ranks: Ranks that the model is cut over; the pass is the first one's.
        kv_on_host: The KV cache is in host memory, except layers with a sliding window.
        again: Captures the same pass with its KV cache in host memory (``kv_on_host``), or with
            weights packed as DeepSpeed packs them (``as_stock``); None if nothing is known of it.
    """

    model: str
    phase: str
    batch: int
    seq: int
    graph: TaskGraph
    weights: str | None = None
    num_ranks: int = 1
    kv_on_host: bool = False
    again: Callable[..., CapturedModel] | None = None

    @property
    def needs(self) -> Needs:
        """Device bytes that the pass needs if weights stay whole, embedding tables included."""
        return self.needs_if(cuts_weights=False, looks_up_rows=False)

    def needs_if(self, *, cuts_weights: bool, looks_up_rows: bool) -> Needs:
        """Return the device bytes that the pass needs; :func:`needs_of` describes the arguments.

        They are the same under each of many budgets, and computed once.
        """
        key = cuts_weights, looks_up_rows
        if key not in self._needs:
            self._needs[key] = needs_of(
                self.graph,
                alignment=Accelerator.alignment,
                cuts_weights=cuts_weights,
                looks_up_rows=looks_up_rows,
            )
        return self._needs[key]

    @cached_property
    def _needs(self) -> dict[tuple[bool, bool], Needs]:
        return {}

    @cached_property
    def on_host(self) -> CapturedModel | None:
        """The same pass with its KV cache in host memory; None if no layer can move there."""
        found = self.again(kv_on_host=True) if self.again else None
        return found if found and found._bytes_of(BufferKind.HOST) else None

    @cached_property
    def as_stock(self) -> CapturedModel:
        """The same pass as DeepSpeed runs it, which packs a layer's weight into one parameter."""
        return self.again(as_stock=True) if self.again and self.weights else self

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache after the pass, on the device and in host memory."""
        read = (b for b in self.graph.buffers if b.kind is BufferKind.INPUT)
        of_source = sum(b.nbytes for b in read if b.name.startswith(SOURCE_ROWS))
        return self._bytes_of(BufferKind.STATE) + self._bytes_of(BufferKind.HOST) + of_source

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the weights and for a KV cache there, with room to grow."""
        room = in_steps(self.seq + 1)  # rows, as the cache allocates them if it knows its length
        return self.graph.weight_bytes + self._bytes_of(BufferKind.HOST) * room // self.seq

    def least_host_bytes(self, profile: HardwareProfile) -> int:
        """Return the host memory without which the pass cannot run: a disk may have the weights."""
        if not profile.disk_bytes_per_s:
            return self.host_bytes
        largest = max(b.nbytes for b in self.graph.buffers if b.kind is BufferKind.WEIGHT)
        return self.host_bytes - max(0, self.graph.weight_bytes - staging_bytes(largest))

    def _bytes_of(self, kind: BufferKind) -> int:
        return sum(b.nbytes for b in self.graph.buffers if b.kind is kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A checked plan of a captured pass, its predicted times and its figures.

    ``engine`` has the settings of the system that a baseline stands for.
    """

    memgraph: MemGraph
    timeline: Timeline
    figures: PlanFigures
    engine: EngineSettings | None = None


def capture_model(
    model: str | PretrainedConfig,
    *,
    phase: str,
    batch: int,
    seq: int,
    num_new: int = 1,
    profile: HardwareProfile,
    dtype: str | None = None,
    weights: str | None = None,
    weights_group: int = GROUP,
    num_ranks: int = 1,
    fused_unpacking: bool = False,
    kv_on_host: bool = False,
) -> CapturedModel:
    """Capture a pass from a model's config.

    Args:
        model: A shipped name, a directory, a transformers config.json, or a config.
        phase: "prefill" or "decode".
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass.
        num_new: Those of them that a decode step reads.
        profile: The machine.
        dtype: Of weights and activations; by default the one that suits the machine.
        weights: "bf16", "int8" or "int4"; by default they are as the config says.
        weights_group: Numbers that share a scale in a packed form.
        num_ranks: Ranks that the model is cut over; the pass is the first one's.
        fused_unpacking: Products of few rows unpack in registers.
        kv_on_host: The KV cache is in host memory, if the model has one that can be there.

    Raises:
        ConfigError: The model, dtype, form of the weights, a size or the ranks cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    config = load_model_config(model)
    form = packed_form(config, weights, weights_group, fused=fused_unpacking)
    dtype = dtype or _dtype_of(config, weights, profile)
    name = None if form is None else f"{form.name}, group {form.group}"
    shape: dict[str, Any] = {"phase": phase, "batch": batch, "seq": seq}
    sizes = {**shape, "num_new": num_new, "dtype": dtype}

    def capture(*, kv_on_host: bool = False, as_stock: bool = False) -> CapturedModel:
        pack = pack_as_stock if as_stock else pack_model
        prepare = cutting(num_ranks, None if form is None else partial(pack, form=form))
        host = host_ops if kv_on_host else None
        graph = capture_config(config, **sizes, host_ops=host, prepare=prepare)
        return CapturedModel(
            model=model if isinstance(model, str) else config.model_type,
            **shape,
            graph=estimate_workspaces(graph),
            weights=f"{name}{AS_STOCK}" if as_stock else name,
            num_ranks=num_ranks,
            kv_on_host=kv_on_host,
            again=None if kv_on_host or as_stock else capture,
        )

    return capture(kv_on_host=kv_on_host)


def _dtype_of(config: PretrainedConfig, weights: str | None, profile: HardwareProfile) -> str:
    if weights == UNPACKED:
        config.dtype = torch.bfloat16
    return default_dtype(config, profile)


def plan_captured(
    captured: CapturedModel,
    *,
    budget_bytes: int,
    profile: HardwareProfile,
    policy: str = "finepage",
    split: bool = True,
    host_memory_bytes: int | None = None,
    engine: EngineSettings | None = None,
    kv_cache: str = "auto",
) -> PlannedModel:
    """Plan a captured pass under a budget, check the plan, and predict its time.

    See [Note: where the KV cache is].

    Args:
        captured: The pass.
        budget_bytes: The limit on all device bytes.
        profile: The machine.
        policy: A key of ``POLICIES``.
        split: The policy may cut weights, if it can.
        host_memory_bytes: The machine's host memory; None if that is not known.
        engine: Settings that a baseline takes for its system, instead of choosing them.
        kv_cache: As in a ds_config: "auto", or where the KV cache is always.

    Raises:
        ConfigError: Unknown policy, or one that keeps the KV cache on the device.
        PlanInfeasibleError: The budget is too small for this policy, or the host memory for the
            weights, the KV cache and the offloaded buffers.
    """
    forms = _placed(forms_of(captured, policy=policy, split=split), kv_cache, policy)
    form, needs = that_fits(forms, budget_bytes)
    if needs.min_budget_bytes <= budget_bytes:  # before it is planned
        _require_host_memory(form, form.least_host_bytes(profile), host_memory_bytes)
    if host_memory_bytes is not None and form.host_bytes > host_memory_bytes:
        profile = profile.without_host  # as in a run, it multiplies by no weights in files
    settings = PlanSettings(
        policy=policy, split=split, alignment=Accelerator.alignment, profile=profile, engine=engine
    )
    arena_bytes = budget_bytes - needs.non_arena_bytes
    start = time.process_time()
    try:
        if arena_bytes < 1:
            raise PlanInfeasibleError("nothing is left for the arena")
        planned = plan_checked(form.graph, arena_bytes, settings)
    except PlanInfeasibleError:
        _require_room(form, needs, budget_bytes)  # names the budget, which policies do not know
        raise
    division = _divided(form, planned, host_memory_bytes)
    planned = dataclasses.replace(planned, memgraph=division.memgraph)
    figures = _figures(form, planned, division, needs, budget_bytes, time.process_time() - start)
    least = min(needs.min_budget_bytes for _, needs in forms)
    return PlannedModel(
        memgraph=planned.memgraph,
        timeline=planned.timeline,
        figures=dataclasses.replace(figures, min_budget_bytes=least),
        engine=planned.settings.engine,
    )


def plan_resident(captured: CapturedModel, profile: HardwareProfile) -> PlannedModel:
    """Plan a captured pass with room for everything, so that it copies nothing."""
    needs = captured.needs
    ample_bytes = ample_arena_bytes(captured.graph, needs.alignment)
    budget_bytes = needs.non_arena_bytes + ample_bytes
    return plan_captured(captured, budget_bytes=budget_bytes, profile=profile)


def problem_of(
    captured: CapturedModel, *, budget_bytes: int, profile: HardwareProfile, policy: str
) -> Problem:
    """Return the problem of a baseline, which leaves the KV cache where it is.

    Args:
        captured: The pass.
        budget_bytes: The limit on all device bytes.
        profile: The machine.
        policy: The baseline, a key of ``POLICIES``.

    Raises:
        ConfigError: Unknown policy.
    """
    captured = captured.as_stock if policy_named(policy).is_zero else captured
    arena_bytes = budget_bytes - captured.needs.non_arena_bytes
    return Problem(captured.graph, arena_bytes, Accelerator.alignment, profile)


Form = tuple[CapturedModel, Needs]
"""A pass with its KV cache in one place, and what it needs there."""


def forms_of(captured: CapturedModel, *, policy: str, split: bool) -> list[Form]:
    """List a pass with its KV cache on the device, and in host memory if the policy moves it.

    Args:
        captured: The pass.
        policy: A key of ``POLICIES``.
        split: The policy may cut weights, if it can.

    Raises:
        ConfigError: Unknown policy.
    """
    chosen = policy_named(policy)
    if chosen.is_zero:
        captured = captured.as_stock
    forms = [captured, captured.on_host] if chosen.pages else [captured]
    found = []
    for form in forms:
        if form is None:
            continue
        needs = form.needs_if(cuts_weights=split and chosen.is_cyclic, looks_up_rows=chosen.pages)
        # The budget is divided for the whole tables, whatever the policy does with them.
        found.append((form, dataclasses.replace(needs, non_arena_bytes=form.needs.non_arena_bytes)))
    return found


def that_fits(forms: Sequence[Form], budget_bytes: int) -> Form:
    """Return the form in which a pass runs under a budget: the first one that fits.

    A KV cache that competes with the weights is in host memory if it fits there. If no form fits,
    that is the one that needs least.
    """
    first = forms[0][0]
    if competes(first.kv_bytes, first.graph.weight_bytes, budget_bytes):
        forms = forms[::-1]
    fitting = (form for form in forms if form[1].min_budget_bytes <= budget_bytes)
    return next(fitting, min(forms, key=lambda form: form[1].min_budget_bytes))


def _placed(forms: Sequence[Form], kv_cache: str, policy: str) -> Sequence[Form]:
    """Return the forms with the KV cache where a user wants it; a pass without one stays."""
    if kv_cache != "host":
        return forms[:1] if kv_cache == "device" else forms
    if not policy_named(policy).pages:
        raise ConfigError(
            f'kv_cache: "host" has no effect: policy {policy} keeps the KV cache on '
            "the device. Leave it out."
        )
    return forms[-1:]


def _require_room(captured: CapturedModel, needs: Needs, budget_bytes: int) -> None:
    """Refuse a budget that is too small, and say that a KV cache in host memory does not help."""
    try:
        needs.require_room(budget_bytes)
    except PlanInfeasibleError as error:
        if not captured.kv_on_host:
            raise
        raise PlanInfeasibleError(
            f"even with the KV cache in host memory, {error}", error.min_budget_bytes
        ) from None


def _divided(form: CapturedModel, planned: Planned, host_memory_bytes: int | None) -> Division:
    """Leave weights in files for which host memory has no room, if the machine has a disk.

    Raises:
        PlanInfeasibleError: The rest has no room.
    """
    memgraph, profile = planned.memgraph, planned.settings.profile
    host_bytes = form.host_bytes + memgraph.host_bytes
    has_room = host_memory_bytes is None or host_bytes <= host_memory_bytes
    if has_room or host_memory_bytes is None or not profile.disk_bytes_per_s:
        _require_host_memory(form, host_bytes, host_memory_bytes)
        return Division(memgraph, host_bytes)
    found = divided(
        memgraph,
        other_bytes=form.least_host_bytes(profile) + memgraph.host_bytes,
        most_bytes=host_memory_bytes,
        lower_bound_bytes=planned.lower_bound_bytes,
    )
    _require_host_memory(form, found.host_bytes, host_memory_bytes)
    return found


def _require_host_memory(
    form: CapturedModel, host_bytes: int, host_memory_bytes: int | None
) -> None:
    if host_memory_bytes is None or host_bytes <= host_memory_bytes:
        return
    place = "in host memory" if form.kv_on_host else "on the device"
    raise PlanInfeasibleError(
        f"weights, offloaded buffers and a KV cache of {format_bytes(form.kv_bytes)} {place} "
        f"need {format_bytes(host_bytes)} ({host_bytes} bytes) of host memory; "
        f"--host-memory is {host_memory_bytes} bytes. Lower the batch or the length."
    )


def _figures(
    captured: CapturedModel,
    planned: Planned,
    division: Division,
    needs: Needs,
    budget_bytes: int,
    plan_seconds: float,
) -> PlanFigures:
    graph, profile = captured.graph, planned.settings.profile
    memgraph, timeline = planned.memgraph, planned.timeline
    alone_ns = planned.lower_bound_alone_ns if profile.has_host else None
    read_ns = Costs(profile).links[Lane.DISK].ns(division.least_file_bytes)
    return PlanFigures(
        model=captured.model,
        phase=captured.phase,
        batch=captured.batch,
        seq=captured.seq,
        policy=planned.settings.policy,
        hardware=profile.name,
        weight_bytes=graph.weight_bytes,
        kv_bytes=captured.kv_bytes,
        kv_on_host=captured.kv_on_host,
        budget_bytes=budget_bytes,
        min_budget_bytes=needs.min_budget_bytes,
        peak_bytes=needs.non_arena_bytes + memgraph.peak_bytes,
        host_bytes=division.host_bytes,
        entry_reloaded_bytes=entry_bytes(memgraph) + memgraph.reloaded_bytes,
        reloaded_bytes=memgraph.steady_reloaded_bytes,
        offloaded_bytes=memgraph.offloaded_bytes,
        kv_copied_bytes=kv_reloaded_bytes(memgraph) + written_bytes(memgraph.graph),
        lower_bound_bytes=planned.lower_bound_bytes,
        predicted_ns=timeline.total_ns,
        compute_ns=timeline.compute_ns,
        transfer_ns=timeline.transfer_ns,
        lower_bound_ns=max(planned.lower_bound_ns, read_ns),
        stall_ns=timeline.stall_ns,
        num_tasks=len(graph.tasks),
        plan_seconds=plan_seconds,
        weights=captured.weights,
        num_ranks=captured.num_ranks,
        sent_bytes=sent_bytes(memgraph.graph),
        file_bytes=memgraph.file_bytes,
        least_file_bytes=division.least_file_bytes,
        host_ns=timeline.busy_ns(Lane.HOST),
        host_read_bytes=host_bytes(memgraph.graph),
        lower_bound_alone_ns=alone_ns,
    )
