"""Arms are found by name, and one that cannot run says what to install."""

from __future__ import annotations

import dataclasses
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


def test_a_missing_package_is_named_with_its_install_line() -> None:
    arm = dataclasses.replace(ARMS["plain"], package="no_such", install="pip install no-such")
    assert arm.missing == "needs the package no_such: pip install no-such"
    assert ARMS["plain"].missing is None
    gone = dataclasses.replace(ARMS["plain"], module="ds_finepage.compare.no_such")
    assert gone.missing == "this version of ds_finepage has no module ds_finepage.compare.no_such"


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
    observes=False,
    prompt_ids=((1, 2, 3), (4, 5, 6)),
)


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_request(REQUEST, tmp_path / "request.json")
    assert load_request(tmp_path / "request.json") == REQUEST


def test_a_request_with_another_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text('{"arm": "zero"}')
    with pytest.raises(ConfigError, match="is not a request for a run: model_dir: Field required"):
        load_request(path)
