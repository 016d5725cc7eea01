"""The settings that a model runs under; :meth:`Handle.replan` replaces them as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_finepage.config import FinepageConfig
from ds_finepage.execution.device import device_of
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.planning.pipeline import PlanSettings
from ds_finepage.planning.policies import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that the user decides about a run.

    Attributes:
        config: The ``finepage`` section.
        device: Where the model computes.
        budget_bytes: The limit on all device bytes, from the section's budget.
        profile: Rates of the device and of its link.
        host_budget_bytes: The limit on the host memory of the run; None sets none.
        may_cut: Plans may cut weights, if they are to. Weights in parts on several ranks are whole.
    """

    config: FinepageConfig
    device: torch.device
    budget_bytes: int
    profile: HardwareProfile
    may_cut: bool = True
    host_budget_bytes: int | None = None

    @property
    def is_cyclic(self) -> bool:
        """True where a pass keeps weights on the device for the next one."""
        return POLICIES[self.config.policy].is_cyclic

    @property
    def moves_kv_caches(self) -> bool:
        """True where a KV cache may be in host memory."""
        return POLICIES[self.config.policy].pages and self.config.kv_cache != "device"

    @property
    def starts_on_host(self) -> bool:
        """True where a KV cache is in host memory from the first call on."""
        return self.config.kv_cache == "host" and self.moves_kv_caches

    @property
    def shows_ops(self) -> bool:
        """True where every op must run by plan, because a debug check looks at it."""
        debug = self.config.debug
        return debug.poison_vacated or debug.lane_delay_seed is not None

    @property
    def num_op_streams(self) -> int:
        """The streams that run ops: the caller's, and one that records graphs."""
        records = self.config.device_graphs and device_of(self.device).has_graphs
        return 2 if records else 1

    @property
    def planning(self) -> PlanSettings:
        """The part that the planner needs."""
        return PlanSettings(
            policy=self.config.policy,
            split=self.may_cut and self.config.split and self.is_cyclic,
            alignment=device_of(self.device).alignment,
            profile=self.profile,
        )
