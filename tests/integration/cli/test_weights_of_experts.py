"""``--weights`` for a model with experts: plans, their bounds, tables, and stock beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_finepage import whatif
from ds_finepage.graph.profiles import load_profile
from tests.commands import Cli
from tests.integration.cli.models import small_model

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
PERSISTENT = 100_000
"""Elements of a parameter that stock keeps on the device, at most."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(small_model(tmp_path, **MIXTRAL))


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_no_plan_beats_its_bounds(model: str, split: bool) -> None:
    profile = load_profile("t4")
    captured = whatif.capture_model(
        model, phase="decode", batch=1, seq=128, profile=profile, weights="int4"
    )
    whole = captured.graph.weight_bytes
    for budget in (whole * 2 // 3, whole * 3 // 4, whole):
        made = whatif.plan_captured(captured, budget_bytes=budget, profile=profile, split=split)
        figures = made.figures
        assert figures.lower_bound_ns <= figures.predicted_ns
        assert figures.lower_bound_bytes <= figures.reloaded_bytes < whole


def test_tables_hold_packed_experts(model: str, cli: Cli) -> None:
    shape = ["--seq", "128", "--hardware", "t4"]
    curves = cli.json("curve", "--model", model, *shape, "--points", "3", "--weights", "int4")
    points = curves["points"]
    assert [p["tokens_per_s"] for p in points] == sorted(p["tokens_per_s"] for p in points)
    assert all(p["decode_bound_ns"] <= p["decode_ns"] for p in points)
    grid = ["grid", "--models", model, *shape, "--device-budget", "200%weights"]
    policies = ["--policies", "zero,horizon,finepage", "--weights", "bf16,int4"]
    cells = cli.json(*grid, *policies)["cells"]
    reloaded = {(c["weights"], c["policy"]): c["decode_reloaded_bytes"] for c in cells}
    assert len(reloaded) == 6
    assert reloaded["int4", "finepage"] == 0 < reloaded["int4", "zero"]
    assert reloaded["int4", "zero"] <= 0.3 * reloaded["bf16", "zero"]


def test_stock_fetches_all_packed_experts(model: str, cli: Cli) -> None:
    command = ["plan", "--model", model, "--seq", "128", "--hardware", "t4", "--weights", "int4"]
    stock = cli.json(*command, "--device-budget", "200%weights", "--policy", "zero")
    assert stock["weights"] == "int4, group 64, modelled as DeepSpeed packs"
    width, num_layers = MIXTRAL["hidden_size"], MIXTRAL["num_hidden_layers"]
    norms, routers = (2 * num_layers + 1) * width, num_layers * 8 * width
    key_and_value = 2 * num_layers * width * (width // 4) * 9 // 32
    kept = norms + routers + (key_and_value if width * (width // 4) * 9 // 32 <= PERSISTENT else 0)
    assert stock["reloaded_bytes"] == stock["weight_bytes"] - 2 * kept
