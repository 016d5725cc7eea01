"""``plan --batch auto``: the batch that makes most tokens a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_finepage.cli import main
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.modeller import Modeller
from tests.commands import Cli
from tests.integration.cli.models import card, small_model

BUDGET, SEQ, NEW = 1_500_000, 64, 16


@pytest.fixture
def plan(model: str, tmp_path: Path) -> list[str]:
    slow = card(tmp_path, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    given = ["plan", "--seq", str(SEQ), "--new", str(NEW), "--hardware", str(slow), "--model"]
    return [*given, model, "--batch", "auto", "--device-budget", str(BUDGET)]


def test_it_is_as_good_as_the_best_of_all(plan: list[str], cli: Cli) -> None:
    found = cli.json(*plan)
    speeds = {}
    for batch in range(1, 3 * found["planned"]["batch"]):
        modeller = Modeller(
            plan[plan.index("--model") + 1],
            batch=batch,
            prompt_tokens=SEQ - NEW,
            new_tokens=NEW,
            device_budget=str(BUDGET),
            hardware=plan[plan.index("--hardware") + 1],
            split=True,
        )
        try:
            prefill, step = modeller.figures("finepage")
        except PlanInfeasibleError:
            break
        assert prefill.modelled_ns is not None and step.modelled_ns is not None
        speeds[batch] = batch * NEW * 1e9 / (prefill.modelled_ns + (NEW - 1) * step.modelled_ns)
    best = found["planned"]
    assert 1 < best["batch"] and best["tokens_per_s"] >= 0.98 * max(speeds.values())
    assert best["tokens_per_s"] == pytest.approx(speeds[best["batch"]])
    at_most = {p["batch"]: p["tokens_per_s"] for p in found["curve"]}
    assert at_most[1] >= speeds[1] and list(at_most) == sorted(at_most)
    for name, seq in (("prefill", SEQ - NEW), ("step", SEQ - 1)):
        assert (found[name]["batch"], found[name]["seq"]) == (best["batch"], seq)
        assert found[name]["peak_bytes"] <= found[name]["budget_bytes"] == BUDGET


def test_the_table_has_the_best_batch_among_others(plan: list[str], cli: Cli) -> None:
    best = cli.json(*plan)["planned"]
    said = cli(*plan)
    assert "at most, by bounds" in said.words and "best, by plan; KV cache: " in said.words
    assert f"{best['tokens_per_s']:.2f}" in said.out
    assert f"decode, batch {best['batch']}, sequence {SEQ - 1}" in said.words


def test_a_picture_shows_speed_and_waiting(plan: list[str], cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "speed.png"
    assert f"picture: {picture}" in cli(*plan, "--out", str(picture)).words
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "exists" in cli(*plan, "--out", str(picture), status=2).err


def test_every_option_counts(plan: list[str], cli: Cli, tmp_path: Path) -> None:
    plain = cli.json(*plan)
    on_device = cli.json(*plan, "--kv-cache", "device")
    assert plain["step"]["kv_on_host"] and not on_device["step"]["kv_on_host"]
    assert not on_device["prefill"]["kv_on_host"]
    assert cli.json(*plan, "--kv-cache", "host")["step"]["kv_on_host"]
    assert cli.json(*plan, "--weights", "int4")["step"]["weights"] == "int4, group 64"
    host = plain["step"]["host_bytes"] - 1
    less = cli.json(*plan, "--host-memory", str(host))
    assert less["planned"]["batch"] < plain["planned"]["batch"]
    assert less["step"]["host_bytes"] <= host
    assert cli.json(*plan, "--ranks", "2")["step"]["num_ranks"] == 2


def test_a_host_that_computes_counts(plan: list[str], cli: Cli) -> None:
    alone, given = cli.json(*plan), [*plan, "--host", "server"]
    beside = cli.json(*given)
    assert beside["planned"]["tokens_per_s"] > 1.2 * alone["planned"]["tokens_per_s"]
    host = beside["step"]["host_bytes"]
    less = cli.json(*given, "--host-memory", str(host - 1))
    assert beside["step"]["host_ns"] > 0 < less["step"]["host_ns"]  # it reads no files
    assert less["planned"]["batch"] < beside["planned"]["batch"]
    bounds = [{p["batch"]: p["step_ns"] for p in each["curve"]} for each in (alone, beside)]
    assert bounds[1][1] < bounds[0][1]


def test_shares_of_the_weights_are_budgets_too(plan: list[str], cli: Cli) -> None:
    found = cli.json(*plan, "--device-budget", "50%weights")["step"]
    assert found["budget_bytes"] == found["weight_bytes"] // 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--new", "64"], "--new: 64 of 64 tokens (--seq) leave none for the prompt."),
        (["--new", "0"], "--new: 0 is less than 1."),
        (["--policy", "static"], "--policy: --batch auto is for finepage."),
        (["--draft", "stand-in"], "--batch: auto with --draft"),
        (["--batch", "8"], "--new: the batch is given. Write --batch auto, or leave --new out."),
        (["--seq", "400"], "128 positions"),
    ],
)
def test_what_cannot_be_is_refused(
    plan: list[str], options: list[str], reason: str, cli: Cli
) -> None:
    assert reason in cli(*plan, *options, status=2).err


def test_a_batch_is_a_number_or_auto(plan: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*plan, "--batch", "most"])
    assert "'most' is neither a number nor 'auto'" in capsys.readouterr().err


def test_a_budget_below_the_least_is_refused_with_that_of_one_sequence(
    plan: list[str], cli: Cli
) -> None:
    said = cli(*plan, "--device-budget", "100000", status=2).err
    least = int(said.partition("finepage.device_budget to >= ")[2].split()[0])
    assert cli.json(*plan, "--device-budget", str(least))["planned"]["batch"] >= 1
    assert "device_budget" in cli(*plan, "--device-budget", str(least - 1), status=2).err
    assert "device_budget" in cli(*plan, "--device-budget", str(least), "--no-split", status=2).err


def test_without_matplotlib_there_is_no_picture(
    plan: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_finepage.reporting.drawing.find_spec", lambda name: None)
    said = cli(*plan, "--out", str(tmp_path / "speed.png"), status=2).err
    assert "plan --batch auto --out needs jinja2 and matplotlib" in said


def test_a_cache_that_the_prefill_moves_stays_in_host_memory(cli: Cli, tmp_path: Path) -> None:
    """Neither pass has a large cache, but the activations of the prefill leave none of its room."""
    model = small_model(tmp_path, "wide", num_key_value_heads=1, intermediate_size=2048)
    found = cli.json(
        *("plan", "--model", str(model), "--hardware", "t4", "--batch", "auto"),
        *("--seq", "100", "--new", "2", "--device-budget", "8MiB"),
    )
    assert found["prefill"]["kv_on_host"] is found["step"]["kv_on_host"]
    assert load_profile("t4").name == found["step"]["hardware"]


def test_a_budget_that_is_not_used_up_has_bytes_left(
    plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the batch at which bytes begin to be missing lies on a straight line too."""
    words = dict(zip(plan[1::2], plan[2::2], strict=True))
    made = Modeller(
        words["--model"],
        batch=2,
        prompt_tokens=SEQ - NEW,
        new_tokens=NEW,
        device_budget=str(4_000_000),
        hardware=words["--hardware"],
        split=True,
        kv_cache="host",
    )
    less, more = made.at(made.budget_bytes - 4096).costs(), made.costs()
    for name in ("prefill_missing_bytes", "step_missing_bytes"):
        assert getattr(more, name) < 0 and getattr(more, name) == getattr(less, name) - 4096
    passes = (made.prefill, made.decode)
    needs = [each.needs_if(cuts_weights=True, looks_up_rows=True) for each in passes]
    assert more.least_bytes == needs[0].min_budget_bytes > needs[1].min_budget_bytes
    assert more.host_bytes == made.decode.host_bytes > made.weight_bytes + more.kv_bytes
    monkeypatch.setattr("ds_finepage.execution.disk.PIECE_BYTES", 4096)
    disk = replace(made.profile, disk_bytes_per_s=1e9)
    host = replace(disk, host_bytes_per_s=1e10, host_flops_per_s=1e12)
    reads, computes = (made.at(made.budget_bytes, each).costs() for each in (disk, host))
    assert reads.host_bytes < more.host_bytes == computes.host_bytes  # it reads no files
