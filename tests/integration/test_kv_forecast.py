"""Predictions for a KV cache that has no room on the device: counted as a run counts it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ds_finepage import whatif
from ds_finepage.api import attach
from ds_finepage.cli import curve, grid
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.pipeline import needs_of
from ds_finepage.whatif import CapturedModel, capture_model, forms_of, plan_captured, that_fits
from tests.commands import Cli
from tests.integration.cli.models import NUM_PARAMETERS, card, small_model
from tests.integration.families import CACHE, greedy

BATCH, SEQ = 8, 64
ROW = 2 * BATCH * 256 * 2  # bytes of one token in one of two layers: keys and values
KV_BYTES = 2 * SEQ * ROW
PROFILE = dataclasses.replace(
    load_profile("t4"), h2d_bytes_per_s=1e9, d2h_bytes_per_s=5e8, transfer_latency_ns=0
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


def captured(model: Path, phase: str) -> CapturedModel:
    return capture_model(str(model), phase=phase, batch=BATCH, seq=SEQ, profile=PROFILE)


@pytest.fixture(scope="module")
def decode(model: Path) -> CapturedModel:
    return captured(model, "decode")


@pytest.fixture(scope="module")
def prefill(model: Path) -> CapturedModel:
    return captured(model, "prefill")


def least_on_device(found: CapturedModel) -> int:
    """Return the least budget with the KV cache on the device, embeddings looked up by row."""
    needs = needs_of(found.graph, alignment=512, cuts_weights=False)
    return found.needs.non_arena_bytes + needs.min_arena_bytes


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache does not compete with the weights, as a small one."""
    monkeypatch.setattr(whatif, "competes", lambda *_: False)


# The place.


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_large_cache_competes_with_weights_that_do_not_all_fit(
    phase: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(phase)
    fits = 2 * NUM_PARAMETERS + KV_BYTES
    for budget_bytes, kv_on_host in ((fits, False), (fits - 1, True)):
        settings = {"budget_bytes": budget_bytes, "profile": PROFILE}
        assert plan_captured(found, **settings).figures.kv_on_host is kv_on_host
        assert not plan_captured(found, **settings, kv_cache="device").figures.kv_on_host


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("policy", ["finepage", "horizon"])
def test_in_a_run_the_cache_moves_only_where_it_does_not_fit(
    phase: str, policy: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(phase)
    least = least_on_device(found)
    for budget_bytes, kv_on_host in ((least, False), (least - 1, True)):
        figures = plan_captured(
            found, budget_bytes=budget_bytes, profile=PROFILE, policy=policy, split=False
        ).figures
        assert figures.kv_on_host is kv_on_host
        assert figures.kv_bytes == KV_BYTES
        assert figures.weight_bytes == 2 * NUM_PARAMETERS
        assert figures.peak_bytes <= budget_bytes
        assert figures.min_budget_bytes < least
        assert figures.host_bytes >= 2 * NUM_PARAMETERS + KV_BYTES * kv_on_host
        # Old rows in, with room behind them, and new ones out; but for those that are kept.
        assert (0 < figures.kv_copied_bytes <= KV_BYTES + 2 * ROW) is kv_on_host
        if phase == "prefill":
            assert figures.kv_copied_bytes == KV_BYTES * kv_on_host


FAST_WRITES = dataclasses.replace(PROFILE, d2h_bytes_per_s=1.5e9)
"""With it, weights that a KV cache keeps from the device take longer than its new rows."""


@pytest.mark.parametrize("policy", ["finepage", "horizon"])
def test_the_cache_is_in_host_memory_where_the_user_wants_it(
    policy: str, prefill: CapturedModel
) -> None:
    """And the pass is faster so, on this machine."""
    assert prefill.on_host is not None
    settings = {"budget_bytes": least_on_device(prefill), "profile": FAST_WRITES, "policy": policy}
    here = plan_captured(prefill, **settings, kv_cache="device").figures
    there = plan_captured(prefill, **settings, kv_cache="host").figures
    assert there.kv_on_host and not here.kv_on_host
    assert there.predicted_ns < here.predicted_ns
    same = plan_captured(prefill.on_host, **settings).figures
    assert there.predicted_ns == same.predicted_ns


def test_a_policy_that_keeps_the_cache_on_the_device_is_not_asked_for_another_place(
    prefill: CapturedModel,
) -> None:
    with pytest.raises(ConfigError, match="policy zero keeps the KV cache on the device"):
        plan_captured(prefill, budget_bytes=10**9, profile=PROFILE, policy="zero", kv_cache="host")


def test_a_refusal_names_the_budget_with_the_cache_in_host_memory(decode: CapturedModel) -> None:
    with pytest.raises(PlanInfeasibleError, match="^even with the KV cache in host memory, task"):
        plan_captured(decode, budget_bytes=1, profile=PROFILE, split=False)
    least = plan_captured(decode, budget_bytes=10**9, profile=PROFILE, split=False)
    least_bytes = least.figures.min_budget_bytes
    figures = plan_captured(decode, budget_bytes=least_bytes, profile=PROFILE, split=False).figures
    assert figures.kv_on_host and figures.budget_bytes == figures.min_budget_bytes == least_bytes
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_captured(decode, budget_bytes=least_bytes - 1, profile=PROFILE, split=False)
    assert caught.value.min_budget_bytes == least_bytes


def test_policies_that_stand_for_other_systems_keep_the_cache_on_the_device(
    decode: CapturedModel,
) -> None:
    least = least_on_device(decode)
    with pytest.raises(PlanInfeasibleError, match="^task "):
        plan_captured(decode, budget_bytes=least - 1, profile=PROFILE, policy="zero")
    figures = plan_captured(decode, budget_bytes=10**9, profile=PROFILE, policy="zero").figures
    assert figures.min_budget_bytes >= decode.needs.min_budget_bytes


def test_a_model_whose_layers_all_have_windows_has_one_form_only(tmp_path: Path) -> None:
    path = small_model(tmp_path, model_type="mistral", sliding_window=4)
    found = capture_model(str(path), phase="decode", batch=1, seq=SEQ, profile=PROFILE)
    assert found.on_host is None
    wanted = plan_captured(found, budget_bytes=10**9, profile=PROFILE, kv_cache="host")
    assert not wanted.figures.kv_on_host
    assert that_fits(forms_of(found, policy="finepage", split=True), 1)[0] is found


# Copies, in the time and in the bounds.


def test_a_step_brings_in_the_rows_that_have_no_room(decode: CapturedModel) -> None:
    assert decode.on_host is not None
    missing = KV_BYTES // 2
    needed = decode.on_host.needs.needed_budget_bytes
    for budget_bytes in (10**9, needed - missing):
        planned = plan_captured(
            decode.on_host, budget_bytes=budget_bytes, profile=PROFILE, split=False
        )
        figures = planned.figures
        if budget_bytes == 10**9:
            assert figures.reloaded_bytes == figures.lower_bound_bytes == 0
            assert figures.kv_copied_bytes == 2 * ROW
        else:
            assert 0 < figures.lower_bound_bytes <= figures.reloaded_bytes < missing + KV_BYTES
            assert figures.lower_bound_ns >= figures.lower_bound_bytes  # 1 ns a byte
            assert figures.predicted_ns >= figures.lower_bound_ns


def test_a_prefill_writes_its_rows_beside_its_tasks(prefill: CapturedModel) -> None:
    assert prefill.on_host is not None
    budget_bytes = prefill.needs.needed_budget_bytes
    here = plan_captured(prefill.on_host, budget_bytes=budget_bytes, profile=PROFILE).figures
    link_ns = 2 * KV_BYTES  # 2 ns a byte
    assert here.compute_ns < link_ns == here.lower_bound_ns
    assert link_ns <= here.predicted_ns < link_ns + here.compute_ns
    assert here.reloaded_bytes == here.lower_bound_bytes == 0


def test_weights_that_make_room_for_rows_are_in_the_bound(decode: CapturedModel) -> None:
    assert decode.on_host is not None
    budget_bytes = decode.on_host.needs.non_arena_bytes + NUM_PARAMETERS
    for split in (True, False):
        figures = plan_captured(
            decode.on_host, budget_bytes=budget_bytes, profile=PROFILE, split=split
        ).figures
        rows = KV_BYTES - 2 * ROW
        rows -= KV_BYTES // 2  # those that attention reads may be among the kept ones
        assert rows + NUM_PARAMETERS < figures.lower_bound_bytes <= figures.reloaded_bytes


# Host memory.


def test_host_memory_that_is_known_has_to_be_enough(decode: CapturedModel) -> None:
    assert decode.on_host is not None
    budget_bytes = least_on_device(decode) - 1
    host_bytes = decode.on_host.host_bytes
    assert host_bytes == 2 * NUM_PARAMETERS + KV_BYTES * 96 // SEQ  # with room behind the rows

    def plan(host_memory_bytes: int) -> None:
        plan_captured(
            decode,
            budget_bytes=budget_bytes,
            profile=PROFILE,
            split=False,
            host_memory_bytes=host_memory_bytes,
        )

    plan(host_bytes)
    with pytest.raises(PlanInfeasibleError, match=rf"need .* \({host_bytes} bytes\) of host memor"):
        plan(host_bytes - 1)


def test_host_memory_of_a_cache_is_that_of_a_run(model: Path) -> None:
    prompt, new, batch = 100, 13, 2
    shape: dict[str, Any] = {"phase": "decode", "batch": batch, "seq": prompt + new - 1}
    step = capture_model(str(model), **shape, profile=PROFILE, dtype="float32").on_host
    assert step is not None
    forecast_bytes = step.host_bytes - step.graph.weight_bytes
    config = transformers.AutoConfig.from_pretrained(model)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    handle = attach(module, device_budget="60%weights", device="cpu", profile=PROFILE)
    cache = transformers.DynamicCache(config=config)
    ids = torch.randint(4, 400, (batch, prompt))
    greedy(module, input_ids=ids, max_new_tokens=new, **{CACHE: cache})
    rooms = {
        rows.untyped_storage() for layer in cache.layers for rows in (layer.keys, layer.values)
    }
    assert handle.stats.num_caches_on_host == 1
    assert sum(room.nbytes() for room in rooms) == forecast_bytes


@pytest.mark.parametrize("command", ["plan", "curve", "grid"])
def test_host_memory_is_a_size(command: str, model: Path, cli: Cli) -> None:
    name = "--models" if command == "grid" else "--model"
    call = cli.of(command, name, model, "--hardware", "t4", "--seq", "64", "--host-memory")
    call.refuses("plenty", says="--host-memory: cannot read 'plenty' as a size")
    said = call("1MiB", status=0 if command == "grid" else 2)
    assert "of host memory; --host-memory is 1048576 bytes" in said.out + said.err


# Both passes of a generation.


def cell_of(model: Path, folder: Path, budget_bytes: int) -> tuple[grid.Cell, Any]:
    """Plan a cell of a grid for the machine of :func:`curve_of`."""
    machine = str(folder / "profile.json")
    cell = grid.Cell(model=str(model), hardware=machine, batch=BATCH, seq=SEQ, policy="finepage")
    budget = DeviceBudget.parse(budget_bytes)
    return cell, grid.Planner(budget=budget, settings={"split": False}).plan(cell)


def curve_of(model: Path, profile: HardwareProfile, folder: Path) -> curve.Making:
    path = folder / "profile.json"
    codec.save(profile, path)
    sizes = {"model": str(model), "batch": BATCH, "prompt_tokens": SEQ}
    return "finepage", tuple({**sizes, "hardware": str(path), "split": False}.items())


@pytest.mark.usefixtures("beside")
def test_a_step_finds_the_cache_where_the_prefill_left_it(
    model: Path, decode: CapturedModel, prefill: CapturedModel, tmp_path: Path
) -> None:
    """The budget has room for the step's cache on the device, and not for the prefill's."""
    budget_bytes = least_on_device(prefill) - 1
    assert least_on_device(decode) <= budget_bytes
    made = curve_of(model, PROFILE, tmp_path)
    assert curve.point_of(made, budget_bytes).decode_kv_on_host
    modeller = curve.modeller_of(made[1])
    assert modeller.at(budget_bytes).step("finepage").figures.kv_on_host
    assert not curve.point_of(made, budget_bytes + 1).decode_kv_on_host
    assert curve.ends_of(made)[0] < budget_bytes

    cell, result = cell_of(model, tmp_path, budget_bytes)
    assert isinstance(result, grid.Point)
    assert result.prefill_kv_on_host and result.decode_kv_on_host
    assert result.weight_bytes == 2 * NUM_PARAMETERS
    assert 0 < result.kv_copied_bytes <= KV_BYTES + 2 * ROW
    table = grid.to_table({cell: result})
    assert str(table.title).endswith("(h: the KV cache is in host memory)")
    assert list(table.columns[4].cells)[0].endswith(" h")


@pytest.mark.usefixtures("beside")
def test_both_passes_have_the_cache_where_a_run_has_it(
    model: Path, prefill: CapturedModel, tmp_path: Path
) -> None:
    """A prefill would be faster with it in host memory."""
    budget_bytes = least_on_device(prefill)
    in_a_run = plan_captured(
        prefill, budget_bytes=budget_bytes, profile=FAST_WRITES, split=False
    ).figures
    point = curve.point_of(curve_of(model, FAST_WRITES, tmp_path), budget_bytes)
    assert (point.decode_kv_on_host, point.first_token_ns) == (False, in_a_run.predicted_ns)
    _, result = cell_of(model, tmp_path, budget_bytes)
    assert isinstance(result, grid.Point)
    assert (result.prefill_kv_on_host, result.decode_kv_on_host) == (False, False)
    assert result.first_token_ns == in_a_run.predicted_ns


def test_the_commands_say_where_the_cache_is(
    model: Path, decode: CapturedModel, prefill: CapturedModel, tmp_path: Path, cli: Cli
) -> None:
    given = ["--model", model, "--hardware", card(tmp_path), "--batch", BATCH]
    given += ["--seq", SEQ, "--no-split"]
    plan = cli.of("plan", *given, "--device-budget")
    assert "1.00 MiB in host memory" in plan(least_on_device(decode) - 1).out
    least = [least_on_device(prefill), "--phase", "prefill"]
    for place, words in (
        ("device", "on the device"),
        ("host", "in host memory"),
        ("auto", "in host memory"),
    ):
        assert f"1.00 MiB {words}" in plan(*least, "--kv-cache", place).out
    points = cli.json("curve", *given, "--points", "2")["points"]
    assert [point["decode_kv_on_host"] for point in points] == [True, False]
