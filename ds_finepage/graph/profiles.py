"""Hardware profiles by name or file.

The shipped profiles are JSON files in the folder beside this module, each with the source of its
figures. A user's own profile is a file of the same form.
"""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, fields
from importlib import resources
from pathlib import Path

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.files import cause_of
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import DETAILS, HardwareProfile
from ds_finepage.graph.hosts import with_host

DEFAULT_DTYPE = "default"
"""Key of ``flops_per_s`` for dtypes without a rate of their own."""

POSITIVE = ("capacity_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s")

_FOLDER = resources.files("ds_finepage.graph") / "profiles"
_SUFFIX = ".json"


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Return a hardware profile.

    Args:
        name_or_path: The name of a shipped profile, or the path of a JSON file. A string is a path
            if it contains a separator or ends in ``.json``. Behind a ``+`` it may have the name
            of another host.

    Raises:
        ConfigError: There is no such profile, file or host, or a figure is missing, unknown or
            unusable.
    """
    name, plus, host = str(name_or_path).rpartition("+")
    if plus and not _looks_like_path(host):
        return require_usable(with_host(load_profile(name), host))
    if isinstance(name_or_path, str) and not _looks_like_path(name_or_path):
        if name_or_path not in profile_names():
            raise ConfigError(
                f"unknown hardware profile {name_or_path!r}. "
                f"{did_you_mean(name_or_path, profile_names())} Or give the path of a {_SUFFIX} "
                f"file."
            )
        where = f"hardware profile {name_or_path!r}"
        text = (_FOLDER / (name_or_path + _SUFFIX)).read_text(encoding="utf-8")
    else:
        where = f"hardware profile {os.fspath(name_or_path)}"
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {where}: {cause_of(error)}. Name a file that 'ds-finepage probe "
                f"--out' wrote, or a shipped profile: {', '.join(profile_names())}."
            ) from error
    try:
        return require_usable(codec.loads(text, HardwareProfile))
    except (ConfigError, InvalidPlanError) as error:
        raise ConfigError(f"{where}: {error}") from error


def require_usable(profile: HardwareProfile) -> HardwareProfile:
    """Return the profile if all its figures are usable.

    Raises:
        ConfigError: A rate or size is not positive, a latency is negative, something is faster than
            its rate, or the rate for ``"default"`` is missing.
    """
    positive: dict[str, float] = {name: getattr(profile, name) for name in POSITIVE}
    positive |= {f"flops_per_s.{dtype}": rate for dtype, rate in profile.flops_per_s.items()}
    for field, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{field} is {value}; it must be positive and finite")
    for each in fields(profile):
        if each.default is not MISSING and getattr(profile, each.name) < 0:
            value = getattr(profile, each.name)
            raise ConfigError(f"{each.name} is {value}; it must not be negative")
    for name in DETAILS:
        if not math.isfinite(value := getattr(profile, name)):
            raise ConfigError(f"{name} is {value}; it must be finite")
    if DEFAULT_DTYPE not in profile.flops_per_s:
        raise ConfigError(
            f"flops_per_s has no {DEFAULT_DTYPE!r}, the rate for all other dtypes than "
            f"{', '.join(profile.flops_per_s) or 'none'}; add it"
        )
    return profile


def _looks_like_path(text: str) -> bool:
    separators = [s for s in (os.sep, os.altsep) if s]
    return text.endswith(_SUFFIX) or any(s in text for s in separators)
