"""The ``finepage`` section of a ds_config: validated once, then immutable.

DeepSpeed ignores unknown top-level keys, so a misspelt setting would silently have no effect. These
models refuse every key and value that they do not know. A new setting is one more field.
"""

from __future__ import annotations

import difflib
import enum
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ds_finepage.errors import ConfigError
from ds_finepage.units import SIZE_FORMS, format_bytes, parse_bytes

logger = logging.getLogger(__name__)

SECTION = "finepage"
"""The key of the section in a ds_config."""

_DS_WEIGHTS = "weight_quantization"
PackedName = Literal["int8", "int4", "int8+output", "int4+output"]
"""The names of packed forms, as ``graph/packed.py`` has them."""

KVPlace = Literal["auto", "device", "host"]

BUDGET_FORMS = f'"auto", "80%device", "40%weights", {SIZE_FORMS}'
"""The forms of a device budget, for error messages."""

HOST_MARGIN_SHARE = 32
"""Of all host memory, a host budget of "auto" leaves one part in so many free."""

DELETED = {
    "plan_dir": "each start plans again, in about a second for 80 layers. Leave it out.",
}
"""Settings of earlier versions -> what to do instead."""

_PERCENT = re.compile(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Ask whether the known name that is closest to a wrong one was meant.

    Args:
        name: The wrong name.
        known: All right names.
        cutoff: The least similarity, from 0 to 1, that a name must have.

    Returns:
        ``"Did you mean 'x'? "``, or an empty text where no name is close.
    """
    close = difflib.get_close_matches(str(name).lower(), known, 1, cutoff)
    return f"Did you mean {close[0]!r}? " if close else ""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Name the known name that is closest to a wrong one, and list all known names."""
    names = list(known)
    return f"{nearest(name, names)}Known: {', '.join(names)}."


class BudgetKind(str, enum.Enum):
    """A budget is an amount of one of these."""

    AUTO = "auto"  # what is free, less a margin; no amount
    BYTES = "bytes"  # bytes
    DEVICE = "device"  # the device's memory
    WEIGHTS = "weights"  # the model's weights; more than all of them is allowed
    HOST = "host"  # all host memory


_B = TypeVar("_B", bound="_Budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budget:
    """A limit on memory, before the machine and the model are known.

    ``str(budget)`` is a form that ``parse`` reads back as an equal budget.

    Attributes:
        kind: What the amount counts.
        amount: Bytes, or a share of what the kind names, where 1 is the whole.
    """

    setting: ClassVar[str]
    bases: ClassVar[tuple[BudgetKind, ...]]  # what a percentage may be of
    forms: ClassVar[str]  # for error messages

    kind: BudgetKind = BudgetKind.AUTO
    amount: Fraction = Fraction(0)

    @classmethod
    def parse(cls: type[_B], value: object, *, name: str = "") -> _B:
        """Read a budget.

        Args:
            value: A budget, bytes, or a text in one of the ``forms``.
            name: The setting, as the error names it; without one, the key of the section.

        Raises:
            ConfigError: Another form, a bare percentage, 0 or less, or a percentage above 100 of
                anything but weights.
        """
        name = name or cls.setting
        if isinstance(value, cls):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ConfigError(f"{name}: {value!r} is not a budget. Write {cls.forms}.")
        if isinstance(value, str):
            text = value.strip().lower()
            if text == BudgetKind.AUTO.value:
                return cls()
            match, hint = _PERCENT.fullmatch(text), nearest(text, [BudgetKind.AUTO.value])
            if match is not None:
                return cls._of_percent(value, match[1], match[2], name)
            if hint or "%" in text:
                raise ConfigError(f"{name}: cannot read {value!r}. {hint}Write {cls.forms}.")
        return cls(kind=BudgetKind.BYTES, amount=Fraction(parse_bytes(value, name=name)))

    @classmethod
    def _of_percent(cls: type[_B], value: str, number: str, base: str, name: str) -> _B:
        share = Fraction(number) / 100
        if base not in cls.bases:
            of_what = f"percent of {base!r} is unknown" if base else "percent of what"
            known = " or ".join(f'"{number}%{known.value}"' for known in cls.bases)
            raise ConfigError(f"{name}: {value!r} is ambiguous: {of_what}. Write {known}.")
        if share <= 0:
            raise ConfigError(f"{name}: {value!r} leaves no memory. Write {cls.forms}.")
        if base != BudgetKind.WEIGHTS and share > 1:
            raise ConfigError(
                f"{name}: {value!r} is {number}% of the {base}, which has 100%. "
                f'Write at most "100%{base}".'
            )
        return cls(kind=BudgetKind(base), amount=share)

    @property
    def is_auto(self) -> bool:
        """Whether the budget is what is free, less a margin."""
        return self.kind is BudgetKind.AUTO

    def __str__(self) -> str:
        if self.is_auto:
            return "auto"
        if self.kind is BudgetKind.BYTES:
            return str(self.amount)
        # ``parse`` reads at most 18 digits of a percent, so this is exact.
        percent = Decimal(100 * self.amount.numerator) / self.amount.denominator
        return f"{percent:f}%{self.kind.value}"


class DeviceBudget(_Budget):
    """The user's limit on all device bytes of the run."""

    __slots__ = ()
    setting = f"{SECTION}.device_budget"
    bases = (BudgetKind.DEVICE, BudgetKind.WEIGHTS)
    forms = BUDGET_FORMS

    def resolve(
        self,
        *,
        weight_bytes: int,
        device_bytes: int,
        free_bytes: int,
        margin_bytes: int,
        name: str = setting,
    ) -> int:
        """Turn the budget into bytes.

        Args:
            weight_bytes: Bytes of all weights of the model; tied weights count once.
            device_bytes: Bytes of the device's memory.
            free_bytes: Free bytes of it; only ``auto`` uses them.
            margin_bytes: Bytes that ``auto`` leaves free.
            name: The setting, as the error names it.

        Returns:
            Bytes, from 1 to ``device_bytes``; shares are rounded down.

        Raises:
            ConfigError: The budget is larger than the device, or less than 1 byte.
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
            budget_bytes = int(self.amount)
        else:
            whole_bytes = weight_bytes if self.kind is BudgetKind.WEIGHTS else device_bytes
            budget_bytes = int(self.amount * whole_bytes)
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


class HostBudget(_Budget):
    """The user's limit on the host memory of the run."""

    __slots__ = ()
    setting = f"{SECTION}.host_budget"
    bases = (BudgetKind.HOST,)
    forms = f'"auto", "80%host", {SIZE_FORMS}'

    def resolve(self, *, held_bytes: int, free_bytes: int, all_bytes: int) -> int:
        """Turn the budget into bytes.

        Args:
            held_bytes: Bytes of the weights, which are there already.
            free_bytes: Bytes of host memory that are free beside them.
            all_bytes: Bytes of all host memory.
        """
        if self.is_auto:
            return held_bytes + max(0, free_bytes - all_bytes // HOST_MARGIN_SHARE)
        if self.kind is BudgetKind.HOST:
            return int(self.amount * all_bytes)
        return int(self.amount)


class _Settings(BaseModel):
    """Settings by name; strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DebugConfig(_Settings):
    """Checks that cost time and change no result. ``true`` stands for NaN and seed 0."""

    poison_vacated: bool = False  # fill vacated extents with NaN
    lane_delay_seed: int | None = None  # delay lanes at random; None: never
    max_lane_delay_us: NonNegativeInt = 200  # microseconds; longest of these delays

    @model_validator(mode="after")
    def _has_effect(self) -> DebugConfig:
        if self.lane_delay_seed is None and "max_lane_delay_us" in self.model_fields_set:
            logger.warning("finepage.debug: max_lane_delay_us has no effect without a seed")
        return self


_MESSAGES = {
    "bool_type": "is not a truth value. Write true or false.",
    "int_type": "is not a whole number.",
    "greater_than_equal": "is negative. Write 0 or more.",
    "literal_error": "is unknown. Write {expected}.",
    "greater_than": "is not above 0.",
    "multiple_of": "is odd. Write an even number.",
    "model_type": "is neither true nor false nor an object. "
    f"Keys: {', '.join(DebugConfig.model_fields)}.",
    "string_type": "is not a text. Write a name in quotes.",
    "string_pattern_mismatch": "is not a text. Write a name in quotes.",
}
"""Endings of messages, by pydantic's type of an error."""


class FinepageConfig(_Settings):
    """The ``finepage`` section. Without one, ``enabled`` is false and DeepSpeed is stock."""

    enabled: bool = False
    device_budget: Annotated[DeviceBudget, PlainValidator(DeviceBudget.parse)] = DeviceBudget()
    host_budget: Annotated[HostBudget, PlainValidator(HostBudget.parse)] = HostBudget()
    policy: str = "finepage"
    split: bool = False  # cut matrix products; results may then differ in the last bit
    weights: PackedName | None = (
        None  # pack linear layers and experts; results are those of the quantised model
    )
    weights_group: Annotated[int, Field(gt=0, multiple_of=2)] = 64  # weights that share a scale
    weights_dir: Annotated[str, Field(pattern=r"\S")] | None = None  # keeps what is packed
    fused_unpacking: bool = (
        False  # products of few rows unpack in registers, where Triton runs; not yet run on a GPU
    )
    device_graphs: bool = False  # record runs of ops, replay each with one launch; not run on a GPU
    kv_cache: KVPlace = "auto"  # "auto": in host memory too where it competes with the weights
    host_compute: Literal["off", "auto"] = (
        "off"  # "auto": the host multiplies by weights in its memory where that is faster
    )
    draft: Annotated[str, Field(pattern=r"\S")] = (
        "off"  # what drafts tokens for the model to check: "stand-in", "auto" or a folder
    )
    debug: DebugConfig = DebugConfig()
    report: Annotated[str, Field(pattern=r"\S")] | None = (
        None  # folder that gets the figures, timelines and pictures of the run
    )

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get("policies", (policy,))
        if policy not in known:
            raise ConfigError(
                f"{SECTION}.policy: unknown policy {policy!r}. {did_you_mean(policy, known)}"
            )
        return policy

    @field_validator("debug", mode="before")
    @classmethod
    def _switched(cls, debug: object) -> object:
        if isinstance(debug, bool):
            return {"poison_vacated": True, "lane_delay_seed": 0} if debug else {}
        return dict(debug) if isinstance(debug, Mapping) else debug

    @classmethod
    def from_dict(cls, section: object, *, policies: Collection[str]) -> FinepageConfig:
        """Read a section.

        Args:
            section: A mapping with any of the fields.
            policies: Names of the policies that exist.

        Raises:
            ConfigError: Not a mapping, a whole ds_config, an unknown key or policy (with the
                nearest known one), or a value of the wrong type or out of range.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{SECTION}: {section!r} is not an object. Write for example "
                f'{{"enabled": true, "device_budget": "6GiB"}}. Keys: '
                f"{', '.join(cls.model_fields)}."
            )
        if SECTION in section:
            raise ConfigError(
                f"{SECTION}: this is a whole ds_config. Give what its key {SECTION!r} has."
            )
        try:
            return cls.model_validate(dict(section), context={"policies": policies})
        except ValidationError as error:
            raise _config_error(error) from None


def _config_error(error: ValidationError) -> ConfigError:
    """Name the setting of the first error, and what to write."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    *outer, key = first["loc"]
    if key in DELETED and not outer:
        return ConfigError(f"{SECTION}.{key} is gone: {DELETED[key]}")
    name = ".".join([SECTION, *map(str, outer)])
    if first["type"] in ("extra_forbidden", "invalid_key"):
        known = (DebugConfig if outer else FinepageConfig).model_fields
        return ConfigError(f"{name}: unknown key {key!r}. {did_you_mean(key, known)}")
    expected = str(first.get("ctx", {}).get("expected", "")).replace("'", '"')
    message = _MESSAGES.get(first["type"], first["msg"] + ".").replace("{expected}", expected)
    return ConfigError(f"{name}.{key}: {first['input']!r} {message}")


def section_of(ds_config: Mapping[str, Any]) -> object:
    """Find the ``finepage`` section of a whole ds_config; an empty one where it has none.

    Raises:
        ConfigError: There is none, but a key that is ``finepage`` misspelt; or both it and
            DeepSpeed are to quantise weights.
    """
    if SECTION in ds_config:
        section = ds_config[SECTION]
        if isinstance(section, Mapping) and section.get("weights") and _DS_WEIGHTS in ds_config:
            raise ConfigError(
                f"ds_config: {SECTION}.weights and DeepSpeed's {_DS_WEIGHTS} both quantise the "
                "weights. Leave one of them out."
            )
        return {} if section is None else section
    for key in ds_config:
        # A strict cutoff: other programs keep keys of their own in a ds_config.
        hint = nearest(key, [SECTION], cutoff=0.85)
        if hint:
            raise ConfigError(
                f"ds_config: unknown key {key!r}. {hint}DeepSpeed ignores keys that it does not "
                "know, so this would silently run without ds_finepage."
            )
    return {}


def _exact(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"
