"""The one tree of errors that ds_finepage raises.

Every message names the problem, the place, both numbers and the fix. The class holds the exit
status of the command line.
"""

from __future__ import annotations


class FinepageError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_status = 1


class ConfigError(FinepageError, ValueError):
    """A setting, an argument or a file of the user cannot be used."""

    exit_status = 2


class CaptureError(FinepageError):
    """A call cannot be captured as a taskgraph.

    Attributes:
        weights: Names of weights that an op reads and may change without saying so.
    """

    def __init__(self, message: str, weights: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.weights = weights


class PlanInfeasibleError(FinepageError):
    """No plan exists under the given budget.

    Attributes:
        min_budget_bytes: A budget under which a plan exists; None if that is not known.
    """

    exit_status = 2

    def __init__(self, message: str, min_budget_bytes: int | None = None) -> None:
        super().__init__(message)
        self.min_budget_bytes = min_budget_bytes

    def bare(self) -> PlanInfeasibleError:
        """Return the error without its frames, which keep tensors alive."""
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)

    def of_one_step(self) -> PlanInfeasibleError:
        """Return the error of one step of a call, without its frames."""
        text = f"{self} Other steps of the call may need more."
        return PlanInfeasibleError(text, self.min_budget_bytes)


class InvalidPlanError(FinepageError):
    """A memgraph breaks an invariant, or its file is of another version."""


class TaskMismatchError(FinepageError):
    """The executed call is not the planned one."""


class StoreError(FinepageError):
    """A host master is missing, or has another shape or dtype than the captured weight."""


class RankError(FinepageError):
    """Another rank failed, is gone, or does something else than this one."""


def reason_of(error: BaseException) -> str:
    """Return an error in one line; only our own errors go without their class."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, FinepageError) else f"{type(error).__name__}: {first}"
