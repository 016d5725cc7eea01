"""The arms by name: every engine that ``compare`` can run, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine with its settings.

    Attributes:
        name: The name that options and results give it.
        title: For tables.
        module: A module whose ``load(request)`` makes the engine; only a worker imports it.
        policy: The policy of the planner that models the arm; "" if none does.
        observes: Its passes run by plan, so that their timelines can be kept.
        is_ours: It is ds_finepage with a policy of its own, and no other system.
        why_one_rank: Why it does not run on several ranks; "" if it does.
    """

    name: str
    title: str
    module: str
    policy: str
    observes: bool = False
    is_ours: bool = False
    why_one_rank: str = ""


def _arm(name: str, title: str, file: str, policy: str, **more: Any) -> Arm:
    module = f"ds_finepage.compare.{file}"
    return Arm(name=name, title=title, module=module, policy=policy, **more)


def _by_plan(name: str, title: str, policy: str, *, is_ours: bool = False) -> Arm:
    return _arm(name, title, "finepage_arms", policy, observes=True, is_ours=is_ours)


PLAIN = "plain"
"""The arm whose tokens all others must have."""

OURS, TUNED, DRAFTED = "finepage", "zero-persistence", "finepage-draft"

DEFAULT = (PLAIN, "zero", TUNED, OURS)
"""The arms that run where none is named: stock, tuned stock, and ours."""

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        _arm(PLAIN, "plain transformers", "plain_arm", ""),
        _arm("zero", "ZeRO-Inference, defaults", "zero_arms", "zero"),
        _arm(TUNED, "ZeRO-Inference, settings searched", "zero_arms", TUNED),
        _arm(
            "accelerate-map",
            "Accelerate device map",
            "accelerate_arm",
            "accelerate-map",
            why_one_rank="Accelerate's device map moves whole layers of one process, and has no "
            "ranks",
        ),
        _by_plan("static", "static shares", "static"),
        _by_plan("horizon-published", "published algorithm", "horizon-published"),
        _by_plan("finepage-horizon", "ds_finepage, horizon", "horizon", is_ours=True),
        _by_plan(OURS, "ds_finepage", "finepage", is_ours=True),
        _arm(
            DRAFTED,
            "ds_finepage with a stand-in",
            "finepage_arms",
            "",
            is_ours=True,
            why_one_rank="transformers assists a generation on one rank",
        ),
    )
}


def arms_named(names: list[str]) -> list[Arm]:
    """Return arms by name, each once; "all" stands for all of them.

    Raises:
        ConfigError: Unknown arm.
    """
    found: dict[str, Arm] = {}
    for name in names:
        if name != ALL and name not in ARMS:
            raise ConfigError(f"--arms: unknown arm {name!r}. {did_you_mean(name, [ALL, *ARMS])}")
        found.update(ARMS if name == ALL else {name: ARMS[name]})
    return list(found.values())
