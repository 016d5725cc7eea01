"""Arms are found by name, and one that cannot run says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_finepage.compare.arms import ARMS, arms_named
from ds_finepage.compare.engine import RunRequest, load_request, save_request
from ds_finepage.errors import ConfigError


def test_all_stands_for_every_arm_once() -> None:
    assert [arm.name for arm in arms_named(["zero", "all"])] == [
        "zero",
        *(name for name in ARMS if name != "zero"),
    ]
    assert [arm.name for arm in arms_named(["finepage", "plain"])] == ["finepage", "plain"]


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown arm 'zeros'\. Did you mean 'zero'"):
        arms_named(["zeros"])


REQUEST = RunRequest(
    arm="zero",
    model_dir="model",
    ds_config={"bf16": {"enabled": True}},
    device="cpu",
    budget_bytes=5,
    batch=2,
    prompt_tokens=3,
    new_tokens=4,
    repeats=1,
    settings={"stage3_max_live_parameters": 7},
    prompt_ids=((1, 2, 3), (4, 5, 6)),
)


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_request(REQUEST, tmp_path / "request.json")
    assert load_request(tmp_path / "request.json") == REQUEST
