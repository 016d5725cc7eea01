"""The ``finepage`` section of a ds_config: read strictly, then immutable.

DeepSpeed accepts unknown top-level keys without a word, so a misspelt setting would silently be
none. Everything here is refused unless it is understood.
"""

from __future__ import annotations

import difflib
import enum
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from ds_finepage.errors import ConfigError
from ds_finepage.units import SIZE_FORMS, format_bytes, parse_bytes

logger = logging.getLogger(__name__)

SECTION = "finepage"
"""The key of the section in a ds_config."""

BUDGET_FORMS = f'"auto", "80%device", "40%weights", {SIZE_FORMS}'
"""The forms that a device budget takes, as error messages name them."""

_PERCENT = re.compile(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Say which known name is close to a wrong one, and list them all."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, 1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."


class BudgetKind(str, enum.Enum):
    """What a device budget is measured against."""

    AUTO = "auto"  # what is free on the device, less a margin
    BYTES = "bytes"  # a fixed size
    DEVICE = "device"  # a share of the device's memory
    WEIGHTS = "weights"  # a share of the model's weights; may exceed them


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """The user's limit on all device bytes of the run, before the device and model are known.

    Invariant: ``num_bytes`` is set for BYTES, ``share`` (1 is the whole) for DEVICE and WEIGHTS.
    ``str(budget)`` is a form that ``parse`` reads back as an equal budget.
    """

    kind: BudgetKind = BudgetKind.AUTO
    num_bytes: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, value: object, *, name: str = f"{SECTION}.device_budget") -> DeviceBudget:
        """Read a budget.

        Args:
            value: Bytes, a size such as ``"6GiB"``, ``"80%device"``, ``"40%weights"`` or
                ``"auto"``.
            name: The setting, as the error names it.

        Raises:
            ConfigError: Another form, a bare percentage, a percentage of the device above 100, or
                nothing at all (0 or negative).
        """
        if isinstance(value, DeviceBudget):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ConfigError(f"{name}: {value!r} is not a budget. Write {BUDGET_FORMS}.")
        if isinstance(value, str):
            text = value.strip().lower()
            if text == BudgetKind.AUTO.value:
                return cls()
            if "%" in text:
                return cls._parse_percent(value, text, name)
            if "auto" in difflib.get_close_matches(text, ["auto"]):
                raise ConfigError(
                    f"{name}: cannot read {value!r}. Did you mean 'auto'? Write {BUDGET_FORMS}."
                )
        return cls(kind=BudgetKind.BYTES, num_bytes=parse_bytes(value, name=name))

    @classmethod
    def _parse_percent(cls, value: str, text: str, name: str) -> DeviceBudget:
        match = _PERCENT.fullmatch(text)
        if match is None:
            raise ConfigError(f"{name}: cannot read {value!r}. Write {BUDGET_FORMS}.")
        number, base = match.groups()
        share = Fraction(number) / 100
        if base not in (BudgetKind.DEVICE.value, BudgetKind.WEIGHTS.value):
            of_what = f"percent of {base!r} is unknown" if base else "percent of what"
            raise ConfigError(
                f"{name}: {value!r} is ambiguous: {of_what}. "
                f'Write "{number}%device" or "{number}%weights".'
            )
        if share <= 0:
            raise ConfigError(f"{name}: {value!r} leaves no memory. Write {BUDGET_FORMS}.")
        if base == BudgetKind.DEVICE.value and share > 1:
            raise ConfigError(
                f"{name}: {value!r} is {number}% of the device, which has 100%. "
                'Write at most "100%device".'
            )
        return cls(kind=BudgetKind(base), share=share)

    @property
    def is_auto(self) -> bool:
        """True where ``resolve`` looks at free memory and margin."""
        return self.kind is BudgetKind.AUTO

    def __str__(self) -> str:
        """The budget as a ds_config writes it."""
        if self.is_auto:
            return "auto"
        if self.kind is BudgetKind.BYTES:
            return str(self.num_bytes)
        assert self.share is not None
        # At most 9 decimals of a percent were read, so these are all of them.
        billionths = int(self.share * 100 * 10**9)
        whole, rest = divmod(billionths, 10**9)
        decimals = f".{rest:09}".rstrip("0") if rest else ""
        return f"{whole}{decimals}%{self.kind.value}"

    def resolve(
        self,
        *,
        weight_bytes: int,
        device_bytes: int,
        free_bytes: int,
        margin_bytes: int,
        name: str = f"{SECTION}.device_budget",
    ) -> int:
        """Turn the budget into bytes.

        Args:
            weight_bytes: Bytes of all weights of the model, tied ones once.
            device_bytes: Bytes of the device's memory.
            free_bytes: Bytes of it that are free now; counts for ``auto`` alone.
            margin_bytes: Bytes that ``auto`` leaves to others.
            name: The setting, as the error names it.

        Returns:
            Bytes, from 1 to ``device_bytes``; shares are rounded down.

        Raises:
            ConfigError: The budget is larger than the device, or nothing is left of it.
        """
        if self.is_auto:
            budget_bytes = free_bytes - margin_bytes
            if budget_bytes < 1:
                raise ConfigError(
                    f"{name}: 'auto' finds {_exact(free_bytes)} free on the device and leaves a "
                    f"margin of {_exact(margin_bytes)}: nothing is left. Free device memory, or "
                    f"set {name} to a size."
                )
        elif self.kind is BudgetKind.BYTES:
            assert self.num_bytes is not None
            budget_bytes = self.num_bytes
        else:
            assert self.share is not None
            whole_bytes = weight_bytes if self.kind is BudgetKind.WEIGHTS else device_bytes
            budget_bytes = int(self.share * whole_bytes)
            if budget_bytes < 1:
                raise ConfigError(
                    f"{name}: '{self}' of {_exact(whole_bytes)} is less than 1 byte. Raise {name}."
                )
        if budget_bytes > device_bytes:
            raise ConfigError(
                f"{name}: '{self}' is {_exact(budget_bytes)}; the device has "
                f"{_exact(device_bytes)}. Lower {name} to at most that, or set it to 'auto'."
            )
        return budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Checks that cost time and change no result."""

    poison_vacated: bool = False  # fill vacated extents with NaN
    lane_delay_seed: int | None = None  # delay lanes at random; None: never
    max_lane_delay_us: int = 200  # microseconds; longest of these delays

    @classmethod
    def parse(cls, value: object, *, name: str = f"{SECTION}.debug") -> DebugConfig:
        """Read the setting.

        Args:
            value: ``false``: all off. ``true``: vacated extents are poisoned, lanes are delayed
                with seed 0. Or an object with any of the fields.
            name: The setting, as the error names it.

        Raises:
            ConfigError: Another type, an unknown key, or a negative delay.
        """
        if isinstance(value, DebugConfig):
            return value
        if isinstance(value, bool):
            return cls(poison_vacated=True, lane_delay_seed=0) if value else cls()
        if not isinstance(value, Mapping):
            known = ", ".join(f.name for f in fields(cls))
            raise ConfigError(
                f"{name}: {value!r} is neither true nor false nor an object. Keys: {known}."
            )
        _refuse_unknown_keys(value, [f.name for f in fields(cls)], name)
        given: dict[str, Any] = {}
        if "poison_vacated" in value:
            given["poison_vacated"] = _bool(value["poison_vacated"], f"{name}.poison_vacated")
        if value.get("lane_delay_seed") is not None:
            given["lane_delay_seed"] = _int(value["lane_delay_seed"], f"{name}.lane_delay_seed")
        if "max_lane_delay_us" in value:
            delay_us = _int(value["max_lane_delay_us"], f"{name}.max_lane_delay_us")
            if delay_us < 0:
                raise ConfigError(
                    f"{name}.max_lane_delay_us: {delay_us} is negative. Write microseconds, "
                    "0 or more."
                )
            if "lane_delay_seed" not in given:
                logger.warning(
                    "%s.max_lane_delay_us has no effect: %s.lane_delay_seed is not set", name, name
                )
            given["max_lane_delay_us"] = delay_us
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinepageConfig:
    """The ``finepage`` section. Without one, ``enabled`` is false and DeepSpeed is stock."""

    enabled: bool = False
    device_budget: DeviceBudget = field(default_factory=DeviceBudget)
    policy: str = "finepage"
    split: bool = False  # cut matrix products; results may then differ in the last bit
    debug: DebugConfig = field(default_factory=DebugConfig)
    plan_dir: str | None = None  # folder in which captured taskgraphs and plans are kept as JSON

    @classmethod
    def from_ds_config(cls, section: object, *, policies: Sequence[str]) -> FinepageConfig:
        """Read what a ds_config has under ``finepage``.

        Args:
            section: The section (see ``section_of``); ``None`` where the ds_config has none.
            policies: Names of the policies that exist.

        Raises:
            ConfigError: See ``from_dict``.
        """
        return cls() if section is None else cls.from_dict(section, policies=policies)

    @classmethod
    def from_dict(cls, section: object, *, policies: Sequence[str]) -> FinepageConfig:
        """Read a section.

        Args:
            section: A mapping with any of the fields.
            policies: Names of the policies that exist.

        Raises:
            ConfigError: Not a mapping, an unknown key or policy (with the nearest known one), or
                a value of the wrong type or out of range.
        """
        names = [f.name for f in fields(cls)]
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{SECTION}: {section!r} is not an object. Write for example "
                f'{{"enabled": true, "device_budget": "6GiB"}}. Keys: {", ".join(names)}.'
            )
        _refuse_unknown_keys(section, names, SECTION)
        given: dict[str, Any] = {}
        if "enabled" in section:
            given["enabled"] = _bool(section["enabled"], f"{SECTION}.enabled")
        if "device_budget" in section:
            given["device_budget"] = DeviceBudget.parse(section["device_budget"])
        if "policy" in section:
            policy = _text(section["policy"], f"{SECTION}.policy")
            if policy not in policies:
                raise ConfigError(
                    f"{SECTION}.policy: unknown policy {policy!r}. {did_you_mean(policy, policies)}"
                )
            given["policy"] = policy
        if "split" in section:
            given["split"] = _bool(section["split"], f"{SECTION}.split")
        if "debug" in section:
            given["debug"] = DebugConfig.parse(section["debug"])
        if section.get("plan_dir") is not None:
            given["plan_dir"] = _text(section["plan_dir"], f"{SECTION}.plan_dir")
        return cls(**given)


def section_of(ds_config: Mapping[str, Any]) -> object:
    """Find the ``finepage`` section of a whole ds_config; ``None`` where it has none.

    Raises:
        ConfigError: There is none, but a key that is ``finepage`` misspelt.
    """
    if SECTION in ds_config:
        return ds_config[SECTION]
    for key in ds_config:
        # Strict enough to leave alone whatever keys other programs keep in a ds_config.
        if difflib.get_close_matches(str(key).lower(), [SECTION], 1, cutoff=0.85):
            raise ConfigError(
                f"ds_config: unknown key {key!r}. Did you mean {SECTION!r}? DeepSpeed ignores "
                "keys that it does not know, so this would silently run without ds_finepage."
            )
    return None


def _exact(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


def _refuse_unknown_keys(given: Mapping[Any, Any], known: Sequence[str], name: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{name}: unknown key {key!r}. {did_you_mean(key, known)}")


def _bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} is not a truth value. Write true or false.")
    return value


def _int(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number.")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name}: {value!r} is not a text. Write a name in quotes.")
    return value
