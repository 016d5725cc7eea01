from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_finepage.errors import ConfigError
from ds_finepage.units import GIB, align_up, format_bytes, format_ns, parse_bytes


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1, 1),
        (6442450944, 6 * GIB),
        ("6442450944", 6 * GIB),
        ("17B", 17),
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        (" 512 MiB ", 512 * 1024**2),
        ("1.5KiB", 1536),
        ("2TiB", 2 * 1024**4),
        ("1kB", 1000),
        ("3MB", 3_000_000),
        ("1.5GB", 1_500_000_000),
        ("1TB", 10**12),
        ("0.3KiB", 307),  # 307.2: the fraction of a byte is cut off
        ("1.1GB", 1_100_000_000),  # exact, where a float would be off
    ],
)
def test_sizes_are_read(value: str | int, num_bytes: int) -> None:
    assert parse_bytes(value) == num_bytes


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "1e9",
        "6G",
        "0x10",
        "1,5GB",
        ".5GB",
        "5.GB",
        "nan",
        "40%",
        "٦GiB",
        "9" * 5000,
        "0",
        "0.1B",
        -1,
        True,
        1.5,
        None,
    ],
)
def test_anything_else_is_refused_and_the_forms_are_named(value: object) -> None:
    with pytest.raises(ConfigError, match=r'(?s)^--budget: .*"6GiB".*powers of 1024.*"1\.5GB"'):
        parse_bytes(value, name="--budget")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1000 * 1024, "1000.00 KiB"),
        (7 * GIB + GIB // 4, "7.25 GiB"),
        (4096 * GIB, "4096.00 GiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_sizes_are_printed(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 us"),
        (999_999, "1.00 ms"),
        (12_345_678, "12.35 ms"),
        (1_500_000_000, "1.50 s"),
        (90_000_000_000, "90.00 s"),
        (-1500, "-1.50 us"),
    ],
)
def test_times_are_printed(time_ns: int, text: str) -> None:
    assert format_ns(time_ns) == text


@given(st.integers(1, 2**60))
def test_what_is_printed_is_read_back_to_two_decimals(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert re.fullmatch(r"\d+ B|\d+\.\d\d [KMG]iB", text)
    assert abs(parse_bytes(text) - num_bytes) <= num_bytes * 0.005


@pytest.mark.parametrize(
    ("nbytes", "alignment", "expected"),
    [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (100, 1, 100), (100, 512, 512)],
)
def test_sizes_are_rounded_up(nbytes: int, alignment: int, expected: int) -> None:
    assert align_up(nbytes, alignment) == expected
