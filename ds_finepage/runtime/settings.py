"""The settings that a model runs under; :meth:`Handle.replan` replaces them as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ds_finepage.config import DebugConfig
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.planning.pipeline import PlanSettings
from ds_finepage.planning.policies import CAN_SPLIT, CYCLIC, PAGING

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""The alignment of torch's own allocators, in bytes; kernels choose their code path by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that the user decides about a run.

    Attributes:
        device: Where the model computes.
        budget_bytes: The limit on all device bytes.
        policy: A name in ``ds_finepage.planning.policies``.
        split: The policy may cut weights, if it can.
        debug: Checks that slow a run down.
        profile: Rates of the device and of its link.
        plan_dir: Folder that keeps plans; None keeps none.
    """

    device: torch.device
    budget_bytes: int
    policy: str
    split: bool
    debug: DebugConfig
    profile: HardwareProfile
    plan_dir: Path | None = None

    @property
    def pins_memory(self) -> bool:
        """True where host memory must be pinned for fast copies."""
        return self.device.type == "cuda"

    @property
    def is_cyclic(self) -> bool:
        """True where a pass keeps weights on the device for the next one."""
        return self.policy in CYCLIC

    @property
    def moves_kv_caches(self) -> bool:
        """True where a KV cache without room on the device moves to host memory."""
        return self.policy in PAGING

    @property
    def shows_ops(self) -> bool:
        """True where every op must run by plan, because a debug check looks at it."""
        return self.debug.poison_vacated or self.debug.lane_delay_seed is not None

    @property
    def planning(self) -> PlanSettings:
        """The part that the planner needs."""
        return PlanSettings(
            policy=self.policy,
            split=self.split and self.policy in CAN_SPLIT,
            alignment=ALIGNMENT.get(self.device.type, 512),
            profile=self.profile,
        )
