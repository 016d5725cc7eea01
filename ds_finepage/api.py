"""The program on one screen: capture -> plan -> check -> simulate -> attach.

    ds_config --> FinepageConfig
    model.forward --capture--> TaskGraph --plan--> MemGraph --check--> MemGraph --execute--> outputs
                                                      |
                               HardwareProfile --> simulate --> Timeline

``attach`` runs all of it for a model. The other functions are its arrows one by one, for a model
and a machine that need not be there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ds_finepage.checker.checker import check
from ds_finepage.config import DeviceBudget, FinepageConfig
from ds_finepage.errors import ConfigError
from ds_finepage.execution import host_attention
from ds_finepage.execution.device import (
    DeviceMemoryError,
    default_device,
    device_of,
    require_device,
)
from ds_finepage.execution.file_weights import AHEAD_SHARE
from ds_finepage.execution.host_memory import host_memory
from ds_finepage.execution.large_buffers import LargeBuffers
from ds_finepage.execution.masters import weights_of
from ds_finepage.execution.probe import context_margin_bytes, probe, with_measured_host
from ds_finepage.execution.stores import TakeWeights, WeightTable
from ds_finepage.execution.subclasses import TakenApart
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.packing import native
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.fused import why_not
from ds_finepage.packing.model import is_packed, pack_model, set_fused
from ds_finepage.planning.budget import budget_on
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.planning.policies import POLICIES, policy_named
from ds_finepage.planning.simulator import simulate
from ds_finepage.runtime.calls import AroundCall
from ds_finepage.runtime.drafts import STAND_IN, STAND_IN_FORM, Draft, stand_in_of
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.ranks import ONE_RANK, Ranks
from ds_finepage.runtime.settings import RunSettings

if TYPE_CHECKING:
    from ds_finepage.whatif import PlannedModel

logger = logging.getLogger(__name__)

__all__ = ["attach", "capture", "check", "plan", "plan_model", "simulate"]

PROBE_SCRATCH_BYTES = 64 << 20


def capture(model: str, *, phase: str, batch: int, seq: int, hardware: str) -> TaskGraph:
    """Capture a pass of a model from its config, without weights.

    Args:
        model: A shipped name, a directory or a transformers config.json.
        phase: "prefill" or "decode".
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass.
        hardware: A shipped profile's name, or the path of one; it decides the dtype.

    Raises:
        ConfigError: An argument cannot be used.
        CaptureError: The model's forward cannot be captured.
    """
    from ds_finepage import whatif  # it imports transformers, which attach() does not need

    profile = load_profile(hardware)
    return whatif.capture_model(model, phase=phase, batch=batch, seq=seq, profile=profile).graph


def plan(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    policy: str = "finepage",
    alignment: int = 512,
    profile: HardwareProfile,
    split: bool = False,
) -> tuple[MemGraph, Timeline]:
    """Plan a pass that repeats, check the plan, and predict its time.

    Args:
        graph: A captured pass.
        arena_bytes: Device bytes for weights and activations.
        policy: A name in ``ds_finepage.planning.policies``.
        alignment: Alignment of extents, in bytes.
        profile: Rates of the machine that runs the plan.
        split: Let the policy cut weights, if it can; the plan then has its own taskgraph.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: Some task needs more than ``arena_bytes`` at once.
    """
    settings = PlanSettings(policy=policy, split=split, alignment=alignment, profile=profile)
    planned = plan_checked(graph, arena_bytes, settings)
    return planned.memgraph, planned.timeline


def plan_model(
    model: str,
    *,
    phase: str,
    batch: int,
    seq: int,
    device_budget: str | int,
    hardware: str,
    policy: str = "finepage",
    split: bool = True,
    host_memory_bytes: int | None = None,
    weights: str | None = None,
    weights_group: int = GROUP,
    num_ranks: int = 1,
    kv_cache: str = "auto",
) -> PlannedModel:
    """Capture, plan, check and simulate a pass of a model on a machine, with all figures.

    Args:
        model: A shipped name, a directory or a transformers config.json.
        phase: "prefill" or "decode".
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass.
        device_budget: The limit on all device bytes, as in a ds_config.
        hardware: A shipped profile's name, or the path of one.
        policy: A name in ``ds_finepage.planning.policies``.
        split: Let the policy cut weights where it can.
        host_memory_bytes: The machine's host memory; None if that is not known.
        weights: "bf16", "int8" or "int4"; by default they are as the config says. A budget that is
            a share of the weights is one of the packed weights.
        weights_group: Numbers that share a scale in a packed form.
        num_ranks: Ranks that the model is cut over; the budget and the figures are those of one.
        kv_cache: Where the KV cache is, as in a ds_config: "auto", "device" or "host".

    Raises:
        ConfigError: An argument cannot be used.
        CaptureError: The model's forward cannot be captured.
        PlanInfeasibleError: Some task needs more than the budget, or the plan more host memory.
    """
    from ds_finepage import whatif  # it imports transformers, which attach() does not need

    policy_named(policy)  # refuses an unknown one
    budget = DeviceBudget.parse(device_budget, name="--device-budget")
    profile = load_profile(hardware)
    shape: dict[str, Any] = {"phase": phase, "batch": batch, "seq": seq}
    form: dict[str, Any] = {"weights": weights, "weights_group": weights_group}
    captured = whatif.capture_model(model, **shape, profile=profile, **form, num_ranks=num_ranks)
    budget_bytes = budget_on(budget, captured.graph.weight_bytes, profile)
    return whatif.plan_captured(
        captured,
        budget_bytes=budget_bytes,
        profile=profile,
        policy=policy,
        split=split,
        host_memory_bytes=host_memory_bytes,
        kv_cache=kv_cache,
    )


def attach(
    module: torch.nn.Module,
    config: FinepageConfig | Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    profile: HardwareProfile | None = None,
    take: TakeWeights = weights_of,
    around_call: AroundCall = nullcontext,
    ranks: Ranks = ONE_RANK,
    draft: torch.nn.Module | str | None = None,
    **settings: Any,
) -> Handle:
    """Run the forward passes of a module by plan, under a device budget, from now on.

    With ``weights="int8"`` or ``"int4"`` linear layers and experts are packed first, in place, and
    stay so.
    Results are then those of the quantised model.

    Args:
        module: Any ``torch.nn.Module``; its weights become host masters.
        config: The ``finepage`` section.
        device: Where to compute; by default the accelerator, if plans can run on it.
        profile: Rates to plan with; by default they are measured now.
        take: Makes the host masters of weights; DeepSpeed's are there already.
        around_call: Makes a context that holds while the module runs.
        ranks: Runs each pass together with the other ranks of a model that they share.
        draft: A model that drafts tokens under the same budget, or as in the section.
        **settings: Keys of the section, one by one.

    Returns:
        The handle: counters, plans, hooks, ``detach()``.

    Raises:
        ConfigError: It is no module, or has weights in TorchScript; a setting, a budget or the
            device cannot be used, or the model cannot be packed.
        StoreError: A parameter has no data, or is a subclass that cannot be taken apart.
        DeviceMemoryError: The device has no room for the budget; the module is as it was or packed.
    """
    _require_module(module)
    config = _settled(config, settings if draft is None else {**settings, "draft": draft})
    where = default_device() if device is None else require_device(device)
    _pack(module, config, where)
    with ExitStack() as undo:
        apart, weights, buffers = _taken(module, take, where, undo)
        budget_bytes = _budget_on(config, weights.nbytes, where, ranks)
        try:
            chosen = _run_settings(module, config, where, budget_bytes, weights, profile, ranks)
            if config.draft != "off":
                weights.install()  # ZeRO's parameters have no data, but show their masters then
                undo.callback(weights.restore)
            drafted = _draft_of(module, draft, chosen, ranks)
            given: dict[str, Any] = {"take": take, "around_call": around_call, "ranks": ranks}
            handle = Handle(module, weights, chosen, apart=apart, buffers=buffers, **given)
            undo.callback(handle.detach)
            handle.take_draft(drafted)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError.of(error, where, budget_bytes) from error
        undo.pop_all()
        return handle


def _require_module(module: object) -> None:
    """Refuse what has no weights that can be paged."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"attach: {type(module).__name__} is no torch.nn.Module. Give it the model itself."
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
            raise ConfigError(
                f"attach: module {name or type(module).__name__} is TorchScript, and its weights "
                f"cannot be paged. Give the model without torch.jit."
            )


def _settled(config: object, settings: Mapping[str, Any]) -> FinepageConfig:
    """Return the section with the settings that were given one by one."""
    given = {} if config is None else config
    settings = {n: v for n, v in settings.items() if not isinstance(v, torch.nn.Module)}
    if isinstance(given, FinepageConfig):
        given = dict(given)
    if isinstance(given, Mapping):
        given = {**given, **settings}
    found = FinepageConfig.from_dict(given, policies=POLICIES)
    if found.kv_cache == "host" and not policy_named(found.policy).pages:
        logger.warning(
            "finepage.kv_cache has no effect: policy %s keeps the KV cache on the device",
            found.policy,
        )
    return found


def _budget_on(config: FinepageConfig, weight_bytes: int, where: torch.device, ranks: Ranks) -> int:
    """Turn ``device_budget`` into bytes: the least of all ranks if they run one plan."""
    is_auto = config.device_budget.is_auto
    margin_bytes = context_margin_bytes(where) if is_auto else 0
    free_bytes, device_bytes = device_of(where).memory_info()
    budget_bytes = config.device_budget.resolve(
        weight_bytes=weight_bytes,
        device_bytes=device_bytes,
        margin_bytes=margin_bytes,
        free_bytes=free_bytes,
    )
    if not ranks.collects_weights:
        return budget_bytes
    return min(row[0] for row in ranks.of_all((budget_bytes,)))


def _host_budget_of(config: FinepageConfig, weights: WeightTable) -> int:
    """Turn ``host_budget`` into bytes; refuse one that is too small for the weights.

    Weights that lie in files stay there if the budget has no room for all of them.
    """
    free_bytes, all_bytes = host_memory()
    need, files = weights.host_bytes, weights.files
    found = config.host_budget.resolve(held_bytes=need, free_bytes=free_bytes, all_bytes=all_bytes)
    if need - files.host_bytes + files.nbytes <= found:
        weights.forget_files()
    elif need > found:
        kinds = "the weights that lie in no file" if files.sources else "the weights"
        raise ConfigError(
            f"{kinds} take {need} bytes of host memory; host_budget is {found} bytes. "
            f"Raise finepage.host_budget to >= {need}, or pack them (finepage.weights)."
        )
    else:
        files.read_ahead(min(found // AHEAD_SHARE, found - need))
    return found


def _taken(
    module: torch.nn.Module, take: TakeWeights, where: torch.device, undo: ExitStack
) -> tuple[TakenApart, WeightTable, LargeBuffers]:
    """Take the weights of a module; ``undo`` puts those together that are taken apart."""
    apart = TakenApart(module)
    undo.callback(apart.restore)
    parameters = take(dict(module.named_parameters()), where)
    buffers = LargeBuffers(module, where)
    large = take(buffers.find(weight.master for weight in parameters), where)
    return apart, WeightTable([*parameters, *large], where), buffers


def _draft_of(
    module: torch.nn.Module,
    given: torch.nn.Module | str | None,
    settings: RunSettings,
    ranks: Ranks,
) -> Draft | None:
    """Make the draft that the user names; None without one, or where "auto" finds none."""
    config, budget_bytes = settings.config, settings.budget_bytes
    if not isinstance(given, torch.nn.Module) and config.draft == "off":
        return None
    if ranks.share_model:
        raise ConfigError(
            "draft: several ranks share the model, and a draft has one. Leave out finepage.draft."
        )
    if isinstance(given, torch.nn.Module):
        return Draft(given)
    if config.draft in (STAND_IN, "auto"):
        form = PackedForm.parse(STAND_IN_FORM, config.weights_group, config.weights_dir)
        # A product in registers takes a fifth of the time, and may differ from what it stands for.
        form = replace(form, fused=why_not(settings.device) is None)
        if config.draft == "auto":
            from ds_finepage.drafted import wins  # it imports transformers

            if not wins(module, budget_bytes, settings.profile, form):
                logger.warning("a stand-in is not predicted to gain a tenth; there is no draft")
                return None
        return Draft(stand_in_of(module, budget_bytes, form), stands_for=module)
    from transformers import AutoModelForCausalLM

    try:
        found = AutoModelForCausalLM.from_pretrained(config.draft, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"finepage.draft: {config.draft!r} cannot be loaded: {error}") from None
    if not all(parameter.numel() for parameter in found.parameters()):
        raise ConfigError(
            f"finepage.draft: {config.draft!r} was loaded in parts, as HfDeepSpeedConfig asks. "
            f"Load it before that is made, and name it in generate(assistant_model=...)."
        )
    return Draft(found.eval())


def _pack(module: torch.nn.Module, config: FinepageConfig, where: torch.device) -> None:
    """Pack a model if it is to be packed, and choose how its packed products unpack."""
    if config.weights is not None:
        form = PackedForm.parse(config.weights, config.weights_group, config.weights_dir)
        pack_model(module, form)
        logger.warning(
            "linear layers and experts of %s are packed as %s in groups of %d: results are those "
            "of the quantised model",
            type(module).__name__,
            form.name,
            form.group,
        )
    reason = None
    if config.fused_unpacking:
        reason = why_not(where) if is_packed(module) else "no layer is packed"
        if reason is not None:
            logger.warning("finepage.fused_unpacking has no effect: %s", reason)
    set_fused(module, config.fused_unpacking and reason is None)


def _why_no_host(
    module: torch.nn.Module, config: FinepageConfig, weights: WeightTable, ranks: Ranks
) -> str | None:
    """Return why the host computes no products; None if it may."""
    if config.host_compute == "off":
        return "it is off"
    if not policy_named(config.policy).is_cyclic:
        return f"policy {config.policy} computes everything on the device"
    if ranks.share_model:
        return "several ranks share the model"
    if weights.files.sources:
        return "weights lie in files, because host_budget has no room for them"
    return why_no_kernels(is_packed(module))


def why_no_kernels(packed: bool) -> str | None:
    """Return why the host has no kernels, for weights that are packed or not; None if it has."""
    why = host_attention.why_not() or (native.why_not() if packed else None)
    return None if why is None else f"its kernels are C, and this machine compiles none: {why}"


def _run_settings(
    module: torch.nn.Module,
    config: FinepageConfig,
    where: torch.device,
    budget_bytes: int,
    weights: WeightTable,
    profile: HardwareProfile | None,
    ranks: Ranks,
) -> RunSettings:
    """Return everything that the user decides, with the rates to plan with."""
    if config.device_graphs and not device_of(where).has_graphs:
        logger.warning("finepage.device_graphs has no effect: %s has no graphs", where)
    host_budget_bytes = _host_budget_of(config, weights)
    scratch_bytes = min(PROBE_SCRATCH_BYTES, budget_bytes // 2)
    rates = profile or probe(where, scratch_bytes=scratch_bytes)
    if (why := _why_no_host(module, config, weights, ranks)) is not None:
        if config.host_compute != "off":
            logger.warning("finepage.host_compute has no effect: %s", why)
        rates = rates.without_host
    elif not rates.has_host:
        rates = with_measured_host(rates, where, scratch_bytes=scratch_bytes)
    return RunSettings(
        config=config,
        device=where,
        budget_bytes=budget_bytes,
        profile=ranks.with_link(rates, where, scratch_bytes),
        may_cut=not ranks.collects_weights,
        host_budget_bytes=host_budget_bytes,
    )
