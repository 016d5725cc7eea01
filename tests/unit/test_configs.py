from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.config import DebugConfig, FinepageConfig, section_of
from ds_finepage.planning.policies import POLICIES

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    loaded = json.loads(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


def read(path: Path) -> FinepageConfig:
    return FinepageConfig.from_dict(section_of(load(path)), policies=POLICIES)


def named(name: str) -> Path:
    return next(path for path in CONFIGS if path.stem == name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_is_a_complete_ds_config_for_inference(path: Path) -> None:
    ds_config = load(path)
    assert ds_config["train_micro_batch_size_per_gpu"] == 1
    assert ds_config["zero_optimization"]["stage"] == 3
    offload = ds_config["zero_optimization"]["offload_param"]
    # DeepSpeed's default of pin_memory differs between its versions, so it is always given.
    assert offload["device"] == "cpu" and isinstance(offload["pin_memory"], bool)
    assert "optimizer" not in ds_config and "offload_optimizer" not in ds_config
    assert read(path).enabled is path.stem.startswith("finepage")


def test_the_two_arms_differ_in_one_key_alone() -> None:
    stock, ours = load(named("zero_inference_cpu")), load(named("finepage_cpu"))
    assert (stock["finepage"].pop("enabled"), ours["finepage"].pop("enabled")) == (False, True)
    assert stock == ours


def test_cuda_pins_and_takes_what_is_free() -> None:
    assert load(named("finepage_cuda"))["zero_optimization"]["offload_param"]["pin_memory"]
    assert read(named("finepage_cuda")).device_budget.is_auto


def test_debug_turns_everything_on() -> None:
    assert read(named("finepage_debug")).debug == DebugConfig(
        poison_vacated=True, lane_delay_seed=0
    )
