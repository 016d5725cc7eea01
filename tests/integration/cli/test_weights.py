"""``--weights`` of the commands that plan: packed bytes everywhere, and clear refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_finepage import api, whatif
from ds_finepage.capture.models import load_model_config
from ds_finepage.cli import grid
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.graph.packed import PACKED_PRODUCTS
from ds_finepage.graph.profiles import load_profile
from ds_finepage.packing.form import packed_form
from tests.commands import Cli
from tests.integration.cli.models import NUM_PARAMETERS, card, small_model

LINEAR_PARAMETERS = 2 * (4 * 256 * 256 + 3 * 256 * 512)
OTHER_BYTES = 2 * (NUM_PARAMETERS - LINEAR_PARAMETERS)
PACKED_BYTES = {
    "bf16": 2 * LINEAR_PARAMETERS,
    "int8": LINEAR_PARAMETERS + LINEAR_PARAMETERS // 64 * 4,
    "int4": LINEAR_PARAMETERS // 2 + LINEAR_PARAMETERS // 64 * 4,
}
"""Of the linear layers, with a scale and a minimum of 16 bits for each group of 64."""

PARAMETERS_AS_STOCK = [
    *2 * [500 * 256],
    *5 * [256],
    *8 * [256 * 256 * 9 // 32],
    *6 * [256 * 512 * 9 // 32],
]
"""Elements of the parameters in int4, where a layer has one packed parameter of 16 bits."""

FORMS = tuple(PACKED_BYTES)
QUANTISED = {"quant_method": "torchao", "quant_type": "int8_weight_only"}


def commands(model: str) -> dict[str, list[str]]:
    shape = ["--seq", "64", "--hardware", "t4"]
    return {
        "plan": ["plan", "--model", model, *shape],
        "curve": ["curve", "--model", model, *shape, "--points", "4"],
        "grid": ["grid", "--models", model, *shape, "--policies", "finepage"],
        "compare": ["compare", "--model", model, "--prompt", "8"],
        "demo": ["demo", "--model", model],
    }


# Packed bytes count.


@pytest.mark.parametrize("form", FORMS)
def test_bytes_bounds_and_budget_are_those_of_the_form(model: str, form: str, cli: Cli) -> None:
    command = [*commands(model)["plan"], "--device-budget", "60%weights", "--weights", form]
    figures = cli.json(*command)
    weight_bytes = OTHER_BYTES + PACKED_BYTES[form]
    assert figures["weight_bytes"] == weight_bytes
    assert figures["budget_bytes"] == weight_bytes * 6 // 10
    assert figures["peak_bytes"] <= figures["budget_bytes"]
    assert 0 < figures["lower_bound_bytes"] <= figures["reloaded_bytes"] < weight_bytes
    assert figures["weights"] == (None if form == "bf16" else f"{form}, group 64")


def test_sixteen_bits_are_those_that_suit_the_card(tmp_path: Path, cli: Cli) -> None:
    model = str(small_model(tmp_path, torch_dtype="float32"))
    command = commands(model)["plan"]
    assert cli.json(*command)["weight_bytes"] == 4 * NUM_PARAMETERS
    assert cli.json(*command, "--weights", "bf16")["weight_bytes"] == 2 * NUM_PARAMETERS


def test_the_group_is_counted(model: str, cli: Cli) -> None:
    command = [*commands(model)["plan"], "--weights", "int4", "--weights-group", "32"]
    figures = cli.json(*command)
    packed = LINEAR_PARAMETERS // 2 + LINEAR_PARAMETERS // 32 * 4
    assert figures["weight_bytes"] == OTHER_BYTES + packed
    out = cli(*command).out
    assert "(int4, group 32)" in out and "--weights int4 --weights-group 32" in out


def test_tied_weights_stay_tied(tmp_path: Path, cli: Cli) -> None:
    model = str(small_model(tmp_path, tie_word_embeddings=True))
    figures = cli.json(*commands(model)["plan"], "--weights", "int8")
    assert figures["weight_bytes"] == OTHER_BYTES - 2 * 500 * 256 + PACKED_BYTES["int8"]


def captured_of(model: str, weights: str, seq: int = 64, **how: bool) -> whatif.CapturedModel:
    shape = {"phase": "decode", "batch": 1, "seq": seq, "profile": load_profile("t4")}
    return whatif.capture_model(model, weights=weights, **shape, **how)  # type: ignore[arg-type]


def test_a_kv_cache_in_host_memory_leaves_the_weights_packed(model: str) -> None:
    captured = captured_of(model, "int4")
    assert captured.on_host is not None
    assert captured.on_host.graph.weight_bytes == captured.graph.weight_bytes
    assert captured.on_host.weights == captured.weights == "int4, group 64"


def test_fused_products_are_predicted_without_unpacking(model: str) -> None:
    sliced, fused = (captured_of(model, "int4", fused_unpacking=f) for f in (False, True))
    for before, after in zip(sliced.graph.tasks, fused.graph.tasks, strict=True):
        if before.op in PACKED_PRODUCTS:
            assert after.moved_bytes < before.moved_bytes / 8
            assert after.workspace_bytes == 0 < before.workspace_bytes
        else:
            assert after.moved_bytes == before.moved_bytes
    assert fused.graph.weight_bytes == sliced.graph.weight_bytes


@pytest.mark.parametrize(
    ("weights", "share"), [("int4", 0.31), ("int8", 0.31), ("int4+output", 0.26)]
)
def test_packed_weights_need_a_third_of_the_least_budget(
    weights: str, share: float, tmp_path: Path
) -> None:
    """At the dimensions of LLaMA-7B with 1,024 tokens. The number of layers changes nothing."""
    model = str(
        small_model(
            tmp_path,
            num_hidden_layers=1,
            hidden_size=4096,
            intermediate_size=11008,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=32000,
            max_position_embeddings=2048,
        )
    )
    least = {}
    for form in ("bf16", weights):
        captured = captured_of(model, form, 1024)
        plan = partial(whatif.plan_captured, captured, profile=load_profile("t4"), split=False)
        least[form] = plan(budget_bytes=1 << 30).figures.min_budget_bytes
        at_least = plan(budget_bytes=least[form]).figures
        assert at_least.peak_bytes <= least[form] == at_least.min_budget_bytes
        with pytest.raises(PlanInfeasibleError):
            plan(budget_bytes=least[form] - 512)
    assert least[weights] <= share * least["bf16"]


def test_four_bits_reload_at_most_three_tenths_under_the_same_share(
    tmp_path: Path, cli: Cli
) -> None:
    """Where nearly all weights are packed: one takes 4.5 bits, with its scale and minimum."""
    model = str(small_model(tmp_path, num_hidden_layers=32, vocab_size=100))
    command = [*commands(model)["plan"], "--device-budget", "15%weights", "--seq", "8"]
    plain, packed = (
        cli.json(*command, "--no-split", "--weights", form)["reloaded_bytes"]
        for form in ("bf16", "int4")
    )
    assert 0.28 * plain < packed <= 0.3 * plain


# Several forms in one table.


def test_a_grid_has_a_row_for_each_form(model: str, cli: Cli) -> None:
    command = [*commands(model)["grid"], "--device-budget", "2MiB", "--weights", ",".join(FORMS)]
    cells = cli.json(*command)["cells"]
    assert [cell["weights"] for cell in cells] == list(FORMS)
    for cell, form in zip(cells, FORMS, strict=True):
        assert cell["weight_bytes"] == OTHER_BYTES + PACKED_BYTES[form]
        assert cell["budget_bytes"] == 2 << 20
        assert cell["row"]["decode"]["winner"] == "finepage"
    reloaded = [cell["decode_reloaded_bytes"] for cell in cells]
    assert reloaded == sorted(reloaded, reverse=True) and reloaded[0] > 2 * reloaded[2]
    out = cli(*command).out
    assert "weights" in out and all(form in out for form in FORMS)


def test_a_grid_without_forms_has_no_column_for_them(model: str, cli: Cli) -> None:
    assert "weights" not in cli(*commands(model)["grid"]).out
    cells = cli.json(*commands(model)["grid"])["cells"]
    assert [cell["weights"] for cell in cells] == [None]


def test_a_curve_plans_all_forms_under_the_same_budgets(
    model: str, tmp_path: Path, cli: Cli
) -> None:
    slow = card(tmp_path, "slow", h2d_bytes_per_s=1e9)
    command = [*commands(model)["curve"], "--hardware", str(slow), "--weights", "bf16,int4"]
    curves = cli.json(*command)
    assert [curve["weights"] for curve in curves] == ["bf16", "int4"]
    plain, packed = ({p["budget_bytes"]: p for p in curve["points"]} for curve in curves)
    both = sorted(plain.keys() & packed.keys())
    assert len(both) >= 2 and max(plain) == max(packed) == both[-1]
    for budget in both[:-1]:
        assert plain[budget]["tokens_per_s"] < packed[budget]["tokens_per_s"]
    assert plain.keys() != packed.keys()  # a budget that is too small for a form is left out
    out = cli(*command).out
    assert "bf16 tok/s" in out and "int4 tok/s" in out and " - " in out


def test_a_curve_of_one_form_is_named_after_it(model: str, cli: Cli) -> None:
    command = [*commands(model)["curve"], "--weights", "int4"]
    curve = cli.json(*command)
    assert curve["weights"] == "int4" and len(curve["points"]) == 4
    assert " in int4, batch 1" in cli(*command).words


# Stock with packed weights.


def test_stock_is_modelled_with_its_own_packing(model: str, cli: Cli) -> None:
    """It fetches packed bytes, and its settings count elements of 16 bits."""
    command = [*commands(model)["plan"], "--weights", "int4", "--device-budget", "200%weights"]
    ours = cli.json(*command)
    stock = cli.json(*command, "--policy", "zero")
    assert stock["weights"] == "int4, group 64, modelled as DeepSpeed packs"
    assert stock["weight_bytes"] == ours["weight_bytes"] == OTHER_BYTES + PACKED_BYTES["int4"]
    kept = sum(2 * count for count in PARAMETERS_AS_STOCK if count <= 100_000)
    assert stock["reloaded_bytes"] == stock["weight_bytes"] - kept


def test_a_grid_says_that_stock_is_modelled(model: str, cli: Cli) -> None:
    words = "zero*, int4: modelled"
    for policies, forms, expected in (
        ("zero,finepage", "bf16,int4", 1),
        ("finepage", "int4", 0),
        ("zero", "bf16", 0),
    ):
        command = [*commands(model)["grid"], "--policies", policies, "--weights", forms]
        assert cli(*command).out.count(words) == expected


# Caches that keep passes.


def test_cells_of_another_form_are_captured_again(model: str) -> None:
    planner = grid.Planner(budget=DeviceBudget(), settings={"split": True})
    results = [
        planner.plan(
            grid.Cell(model=model, hardware="t4", batch=1, seq=64, policy="finepage", weights=form)
        )
        for form in (None, *FORMS, None)
    ]
    sizes = [result.weight_bytes for result in results if not isinstance(result, str)]
    assert sizes[0] == sizes[-1] == sizes[1] == 2 * NUM_PARAMETERS
    assert sizes[2:4] == [OTHER_BYTES + PACKED_BYTES[form] for form in ("int8", "int4")]


# What is refused.


@pytest.mark.parametrize("name", ["plan", "curve", "grid", "compare", "demo"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--weights", "int3"], ["unknown form 'int3'", "Did you mean 'int", "bf16, int8, int4"]),
        (["--weights", "int4", "--weights-group", "7"], ["groups of 7", "even number"]),
        (["--weights", "int8", "--weights-group", "0"], ["groups of 0", "even number"]),
        (["--weights", "int4", "--weights-group", "48"], ["groups of 48 do not divide"]),
        (["--weights", ","], ["--weights", "names nothing"]),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(
    name: str, options: list[str], words: list[str], model: str, cli: Cli
) -> None:
    (Path(model) / "model.safetensors").touch()
    if name == "grid" and "48" in options:  # a cell that does not run
        assert "groups of 48" in cli(*commands(model)[name], *options).out
    else:
        cli.refuses(*commands(model)[name], *options, says=words)


@pytest.mark.parametrize(
    ("name", "status"), [("plan", 2), ("curve", 2), ("compare", 2), ("grid", 0)]
)
def test_a_model_that_is_quantised_already_is_refused(
    name: str, status: int, tmp_path: Path, cli: Cli
) -> None:
    model = small_model(tmp_path, quantization_config=QUANTISED)
    (model / "model.safetensors").touch()
    said = cli(*commands(str(model))[name], "--weights", "int4", status=status)
    shown = said.err if status else said.out  # a grid has a cell that does not run
    assert "quantised already (quantization_config: torchao)" in " ".join(shown.split())


def test_a_quantised_model_is_not_even_asked_for_sixteen_bits(tmp_path: Path) -> None:
    config = load_model_config(str(small_model(tmp_path, quantization_config=QUANTISED)))
    with pytest.raises(ConfigError, match="'bf16' cannot be had"):
        packed_form(config, "bf16")
    assert packed_form(config, None) is None


@pytest.mark.parametrize("name", ["plan", "compare", "demo"])
def test_one_form_where_one_is_taken(name: str, model: str, cli: Cli) -> None:
    words = "names several forms. Write one"
    cli.refuses(*commands(model)[name], "--weights", "int8,int4", says=words)


def test_the_function_plans_packed_weights_too(model: str) -> None:
    planned = api.plan_model(
        model,
        phase="decode",
        batch=1,
        seq=64,
        device_budget="60%weights",
        hardware="t4",
        weights="int8",
        weights_group=128,
    )
    assert planned.figures.weights == "int8, group 128"


def test_the_json_of_a_grid_names_the_forms(model: str, cli: Cli) -> None:
    forms = ["--weights", "int8,int4", "--weights-group", "32"]
    command = cli.json(*commands(model)["grid"], *forms)["command"]
    assert " --weights int8,int4 --weights-group 32 " in command


# Models with experts: plans, their bounds, tables, and stock beside them.

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
def experts(tmp_path: Path) -> str:
    return str(small_model(tmp_path, **MIXTRAL))


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_no_plan_of_packed_experts_beats_its_bounds(experts: str, split: bool) -> None:
    profile = load_profile("t4")
    captured = whatif.capture_model(
        experts, phase="decode", batch=1, seq=128, profile=profile, weights="int4"
    )
    whole = captured.graph.weight_bytes
    for budget in (whole * 2 // 3, whole * 3 // 4, whole):
        made = whatif.plan_captured(captured, budget_bytes=budget, profile=profile, split=split)
        figures = made.figures
        assert figures.lower_bound_ns <= figures.predicted_ns
        assert figures.lower_bound_bytes <= figures.reloaded_bytes < whole


def test_tables_hold_packed_experts(experts: str, cli: Cli) -> None:
    shape = ["--seq", "128", "--hardware", "t4"]
    curves = cli.json("curve", "--model", experts, *shape, "--points", "3", "--weights", "int4")
    points = curves["points"]
    assert [p["tokens_per_s"] for p in points] == sorted(p["tokens_per_s"] for p in points)
    assert all(p["decode_bound_ns"] <= p["decode_ns"] for p in points)
    grid = ["grid", "--models", experts, *shape, "--device-budget", "200%weights"]
    policies = ["--policies", "zero,horizon,finepage", "--weights", "bf16,int4"]
    cells = cli.json(*grid, *policies)["cells"]
    reloaded = {(c["weights"], c["policy"]): c["decode_reloaded_bytes"] for c in cells}
    assert len(reloaded) == 6
    assert reloaded["int4", "finepage"] == 0 < reloaded["int4", "zero"]
    assert reloaded["int4", "zero"] <= 0.3 * reloaded["bf16", "zero"]


def test_stock_fetches_all_packed_experts(experts: str, cli: Cli) -> None:
    command = ["plan", "--model", experts, "--seq", "128", "--hardware", "t4", "--weights", "int4"]
    stock = cli.json(*command, "--device-budget", "200%weights", "--policy", "zero")
    assert stock["weights"] == "int4, group 64, modelled as DeepSpeed packs"
    width, num_layers = MIXTRAL["hidden_size"], MIXTRAL["num_hidden_layers"]
    norms, routers = (2 * num_layers + 1) * width, num_layers * 8 * width
    key_and_value = 2 * num_layers * width * (width // 4) * 9 // 32
    kept = norms + routers + (key_and_value if width * (width // 4) * 9 // 32 <= PERSISTENT else 0)
    assert stock["reloaded_bytes"] == stock["weight_bytes"] - 2 * kept
