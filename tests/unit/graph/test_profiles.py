"""Hardware profiles: the shipped ones, a user's own, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.errors import ConfigError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import DETAILS, HardwareProfile
from ds_finepage.graph.hosts import HOSTS
from ds_finepage.graph.profiles import load_profile, profile_names, require_usable

NAMES = (
    *("a100-80gb", "h100-80gb", "h200", "l4", "l40s", "p100-16gb"),
    *("rtx-3090", "rtx-4060-ti-16gb", "rtx-4090", "rtx-5090", "t4", "v100-16gb", "v100-32gb"),
)


def test_names() -> None:
    assert profile_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert ("whitepaper" if name.startswith("rtx") else "datasheet") in profile.source
    assert "sustained" in profile.source
    assert profile.capacity_bytes % 2**30 == 0
    # Orders of magnitude, so that a slipped digit shows.
    assert 1e10 < profile.h2d_bytes_per_s <= profile.memory_bytes_per_s / 10
    assert 1e10 < profile.d2h_bytes_per_s <= profile.memory_bytes_per_s / 10
    assert profile.flops_per_s["default"] == profile.flops_per_s["float32"] > 1e12
    assert profile.flops_per_s["float16"] > profile.flops_per_s["float32"]
    assert "Link between ranks" in profile.source
    assert 5e9 < profile.rank_bytes_per_s < profile.memory_bytes_per_s
    assert profile.rank_latency_ns >= 5000


def test_rates_are_below_the_datasheet() -> None:
    assert load_profile("a100-80gb").flops_per_s["bfloat16"] == pytest.approx(0.6 * 312e12)
    assert load_profile("h200").flops_per_s["bfloat16"] == pytest.approx(0.6 * 989e12)
    assert load_profile("h200").memory_bytes_per_s == pytest.approx(0.8 * 4.8e12)
    assert load_profile("v100-32gb").h2d_bytes_per_s == 12e9
    assert "10.1e9" in load_profile("v100-32gb").source


@pytest.mark.parametrize(
    ("name", "guess"), [("v100-32", "v100-32gb"), ("H200", "h200"), ("a100", "a100-80gb")]
)
def test_unknown_name_with_a_guess(name: str, guess: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{guess}'") as caught:
        load_profile(name)
    assert all(known in str(caught.value) for known in NAMES)


def test_unknown_name_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"unknown hardware profile 'xyz'\. Known: a100-80gb"):
        load_profile("xyz")


def test_profile_of_a_file(tmp_path: Path) -> None:
    mine = dataclasses.replace(load_profile("t4"), name="mine", h2d_bytes_per_s=6e9)
    path = tmp_path / "mine.json"
    codec.save(mine, path)
    assert load_profile(path) == load_profile(str(path)) == mine
    without_suffix = tmp_path / "mine"
    codec.save(mine, without_suffix)
    assert load_profile(without_suffix) == load_profile(str(without_suffix)) == mine


@pytest.mark.parametrize("field", DETAILS)
def test_a_file_may_lack_details(tmp_path: Path, field: str) -> None:
    assert getattr(load_profile(mine(tmp_path, without=field)), field) == 0


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read hardware profile .*none\.json"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"cannot read hardware profile none\.json") as error:
        load_profile("none.json")
    assert "'ds-finepage probe --out' wrote" in str(error.value)
    assert all(name in str(error.value) for name in profile_names())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"capacity_bytes": 0}, "capacity_bytes is 0; it must be positive"),
    ({"capacity_bytes": -5}, "capacity_bytes is -5; it must be positive"),
    ({"h2d_bytes_per_s": 0}, r"h2d_bytes_per_s is 0\.0; it must be positive"),
    ({"d2h_bytes_per_s": -1e9}, r"d2h_bytes_per_s is -1000000000\.0"),
    ({"memory_bytes_per_s": 0}, "memory_bytes_per_s is 0"),
    ({"flops_per_s": {"default": 1e12, "float16": 0}}, r"flops_per_s\.float16 is 0"),
    ({"flops_per_s": {"float16": 1e12}}, "flops_per_s has no 'default'.*float16; add it"),
    ({"flops_per_s": {}}, "flops_per_s has no 'default'.*none; add it"),
    ({"launch_ns": -1}, "launch_ns is -1; it must not be negative"),
    ({"transfer_latency_ns": -1}, "transfer_latency_ns is -1"),
    ({"host_op_ns": -1}, "host_op_ns is -1"),
    ({"host_copy_ns": -1}, "host_copy_ns is -1"),
    ({"rank_latency_ns": -1}, "rank_latency_ns is -1"),
    ({"rank_bytes_per_s": -1.0}, r"rank_bytes_per_s is -1\.0; it must not be negative"),
    ({"copy_shares": [[8, 1.0]]}, "copy_shares: Extra inputs"),
    ({"speed": 1}, "speed: Extra inputs"),
    ({"kind": "taskgraph"}, "kind: .*found 'taskgraph'"),
    ({"format": 2}, "format: .*found 2"),
    ({"launch_ns": "fast"}, "launch_ns: .*valid integer"),
]


def mine(folder: Path, without: str = "", **changes: Any) -> Path:
    """Write a profile like that of the t4."""
    path = folder / "mine.json"
    document = json.loads(codec.dumps(load_profile("t4"))) | changes
    document.pop(without, None)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_figures_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = mine(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"hardware profile .*mine\.json: .*{message}"):
        load_profile(path)


NEEDED = [f.name for f in dataclasses.fields(HardwareProfile) if f.name not in DETAILS]


@pytest.mark.parametrize("field", NEEDED)
def test_missing_figures_are_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: Field required"):
        load_profile(mine(tmp_path, without=field))


def test_corrupt_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"mine\.json: Invalid JSON"):
        load_profile(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(path)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_rates_must_be_finite(rate: float) -> None:
    with pytest.raises(ConfigError, match="must be positive and finite"):
        require_usable(dataclasses.replace(load_profile("t4"), h2d_bytes_per_s=rate))


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_gives_its_memory_to_the_link_first(host: str) -> None:
    plain, found = load_profile("t4"), load_profile(f"t4+{host}")
    assert not plain.has_host and found.has_host and found.name == f"t4+{host}"
    assert found.host_bytes_per_s + plain.h2d_bytes_per_s == HOSTS[host].memory_bytes_per_s
    assert found.host_flops_per_s == HOSTS[host].flops_per_s
    assert HOSTS[host].source in found.source
    assert dataclasses.replace(found.without_host, name="t4", source=plain.source) == plain


def test_a_host_that_is_unknown_or_has_no_memory_to_spare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown host 'desktp'. Did you mean 'desktop'"):
        load_profile("t4+desktp")
    fast = dataclasses.replace(load_profile("t4"), name="fast", h2d_bytes_per_s=1e11)
    codec.save(fast, tmp_path / "a+b.json")
    assert load_profile(str(tmp_path / "a+b.json")) == fast
    with pytest.raises(ConfigError, match="nothing is left to compute with"):
        load_profile(f"{tmp_path / 'a+b.json'}+desktop")
    assert load_profile(f"{tmp_path / 'a+b.json'}+server").has_host
