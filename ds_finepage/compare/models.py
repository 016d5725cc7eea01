"""Models each arm before it runs: its settings, times and bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_finepage.compare.arms import Arm
from ds_finepage.compare.modelling import Modeller
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.planning.policies import POLICIES
from ds_finepage.reporting.results import PhaseFigures
from ds_finepage.units import format_bytes

AMPLE = "1000000%weights"
"""A budget under which everything can be modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """The answers of the simulator for one arm with one batch.

    Attributes:
        settings: Keys of ``zero_optimization`` to run the arm with.
        prefill: Modelled figures of a prefill.
        decode: Modelled figures of a steady decode step.
        refusal: Why the arm cannot hold the budget; its figures are then without one.
        can_run: False if no settings of the arm hold the budget.
    """

    settings: dict[str, int]
    prefill: PhaseFigures = field(default_factory=PhaseFigures)
    decode: PhaseFigures = field(default_factory=PhaseFigures)
    refusal: PlanInfeasibleError | None = None
    can_run: bool = True


class Models:
    """Models the arms of one batch.

    Attributes:
        budget_bytes: The limit on all device bytes.
        weight_bytes: Bytes of all weights.
    """

    def __init__(self, make: Callable[[str], Any], device_budget: str) -> None:
        """Capture the passes.

        Args:
            make: Makes a :class:`Modeller` of the model for a device budget.
            device_budget: As in a ds_config.
        """
        self._make = make
        self._within: Modeller = make(device_budget)
        self._ample: Modeller | None = None
        self.budget_bytes = self._within.budget_bytes
        self.weight_bytes = self._within.weight_bytes

    def of(self, arm: Arm) -> Modelled:
        """Model an arm under the budget; one that cannot hold it, without a budget."""
        if arm.policy and arm.policy not in POLICIES:
            return Modelled(settings={})
        refusal: PlanInfeasibleError | None = None
        try:
            settings = self._within.settings(arm.policy)
        except PlanInfeasibleError as error:
            return Modelled(settings={}, refusal=error.bare(), can_run=False)
        try:
            prefill, decode = self._within.figures(arm.policy, settings)
        except PlanInfeasibleError as error:
            refusal = error.bare()
            self._ample = self._ample or self._make(AMPLE)
            try:
                prefill, decode = self._ample.figures(arm.policy, settings)
            except PlanInfeasibleError:
                return Modelled(settings=settings, refusal=refusal)
        return Modelled(prefill=prefill, decode=decode, settings=settings, refusal=refusal)


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
