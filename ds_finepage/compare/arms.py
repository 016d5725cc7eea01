"""The arms by name: every engine that ``compare`` can run, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

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
        package: A package that it needs beyond the requirements, as Python imports it.
        install: The command that installs that package.
        observes: Its passes run by plan, so that their timelines can be kept.
        is_ours: It is ds_finepage with a policy of its own, and no other system.
        why_one_rank: Why it does not run on several ranks; "" if it does.
    """

    name: str
    title: str
    module: str
    policy: str
    package: str = ""
    install: str = ""
    observes: bool = False
    is_ours: bool = False
    why_one_rank: str = ""

    @property
    def missing(self) -> str | None:
        """Say what is not installed, and how to install it; None if nothing is missing."""
        if self.package and find_spec(self.package) is None:
            return f"needs the package {self.package}: {self.install}"
        if find_spec(self.module) is None:
            return f"this version of ds_finepage has no module {self.module}"
        return None


def _arm(name: str, title: str, file: str, policy: str, **more: str | bool) -> Arm:
    module = f"ds_finepage.compare.{file}"
    return Arm(name=name, title=title, module=module, policy=policy, **more)  # type: ignore[arg-type]


PLAIN = "plain"
"""The arm whose tokens all others must have."""

OURS = "finepage"

DEFAULT = (PLAIN, "zero", "zero-persistence", OURS)
"""The arms that run where none is named: stock, tuned stock, and ours."""

ONE_RANK = "{} moves whole layers of one process, and has no ranks"

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        _arm(PLAIN, "plain transformers", "plain_arm", ""),
        _arm("zero", "ZeRO-Inference, defaults", "zero_arms", "zero"),
        _arm(
            "zero-persistence",
            "ZeRO-Inference, settings searched",
            "zero_arms",
            "zero-persistence",
        ),
        _arm(
            "accelerate-map",
            "Accelerate device map",
            "accelerate_arm",
            "accelerate-map",
            why_one_rank=ONE_RANK.format("Accelerate's device map"),
        ),
        _arm("static", "static shares", "finepage_arms", "static", observes=True),
        _arm(
            "horizon-published",
            "published algorithm",
            "finepage_arms",
            "horizon-published",
            observes=True,
        ),
        _arm(
            "finepage-horizon",
            "ds_finepage, horizon",
            "finepage_arms",
            "horizon",
            observes=True,
            is_ours=True,
        ),
        _arm(OURS, "ds_finepage", "finepage_arms", "finepage", observes=True, is_ours=True),
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
