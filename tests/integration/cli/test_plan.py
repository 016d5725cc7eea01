from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli import main
from ds_finepage.graph import codec
from ds_finepage.graph.profiles import load_profile, profile_names
from ds_finepage.planning.policies import PAGING, POLICIES
from tests.integration.cli.models import NUM_PARAMETERS, ROOT, card, small_model

KEYS = [
    "model",
    "phase",
    "batch",
    "seq",
    "policy",
    "hardware",
    "weight_bytes",
    "kv_bytes",
    "kv_on_host",
    "budget_bytes",
    "min_budget_bytes",
    "peak_bytes",
    "host_bytes",
    "entry_reloaded_bytes",
    "reloaded_bytes",
    "offloaded_bytes",
    "kv_copied_bytes",
    "lower_bound_bytes",
    "predicted_ns",
    "compute_ns",
    "transfer_ns",
    "lower_bound_ns",
    "stall_ns",
    "num_tasks",
    "num_memory_dependencies",
    "capture_seconds",
    "plan_seconds",
    "layout_overhead",
    "weights",
    "num_ranks",
    "sent_bytes",
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(small_model(tmp_path))


def plan(*arguments: str) -> list[str]:
    return ["plan", "--seq", "64", "--hardware", "t4", *arguments]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(plan("--json", *arguments)) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


# What comes out.


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_json_is_one_object(model: str, phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(
        capsys, "--model", model, "--phase", phase, "--batch", "2", "--device-budget", "90%weights"
    )
    assert list(found) == KEYS
    assert (found["model"], found["phase"], found["batch"], found["seq"]) == (model, phase, 2, 64)
    assert (found["policy"], found["hardware"]) == ("finepage", "t4")
    assert found["weight_bytes"] == 2 * NUM_PARAMETERS
    assert found["budget_bytes"] == 2 * NUM_PARAMETERS * 9 // 10
    assert found["min_budget_bytes"] <= found["peak_bytes"] <= found["budget_bytes"]
    assert 0 < found["lower_bound_bytes"] <= found["reloaded_bytes"]
    assert found["reloaded_bytes"] < found["entry_reloaded_bytes"]
    assert found["lower_bound_ns"] <= found["predicted_ns"]
    assert found["predicted_ns"] >= found["compute_ns"] + found["stall_ns"]
    assert found["transfer_ns"] > 0 and found["num_memory_dependencies"] > 0
    assert found["num_tasks"] > 50
    assert found["layout_overhead"] >= 1
    assert found["capture_seconds"] > 0 and found["plan_seconds"] > 0


def test_ample_memory_moves_nothing(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = figures(capsys, "--model", model, "--no-split")
    assert found["budget_bytes"] == load_profile("t4").capacity_bytes - (512 << 20)
    assert (found["reloaded_bytes"], found["lower_bound_bytes"]) == (0, 0)
    assert found["entry_reloaded_bytes"] == found["weight_bytes"]
    # Tasks of a small model wait for the host that issues them, and for nothing else.
    assert found["predicted_ns"] == found["lower_bound_ns"]
    assert found["predicted_ns"] == found["compute_ns"] + found["stall_ns"]
    prompt = str(tmp_path / "prompt.json")
    codec.save(dataclasses.replace(load_profile("t4"), host_op_ns=0), prompt)
    found = figures(capsys, "--model", model, "--no-split", "--hardware", prompt)
    assert (found["reloaded_bytes"], found["lower_bound_bytes"], found["stall_ns"]) == (0, 0, 0)
    assert found["predicted_ns"] == found["lower_bound_ns"] == found["compute_ns"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy(model: str, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--model", model, "--policy", policy, "--device-budget", "200%weights")
    assert found["policy"] == policy
    assert found["lower_bound_ns"] > 0
    assert found["predicted_ns"] >= found["lower_bound_ns"]


def test_the_table_says_what_comes_next(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan("--model", model, "--device-budget", "4MiB")) == 0
    out = capsys.readouterr().out
    assert "4.00 MiB" in out and "least possible" in out
    assert f"ds-finepage curve --model {model} --batch 1 --seq 64 --hardware t4" in out


def test_a_share_of_the_weights_may_be_more_than_the_device(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = card(tmp_path, capacity_bytes=1 << 20)
    arguments = ["--model", model, "--hardware", str(path), "--json"]
    assert main(plan(*arguments, "--device-budget", "90%weights")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["budget_bytes"] > 1 << 20
    assert "more than the 1.00 MiB of" in captured.err
    assert main(plan(*arguments, "--device-budget", "2MiB")) == 2
    assert "the device has 1.00 MiB" in capsys.readouterr().err


def test_by_config_file(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--model", str(Path(model) / "config.json"))
    assert found["weight_bytes"] == 2 * NUM_PARAMETERS


def test_no_split_keeps_weights_whole(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--device-budget", "60%weights"]
    whole = figures(capsys, *arguments, "--no-split")
    cut = figures(capsys, *arguments)
    assert cut["reloaded_bytes"] <= whole["reloaded_bytes"]
    assert cut["lower_bound_bytes"] <= whole["lower_bound_bytes"]


# Several ranks.


def test_a_model_is_cut_over_ranks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--device-budget", "50%weights"]
    one, two, four = (figures(capsys, *arguments, "--ranks", n) for n in "124")
    table_bytes = 2 * 500 * 256
    for found in (two, four):
        assert (found["weight_bytes"] - table_bytes) * found["num_ranks"] == pytest.approx(
            one["weight_bytes"] - table_bytes, rel=0.01
        )
        assert found["kv_bytes"] * found["num_ranks"] == one["kv_bytes"]
    assert two["reloaded_bytes"] <= 0.52 * one["reloaded_bytes"]
    # Two layers sum twice over 256 numbers, and each rank gets the logits of all.
    assert one["sent_bytes"] == 0
    assert two["sent_bytes"] == 4 * 256 * 2 + 500
    assert four["sent_bytes"] == 4 * 6 * 128 + 3 * 250


def test_the_time_of_collectives_is_that_of_the_link_between_ranks(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compute_ns(latency_ns: int) -> int:
        path = card(tmp_path, f"card{latency_ns}", rank_latency_ns=latency_ns)
        arguments = ("--model", model, "--hardware", str(path), "--ranks", "2")
        return int(figures(capsys, *arguments)["compute_ns"])

    assert compute_ns(7_000_000) - compute_ns(5_000_000) == (4 * 2 + 1) * 2_000_000


def test_the_table_says_what_is_of_one_rank(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan("--model", model, "--ranks", "2")) == 0
    found = capsys.readouterr()
    assert "each of 2 ranks" in " ".join(found.out.split())
    assert "tokens a second, all ranks together" in found.out
    assert "--ranks 2" in found.out.splitlines()[-1]
    assert found.err == ""


def test_a_card_without_a_link_between_ranks_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(card(tmp_path, rank_bytes_per_s=None))
    assert main(plan("--model", model, "--ranks", "2", "--hardware", path)) == 0
    assert "little has no rank_bytes_per_s" in capsys.readouterr().err
    assert main(plan("--model", model, "--hardware", path)) == 0
    assert capsys.readouterr().err == ""


def test_ranks_that_do_not_divide_the_heads(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan("--model", model, "--ranks", "3")) == 2
    assert "3 ranks do not divide the 4 attention heads" in capsys.readouterr().err


# The plan as a file.


def test_the_plan_is_the_same_under_any_hash_seed(model: str, tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        out = tmp_path / f"plan{seed}.json"
        command = plan("--model", model, "--device-budget", "60%weights", "--out", str(out))
        subprocess.run(
            [sys.executable, "-c", "from ds_finepage.cli import main; raise SystemExit(main())"]
            + command,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.DEVNULL,
        )
        texts.append(out.read_bytes())
    assert texts[0] == texts[1]
    assert [json.loads(line)["kind"] for line in texts[0].splitlines()] == ["taskgraph", "memgraph"]


def test_no_file_is_overwritten(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    out.write_text("mine")
    assert main(plan("--model", model, "--out", str(out))) == 2
    assert "--force" in capsys.readouterr().err and out.read_text() == "mine"
    assert main(plan("--model", model, "--out", str(out), "--force")) == 0
    assert out.read_text() != "mine"
    assert main(plan("--model", model, "--out", str(tmp_path))) == 2
    assert main(plan("--model", model, "--out", str(tmp_path / "none" / "plan.json"))) == 2


# What is refused: a message, exit status 2, no file.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--model", "lama-7b"], ["unknown model", "Did you mean 'llama-7b'?", "opt-175b"]),
        (["--hardware", "t5"], ["unknown hardware profile", "'t4'", *profile_names()]),
        (["--policy", "finpage"], ["unknown policy", "'finepage'", "horizon"]),
        (["--device-budget", "50%"], ["50%device", "50%weights"]),
        (["--device-budget", "101%device"], ["101", "at most"]),
        (["--device-budget", "0"], ["less than 1 byte"]),
        (["--device-budget", "0%weights"], ["leaves no memory"]),
        (["--device-budget", "17GiB"], ["17.00 GiB", "16.00 GiB"]),
        (["--seq", "129"], ["129", "128 positions"]),
        (["--batch", "0"], ["batch", "less than 1"]),
    ],
)
def test_bad_options(
    model: str,
    tmp_path: Path,
    changes: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan.json"
    assert main(plan("--model", model, "--out", str(out), *changes)) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert not list(tmp_path.glob("*plan*"))


def test_a_config_that_transformers_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_model(tmp_path, hidden_size="wide")
    assert main(plan("--model", str(path))) == 2
    assert "transformers cannot read it" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [None, -1e9, 0])
def test_a_profile_without_a_rate(
    model: str, tmp_path: Path, rate: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = card(tmp_path, h2d_bytes_per_s=rate)
    assert main(plan("--model", model, "--hardware", str(path))) == 2
    assert "h2d_bytes_per_s" in capsys.readouterr().err


def test_no_plan_under_the_budget(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    status = main(plan("--model", model, "--device-budget", "100KiB", "--out", str(out)))
    assert status == 2 and not out.exists()
    message = capsys.readouterr().err
    assert "task " in message and "aten." in message and "min_budget_bytes" in message


@pytest.mark.parametrize("policy", sorted(PAGING))
def test_the_least_budget_that_is_named_suffices(
    model: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without cuts a byte less does not."""
    arguments = ["--model", model, "--policy", policy, "--no-split"]
    least = figures(capsys, *arguments, "--device-budget", "4MiB")["min_budget_bytes"]
    assert figures(capsys, *arguments, "--device-budget", str(least))["budget_bytes"] == least
    assert main(plan(*arguments, "--device-budget", str(least - 1))) == 2
    assert f"min_budget_bytes {least}" in capsys.readouterr().err


# One at full scale.


def test_seven_billion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama-2-7b", "--hardware", "v100-16gb", "--json"]
    assert main([*arguments, "--device-budget", "50%weights"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weight_bytes"] == 2 * 6_738_415_616
    assert found["reloaded_bytes"] <= 1.02 * found["lower_bound_bytes"]
    assert found["predicted_ns"] <= 1.05 * found["lower_bound_ns"]
    assert found["offloaded_bytes"] == 0
    assert found["layout_overhead"] <= 1.02
