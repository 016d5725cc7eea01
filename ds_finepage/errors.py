"""The one tree of errors that ds_finepage raises.

Every message says what, where, both numbers and the fix. The command line's exit status is a
property of the class, so that it is decided in one place.
"""

from __future__ import annotations


class FinepageError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_status = 1


class ConfigError(FinepageError, ValueError):
    """A setting, an argument or a file that the user gave cannot be used."""

    exit_status = 2


class CaptureError(FinepageError):
    """A call cannot be written down as a taskgraph."""


class PlanInfeasibleError(FinepageError):
    """No plan exists under the given budget.

    Attributes:
        min_budget_bytes: A budget under which there is one; None where that is not known.
    """

    exit_status = 2

    def __init__(self, message: str, min_budget_bytes: int | None = None) -> None:
        """Say what has no room, and what it would need."""
        super().__init__(message)
        self.min_budget_bytes = min_budget_bytes

    def bare(self) -> PlanInfeasibleError:
        """Return the error without its frames, which hold tensors as long as it is there."""
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)

    def of_whole_call(self, min_budget_bytes: int) -> PlanInfeasibleError:
        """Return the error with the least budget of the whole call instead of that of one step."""
        text, of_step = str(self), self.min_budget_bytes
        text = text.replace(
            f"which makes min_budget_bytes {of_step};",
            f"and the call has other steps, which makes min_budget_bytes {min_budget_bytes};",
        )
        text = text.replace(
            f"device_budget to >= {of_step} ", f"device_budget to >= {min_budget_bytes} "
        )
        return PlanInfeasibleError(text, min_budget_bytes)


class InvalidPlanError(FinepageError):
    """A memgraph breaks an invariant, or belongs to another model or version."""


class TaskMismatchError(FinepageError):
    """What is executed is not what was planned."""


class BudgetExceededError(FinepageError):
    """More device bytes are live than the budget allows."""


class StoreError(FinepageError):
    """A host master copy is missing or does not fit what was captured."""
