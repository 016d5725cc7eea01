"""Op-granular offload and reload for LLM inference on a GPU that is too small.

Importing this package installs the DeepSpeed seam (now if DeepSpeed is loaded already, else at the
moment it is), so that a ds_config with ``"finepage": {"enabled": true}`` takes effect. Nothing else
changes, and nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_finepage.errors import (
    CaptureError,
    ConfigError,
    FinepageError,
    InvalidPlanError,
    PlanInfeasibleError,
    RankError,
    StoreError,
    TaskMismatchError,
)
from ds_finepage.integrations.deepspeed.install import install

if TYPE_CHECKING:
    from ds_finepage.api import attach, plan
    from ds_finepage.execution.device import DeviceMemoryError
    from ds_finepage.integrations.deepspeed.engine import (
        assert_active,
        best_batch,
        handle_of,
        stats,
    )
    from ds_finepage.runtime.handle import Handle

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ConfigError",
    "DeviceMemoryError",
    "FinepageError",
    "Handle",
    "InvalidPlanError",
    "PlanInfeasibleError",
    "RankError",
    "StoreError",
    "TaskMismatchError",
    "assert_active",
    "attach",
    "best_batch",
    "handle_of",
    "plan",
    "stats",
]

_LAZY = {
    "DeviceMemoryError": "ds_finepage.execution.device",
    "Handle": "ds_finepage.runtime.handle",
    "attach": "ds_finepage.api",
    "plan": "ds_finepage.api",
    "assert_active": "ds_finepage.integrations.deepspeed.engine",
    "best_batch": "ds_finepage.integrations.deepspeed.engine",
    "handle_of": "ds_finepage.integrations.deepspeed.engine",
    "stats": "ds_finepage.integrations.deepspeed.engine",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


install()
