"""The arm whose model checks the tokens of a stand-in, several in a pass."""

from __future__ import annotations

from typing import Any

from ds_finepage.api import attach
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.loading import load_unpacked
from ds_finepage.config import SECTION
from ds_finepage.errors import ConfigError
from ds_finepage.execution.device import require_device
from ds_finepage.integrations.deepspeed.engine import handle_of
from ds_finepage.runtime.drafts import STAND_IN
from ds_finepage.runtime.handle import handle_in


class DraftedEngine(Engine):
    """A model that runs by plan and has a draft, without DeepSpeed."""

    drafts = True

    def __init__(self, request: RunRequest) -> None:
        """Load the model."""
        super().__init__(load_unpacked(request), require_device(request.device))
        self.settings.update(draft=STAND_IN, device_budget=request.budget_bytes)
        self._section: dict[str, Any] = {
            **request.ds_config.get(SECTION, {}),
            "report": None,
            **self.settings,
        }

    def place(self) -> None:
        """Attach the model."""
        attach(self.model, self._section, device=self.device)

    def copied(self) -> tuple[int, int]:
        """Return the bytes that the runtime has copied."""
        stats = handle_of(self.model).stats
        return stats.reloaded_bytes, stats.offloaded_bytes

    def close(self) -> None:
        """Detach."""
        found = handle_in(self.model)
        if found is not None:
            found.detach()


def load(request: RunRequest) -> DraftedEngine:
    """Load the model.

    Raises:
        ConfigError: transformers cannot assist the batch.
    """
    if request.batch != 1:
        raise ConfigError(f"transformers assists one sequence, and the batch has {request.batch}")
    return DraftedEngine(request)
