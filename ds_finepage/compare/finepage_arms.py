"""The arms that run by plan under DeepSpeed: each with a policy of its own, or with a draft."""

from __future__ import annotations

from collections.abc import Sequence

from ds_finepage.compare.arms import ARMS, DRAFTED, OURS
from ds_finepage.compare.engine import RunRequest
from ds_finepage.compare.zero_arms import (
    DeepSpeedEngine,
    deepspeed_device,
    load_under_deepspeed,
)
from ds_finepage.config import SECTION
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.integrations.deepspeed.engine import handle_of
from ds_finepage.reporting.results import ObservedPass
from ds_finepage.runtime.drafts import STAND_IN
from ds_finepage.runtime.handle import Handle


class FinepageEngine(DeepSpeedEngine):
    """A model that runs by plan."""

    @property
    def handle(self) -> Handle:
        """The handle of DeepSpeed's engine."""
        return handle_of(self.engine)

    def copied(self) -> tuple[int, int]:
        """Return the bytes that the runtime has copied."""
        stats = self.handle.stats
        return stats.reloaded_bytes, stats.offloaded_bytes

    def record(self) -> None:
        """Record the timelines of the passes from now on."""
        self.handle.record()

    def observed(self) -> Sequence[ObservedPass]:
        """Return the passes with their plans and timelines.

        Raises:
            FinepageError: Something ran without a plan.
        """
        stats = self.handle.stats
        if stats.unplanned_reasons:
            raise FinepageError(f"ran without a plan: {'; '.join(stats.unplanned_reasons)}")
        if stats.num_caches_on_host:
            self.notes.append("the KV cache is in host memory")
        return self.handle.observed()


def load(request: RunRequest) -> FinepageEngine:
    """Load the model to run by plan.

    Raises:
        ConfigError: transformers cannot assist the batch.
    """
    drafts = request.arm == DRAFTED
    if drafts and request.batch != 1:
        raise ConfigError(f"transformers assists one sequence, and the batch has {request.batch}")
    settings: dict[str, str | int | float | bool] = {
        "policy": OURS if drafts else ARMS[request.arm].policy,
        "device_budget": request.budget_bytes,
        **({"draft": STAND_IN} if drafts else {}),
    }
    # A report would record the timed calls.
    section = {**request.ds_config.get(SECTION, {}), **settings, "enabled": True, "report": None}
    ds_config = {**request.ds_config, SECTION: section}
    made = FinepageEngine(load_under_deepspeed(request, ds_config), deepspeed_device(), ds_config)
    made.settings.update(settings)
    return made
