"""Arms are found by name, and one that cannot run says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_finepage.compare.arms import ARMS, arms_named
from ds_finepage.compare.zero_arms import with_settings
from ds_finepage.errors import ConfigError
from tests.unit.compare.runs import request


def test_all_stands_for_every_arm_once() -> None:
    assert [arm.name for arm in arms_named(["zero", "all"])] == [
        "zero",
        *(name for name in ARMS if name != "zero"),
    ]
    assert [arm.name for arm in arms_named(["finepage", "plain"])] == ["finepage", "plain"]


def test_stock_runs_with_the_settings_of_its_arm(tmp_path: Path) -> None:
    chosen = {"stage3_max_live_parameters": 7}
    ds_config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 9}}
    asked = request("zero", tmp_path, ds_config=ds_config, settings=chosen)
    assert with_settings(asked) == {"zero_optimization": {"stage": 3, **chosen}}


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown arm 'zeros'\. Did you mean 'zero'"):
        arms_named(["zeros"])
