"""The program on one screen: capture -> plan -> check -> simulate -> attach.

    ds_config --> FinepageConfig
    model.forward --capture--> TaskGraph --plan--> MemGraph --check--> MemGraph --execute--> outputs
                                                      |
                               HardwareProfile --> simulate --> Timeline

``attach`` puts all of it to work on a model; the functions before it are the same arrows by hand.
``plan_model`` goes as far as the predicted timeline for a model and a machine that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_finepage.checker.checker import check
from ds_finepage.config import BudgetKind, DeviceBudget, FinepageConfig
from ds_finepage.execution.disk_cache import open_plan_folder
from ds_finepage.execution.masters import weights_of
from ds_finepage.execution.probe import context_margin_bytes, device_bytes, free_bytes, probe
from ds_finepage.execution.stores import TakeWeights, WeightTable
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.planning.policies import RUNNABLE, plan_steady
from ds_finepage.planning.simulator import simulate
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.plan_cache import plan_folder

if TYPE_CHECKING:
    from ds_finepage.whatif import PlannedModel

PROBE_SCRATCH_BYTES = 16 << 20


def plan(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    policy: str = "finepage",
    alignment: int = 512,
    profile: HardwareProfile,
    split: bool = False,
) -> tuple[MemGraph, Timeline]:
    """Plan the pass that comes again and again, check the plan, and predict its time.

    Args:
        graph: A captured pass.
        arena_bytes: Device bytes for weights and activations.
        policy: A name in ``ds_finepage.planning.policies.POLICIES``.
        alignment: Of extents, in bytes.
        profile: Rates of the machine it will run on.
        split: Let the policy cut weights, if it can; the plan's taskgraph is then another one.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: Some task needs more than ``arena_bytes`` at once.
    """
    memgraph = check(
        plan_steady(
            graph,
            arena_bytes=arena_bytes,
            policy=policy,
            alignment=alignment,
            profile=profile,
            split=split,
        )
    )
    return memgraph, simulate(memgraph, profile)


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
) -> PlannedModel:
    """Plan a pass of a model for a machine, without GPU and without weights.

    Args:
        model: A shipped name, a directory or a transformers config.json.
        phase: "prefill" or "decode".
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass.
        device_budget: The limit on all device bytes, as a ds_config has it.
        hardware: A shipped profile's name, or the path of one.
        policy: A name in ``ds_finepage.planning.policies.POLICIES``.
        split: Let the policy cut weights where it can.

    Raises:
        ConfigError: An argument cannot be used.
        CaptureError: The model's forward cannot be written down.
        PlanInfeasibleError: Some task needs more than the budget.
    """
    from ds_finepage import whatif as forecast  # transformers, which attach() can do without

    forecast.require_policy(policy)
    budget = DeviceBudget.parse(device_budget, name="--device-budget")
    profile = load_profile(hardware)
    captured = forecast.capture_model(model, phase=phase, batch=batch, seq=seq, profile=profile)
    budget_bytes = forecast.budget_on(budget, captured.graph.weight_bytes, profile)
    return forecast.plan_captured(
        captured, budget_bytes=budget_bytes, profile=profile, policy=policy, split=split
    )


def attach(
    module: torch.nn.Module,
    config: FinepageConfig | Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    profile: HardwareProfile | None = None,
    take: TakeWeights = weights_of,
    **settings: Any,
) -> Handle:
    """Run a module's forward passes by plan, under a device budget, from now on.

    Args:
        module: Any ``torch.nn.Module``; its parameters become host masters.
        config: The ``finepage`` section.
        device: Where to compute; by default CUDA where there is one.
        profile: Rates to plan with; by default they are measured, in a moment.
        take: Makes the host masters of parameters; DeepSpeed has made them already.
        **settings: Keys of the section, one by one.

    Returns:
        The handle: counters, plans, hooks, ``detach()``.

    Raises:
        ConfigError: A setting cannot be used, or the budget is above the device.
        StoreError: A parameter has no data.
    """
    if not isinstance(config, FinepageConfig):
        config = FinepageConfig.from_dict({**(config or {}), **settings}, policies=RUNNABLE)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan_dir = plan_folder(config.plan_dir) if config.plan_dir else open_plan_folder(where)
    table = WeightTable(take(dict(module.named_parameters()), where), where)
    budget = resolve_budget(config, table.nbytes, where)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(where)
    scratch = min(PROBE_SCRATCH_BYTES, budget // 2)
    return Handle(
        module,
        table,
        device=where,
        budget_bytes=budget,
        policy=config.policy,
        split=config.split,
        debug=config.debug,
        profile=profile or probe(where, scratch_bytes=scratch),
        plan_dir=plan_dir,
        take=take,
    )


def resolve_budget(config: FinepageConfig, weight_bytes: int, device: torch.device) -> int:
    """Turn ``device_budget`` into bytes on this device."""
    is_auto = config.device_budget.kind is BudgetKind.AUTO
    return config.device_budget.resolve(
        weight_bytes=weight_bytes,
        device_bytes=device_bytes(device),
        margin_bytes=context_margin_bytes(device) if is_auto else 0,
        free_bytes=free_bytes(device) if is_auto else 0,
    )
