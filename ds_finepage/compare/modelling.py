"""Models each arm before it runs: its settings, times and bounds on the machine of a profile.

A comparison on the CPU shows them beside counted bytes, since a fetch of stock ZeRO-Inference
copies nothing there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_finepage.capture.models import default_dtype, load_model_config
from ds_finepage.compare.arms import Arm
from ds_finepage.compare.loading import dtype_of
from ds_finepage.config import SECTION
from ds_finepage.errors import PlanInfeasibleError, reason_of
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.profiles import load_profile
from ds_finepage.modeller import Modeller
from ds_finepage.reporting.results import CompareSettings, PhaseFigures
from ds_finepage.units import format_bytes

AMPLE = "1000000%weights"
"""A budget under which everything can be modelled."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """The answers of the simulator for one arm with one batch.

    Attributes:
        settings: What to run the arm with: keys of ``zero_optimization``, or the modules of a
            device map that stay on the device.
        prefill: Modelled figures of a prefill.
        decode: Modelled figures of a steady decode step.
        refusal: Why the arm cannot hold the budget; its figures are then without one.
        can_run: False if no settings of the arm hold the budget, or none are known.
        why_not: Why there are no figures; None if there are, or if no policy models the arm.
    """

    settings: dict[str, int] = field(default_factory=dict)
    prefill: PhaseFigures = field(default_factory=PhaseFigures)
    decode: PhaseFigures = field(default_factory=PhaseFigures)
    refusal: PlanInfeasibleError | None = None
    can_run: bool = True
    why_not: str | None = None


def model_arm(arm: Arm, modeller: Any) -> Modelled:
    """Model an arm under the budget; one that cannot hold it, without a budget.

    Args:
        arm: The arm.
        modeller: A :class:`Modeller` of the batch under the budget.
    """
    settings: dict[str, int] | None = None
    refusal: PlanInfeasibleError | None = None
    try:
        engine = modeller.engine(arm.policy)
        settings = {} if engine is None else engine.keys
        prefill, decode = modeller.figures(arm.policy, engine)
    except PlanInfeasibleError as error:
        refusal = error.bare()
        if settings is None:
            return Modelled(refusal=refusal, can_run=False)
        try:
            prefill, decode = modeller.at(AMPLE).figures(arm.policy, engine)
        except PlanInfeasibleError:
            return Modelled(settings=settings, refusal=refusal)
    except Exception as error:  # a fault of one policy must not end the other arms
        _log.warning("cannot model %s", arm.name, exc_info=True)
        why_not = f"not modelled: {reason_of(error)}"
        return Modelled(settings=settings or {}, can_run=settings is not None, why_not=why_not)
    return Modelled(prefill=prefill, decode=decode, settings=settings, refusal=refusal)


def require_some_arm(modelled: Mapping[Arm, Modelled], *, budget_bytes: int, batch: int) -> None:
    """Refuse a budget that is below the least one of every arm.

    Args:
        modelled: All arms of one batch.
        budget_bytes: The limit on all device bytes.
        batch: Sequences in the batch.

    Raises:
        PlanInfeasibleError: Names the least budget that any arm can hold, where that is known.
    """
    limited = [(arm, found) for arm, found in modelled.items() if arm.policy]
    if not limited or any(found.refusal is None for _, found in limited):
        return
    known = [
        (found.refusal.min_budget_bytes, arm.name)
        for arm, found in limited
        if found.refusal is not None and found.refusal.min_budget_bytes
    ]
    least, name = min(known, default=(None, ""))
    hint = f"{name} needs {format_bytes(least)} ({least} bytes). " if least else ""
    raise PlanInfeasibleError(
        f"with batch {batch} no arm can hold the device budget of {format_bytes(budget_bytes)} "
        f"({budget_bytes} bytes). {hint}Raise --device-budget, or lower --batch or --prompt.",
        least,
    )


def modeller_of(folder: Path, settings: CompareSettings, batch: int) -> Modeller:
    """Capture the passes of a comparison.

    Args:
        folder: The folder of the checkpoint.
        settings: The user's decisions.
        batch: Sequences in the batch.

    Raises:
        ConfigError: The model or a setting cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    ds_config = json.loads(settings.ds_config)
    section = ds_config.get(SECTION, {})
    config = load_model_config(str(folder))
    # The dtype that runs is modelled, or the fast one of the same size.
    config.dtype = dtype_of(ds_config)
    return Modeller(
        str(folder),
        batch=batch,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        device_budget=settings.device_budget,
        hardware=settings.hardware,
        dtype=default_dtype(config, load_profile(settings.hardware)),
        split=bool(section.get("split")),
        weights=section.get("weights"),
        weights_group=section.get("weights_group", GROUP),
        num_ranks=settings.num_ranks,
    )
