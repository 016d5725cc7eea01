"""Models each arm before it runs: its settings, times and bounds.

[Note: a model that the simulator cannot capture]
Engines that need no plan run it all the same, with settings that follow from its shapes. Their
modelled figures stay empty, and a note says why. Only an arm whose settings are searched by the
simulator has none to run with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_finepage.capture.shards import cut_model
from ds_finepage.compare.arms import Arm
from ds_finepage.compare.loading import shapes_of
from ds_finepage.compare.modelling import Modeller
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import CaptureError, PlanInfeasibleError, reason_of
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.baselines.zero import ZeroSettings
from ds_finepage.planning.budget import budget_on
from ds_finepage.planning.policies import POLICIES
from ds_finepage.reporting.results import CompareSettings, PhaseFigures
from ds_finepage.units import format_bytes

AMPLE = "1000000%weights"
"""A budget under which everything can be modelled."""

NOT_MODELLED = "not modelled"
WHOLE_ON_ONE = f"{NOT_MODELLED}, for it runs whole on one rank, to have its tokens"
NOT_SEARCHED = "the simulator, which searches its settings, cannot capture the model"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The sizes of a model as far as they follow from its shapes.

    Attributes:
        weight_bytes: Bytes of all weights.
        budget_bytes: The limit on all device bytes.
    """

    weight_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """The answers of the simulator for one arm with one batch.

    Attributes:
        settings: Keys of ``zero_optimization`` to run the arm with. A device map has none: its arm
            finds the number of modules, and on an accelerator tries it.
        prefill: Modelled figures of a prefill.
        decode: Modelled figures of a steady decode step.
        refusal: Why the arm cannot hold the budget; its figures are then without one.
        can_run: False if no settings of the arm hold the budget, or none are known.
        why_not: Why there are no figures; None if there are, or if no policy models the arm.
    """

    settings: dict[str, int]
    prefill: PhaseFigures = field(default_factory=PhaseFigures)
    decode: PhaseFigures = field(default_factory=PhaseFigures)
    refusal: PlanInfeasibleError | None = None
    can_run: bool = True
    why_not: str | None = None


def outline_of(folder: Path, settings: CompareSettings) -> Outline:
    """Return the sizes of a model, or of a rank's shard, by its shapes; nothing is captured.

    Args:
        folder: The folder of the checkpoint.
        settings: The decisions of the user.

    Raises:
        ConfigError: The model or the budget cannot be used.
    """
    model = shapes_of(folder, json.loads(settings.ds_config))
    if settings.num_ranks > 1:
        cut_model(model, num_ranks=settings.num_ranks)
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    budget = DeviceBudget.parse(settings.device_budget, name="device_budget")
    return Outline(
        weight_bytes=weight_bytes,
        budget_bytes=budget_on(budget, weight_bytes, load_profile(settings.hardware)),
    )


class Models:
    """Models the arms of one batch.

    Attributes:
        budget_bytes: The limit on all device bytes.
        weight_bytes: Bytes of all weights.
        why_not: Why no arm can be modelled; None if the passes were captured.
    """

    def __init__(
        self, make: Callable[[str], Any], device_budget: str, outline: Callable[[], Outline]
    ) -> None:
        """Capture the passes.

        Args:
            make: Makes a :class:`Modeller` of the model for a device budget.
            device_budget: As in a ds_config.
            outline: Returns the sizes of a model that cannot be captured.

        Raises:
            ConfigError: The model or a setting cannot be used.
        """
        self._make = make
        self._within: Modeller | None = None
        self._ample: Modeller | None = None
        self.why_not: str | None = None
        sizes: Modeller | Outline
        try:
            sizes = self._within = make(device_budget)
        except CaptureError as error:
            self.why_not = f"{NOT_MODELLED}, for the simulator cannot capture the model: {error}"
            sizes = outline()
        self.budget_bytes, self.weight_bytes = sizes.budget_bytes, sizes.weight_bytes

    def of(self, arm: Arm) -> Modelled:
        """Model an arm under the budget; one that cannot hold it, without a budget."""
        if self._within is None:
            return self._unmodelled(arm)
        if arm.policy and arm.policy not in POLICIES:
            return Modelled(settings={})
        settings: dict[str, int] | None = None
        try:
            settings = self._within.settings(arm.policy)
            found = self._modelled(arm, self._within, settings)
            return found if _is_zero(arm) else replace(found, settings={})
        except PlanInfeasibleError as error:
            return Modelled(settings={}, refusal=error.bare(), can_run=False)
        except Exception as error:  # a fault of one policy must not end the other arms
            _log.warning("cannot model %s", arm.name, exc_info=True)
            why_not = f"{NOT_MODELLED}: {reason_of(error)}"
            return Modelled(
                settings=(settings or {}) if _is_zero(arm) else {},
                can_run=settings is not None,
                why_not=why_not,
            )

    def _unmodelled(self, arm: Arm) -> Modelled:
        """Return settings; see [Note: a model that the simulator cannot capture]."""
        if not _is_zero(arm):
            return Modelled(settings={}, why_not=self.why_not)
        if arm.policy != "zero":
            return Modelled(settings={}, can_run=False, why_not=NOT_SEARCHED)
        return Modelled(settings=ZeroSettings().keys, why_not=self.why_not)

    def _modelled(self, arm: Arm, within: Modeller, settings: dict[str, int]) -> Modelled:
        refusal: PlanInfeasibleError | None = None
        try:
            prefill, decode = within.figures(arm.policy, settings)
        except PlanInfeasibleError as error:
            refusal = error.bare()
            self._ample = self._ample or self._make(AMPLE)
            try:
                prefill, decode = self._ample.figures(arm.policy, settings)
            except PlanInfeasibleError:
                return Modelled(settings=settings, refusal=refusal)
        return Modelled(prefill=prefill, decode=decode, settings=settings, refusal=refusal)


def _is_zero(arm: Arm) -> bool:
    return arm.policy in POLICIES and POLICIES[arm.policy].is_zero


def require_some_arm(
    modelled: Sequence[tuple[Arm, Modelled]], *, budget_bytes: int, batch: int
) -> None:
    """Refuse a budget that is below the least one of every arm.

    Args:
        modelled: All arms of one batch.
        budget_bytes: The limit on all device bytes.
        batch: Sequences in the batch.

    Raises:
        PlanInfeasibleError: Names the least budget that any arm can hold, where that is known.
    """
    limited = [(arm, found) for arm, found in modelled if arm.policy]
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
