"""Sizes and times: from text to integers, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from ds_finepage.errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
NS_PER_S = 10**9

BYTE_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
TIME_UNITS = ((NS_PER_S, "s"), (10**6, "ms"), (10**3, "us"), (1, "ns"))

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
}

# The number of digits is limited, so that a long input costs no time.
_SIZE = re.compile(r"(-?[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]{0,3})", re.IGNORECASE | re.ASCII)

SIZE_FORMS = (
    'bytes as a whole number (6442450944), or text with a unit: "6GiB", "512 MiB" '
    '(KiB, MiB, GiB, TiB: powers of 1024), "1.5GB" (kB, MB, GB, TB: powers of 1000)'
)
"""The forms that ``parse_bytes`` reads, for error messages."""


def require_count(value: int, name: str) -> None:
    """Refuse a number of things that is less than 1.

    Args:
        value: The number.
        name: The setting, as the error names it.

    Raises:
        ConfigError: It is less than 1.
    """
    if value < 1:
        raise ConfigError(f"{name}: {value} is less than 1. Write 1 or more.")


def parse_bytes(value: str | int, *, name: str = "size") -> int:
    """Read a size.

    Args:
        value: A whole number of bytes, or text such as ``"6GiB"``, in any letter case.
        name: The setting, as the error names it.

    Returns:
        Bytes, at least 1; fractions of a byte are cut off.

    Raises:
        ConfigError: The value is of another form (a bare percentage, a float, ``"1e9"``), or less
            than one byte.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{name}: {value!r} is not a size. Write {SIZE_FORMS}.")
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{name}: cannot read {value!r} as a size. Write {SIZE_FORMS}.")
        num_bytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if num_bytes < 1:
        raise ConfigError(f"{name}: {value!r} is less than 1 byte. Write {SIZE_FORMS}.")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Print a size with two decimals: ``"6.00 GiB"``, ``"1.50 KiB"``; below 1 KiB ``"12 B"``."""
    return _in_units(num_bytes, BYTE_UNITS)


def format_ns(time_ns: int) -> str:
    """Print a time with two decimals: ``"1.50 s"``, ``"12.00 ms"``; below 1 us ``"12 ns"``."""
    return _in_units(time_ns, TIME_UNITS)


def _in_units(amount: int, units: Sequence[tuple[int, str]]) -> str:
    sign, size = ("-", -amount) if amount < 0 else ("", amount)
    *larger, (_, smallest) = units
    for unit, name in larger:
        # Round first, so that one byte below 1 MiB is "1.00 MiB" and not "1024.00 KiB".
        hundredths = (200 * size + unit) // (2 * unit)
        if hundredths >= 100 and size >= larger[-1][0]:
            return f"{sign}{hundredths // 100}.{hundredths % 100:02} {name}"
    return f"{sign}{size} {smallest}"


def unit_for(most: int, units: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Return the largest unit that is not above a figure, with its name."""
    return next((each for each in units if most >= each[0]), units[-1])


def align_up(nbytes: int, alignment: int) -> int:
    """Return the least multiple of ``alignment`` bytes that is no less than ``nbytes``."""
    return -(-nbytes // alignment) * alignment
