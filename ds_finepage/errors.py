"""The one tree of errors that ds_finepage raises (floor 0).

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
    """No plan exists under the given budget."""

    exit_status = 2


class InvalidPlanError(FinepageError):
    """A memgraph breaks an invariant, or belongs to another model or version."""


class TaskMismatchError(FinepageError):
    """What is executed is not what was planned."""


class BudgetExceededError(FinepageError):
    """More device bytes are live than the budget allows."""


class StoreError(FinepageError):
    """A host master copy is missing or does not fit what was captured."""
