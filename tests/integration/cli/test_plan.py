from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.execution import disk
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.profiles import load_profile, profile_names
from ds_finepage.planning.policies import POLICIES
from tests.commands import Cli
from tests.integration.cli.models import NUM_PARAMETERS, card
from tests.integration.engines import python
from tests.unit.planning.sketches import PAGING, largest_live_bytes

KEYS = """
model phase batch seq policy hardware weight_bytes kv_bytes kv_on_host budget_bytes
min_budget_bytes peak_bytes host_bytes entry_reloaded_bytes reloaded_bytes offloaded_bytes
kv_copied_bytes lower_bound_bytes predicted_ns compute_ns transfer_ns lower_bound_ns stall_ns
num_tasks plan_seconds weights num_ranks
sent_bytes file_bytes least_file_bytes host_ns host_read_bytes lower_bound_alone_ns
"""


@pytest.fixture
def plan(model: str) -> list[str]:
    return ["plan", "--seq", "64", "--hardware", "t4", "--model", model]


# What comes out.


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_json_is_one_object(plan: list[str], model: str, phase: str, cli: Cli) -> None:
    found = cli.json(*plan, "--phase", phase, "--batch", "2", "--device-budget", "90%weights")
    assert list(found) == KEYS.split()
    assert (found["model"], found["phase"], found["batch"], found["seq"]) == (model, phase, 2, 64)
    assert (found["policy"], found["hardware"]) == ("finepage", "t4")
    assert found["weight_bytes"] == 2 * NUM_PARAMETERS
    assert found["budget_bytes"] == 2 * NUM_PARAMETERS * 9 // 10
    assert found["min_budget_bytes"] <= found["peak_bytes"] <= found["budget_bytes"]
    assert 0 < found["lower_bound_bytes"] <= found["reloaded_bytes"]
    assert found["reloaded_bytes"] < found["entry_reloaded_bytes"]
    assert found["lower_bound_ns"] <= found["predicted_ns"]
    assert found["predicted_ns"] >= found["compute_ns"] + found["stall_ns"]
    assert found["transfer_ns"] > 0
    assert found["num_tasks"] > 50
    assert found["plan_seconds"] > 0


def test_the_host_computes_where_that_is_faster(
    plan: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 12)
    rates = {"h2d_bytes_per_s": 1e8, "disk_bytes_per_s": 1e8}
    slow = card(tmp_path, "slow", **rates, launch_ns=0, transfer_latency_ns=0)
    given = [*plan, "--hardware", str(slow), "--no-split", "--device-budget", "40%weights"]
    alone, beside = cli.json(*given), cli.json(*given, "--host", "server")
    assert (beside["hardware"], alone["host_ns"], alone["host_read_bytes"]) == ("slow+server", 0, 0)
    assert alone["lower_bound_alone_ns"] is None
    assert beside["lower_bound_alone_ns"] == alone["lower_bound_ns"] > beside["lower_bound_ns"]
    assert beside["host_ns"] > 0 and beside["predicted_ns"] < alone["predicted_ns"]
    copied_or_read = beside["reloaded_bytes"] + beside["host_read_bytes"]
    assert copied_or_read > 0.99 * alone["lower_bound_bytes"]
    said = cli(*given, "--host", "server").words
    assert "computed by the host" in said and "slow.json+server" in said
    # It has no room for all weights, and files are not read in place.
    small = cli.json(*given, "--host", "server", "--host-memory", alone["host_bytes"] - 1)
    assert small["host_ns"] == 0 and small["lower_bound_alone_ns"] is None


def test_ranks_that_share_a_model_have_idle_hosts(plan: list[str], cli: Cli) -> None:
    said = cli(*plan, "--ranks", "2", "--host", "server", "--json")
    assert "note: the host computes nothing where ranks share a model" in said.err
    assert json.loads(said.out)["host_ns"] == 0


def test_a_host_is_refused_by_name(plan: list[str], cli: Cli) -> None:
    cli.refuses(*plan[:-4], "--hardware", "t4+laptop", *plan[-2:], says="unknown host 'laptop'")


def test_host_memory_is_a_budget_and_the_disk_lies_below_it(
    plan: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 12)
    given = [*plan, "--no-split", "--device-budget", "40%weights", "--host-memory"]
    ample = cli.json(*given, 1 << 30)
    assert ample["file_bytes"] == ample["least_file_bytes"] == 0
    most_bytes = NUM_PARAMETERS  # half of the weights
    found = cli.json(*given, most_bytes)
    assert 0 < found["least_file_bytes"] <= found["file_bytes"] < found["reloaded_bytes"]
    assert found["host_bytes"] <= most_bytes
    assert found["reloaded_bytes"] == ample["reloaded_bytes"]
    assert found["predicted_ns"] >= found["lower_bound_ns"]
    assert found["lower_bound_ns"] >= found["least_file_bytes"] / 2e9 * 1e9
    assert "of these from files" in cli(*given, most_bytes).words
    assert "of these from files" not in cli(*given, 1 << 30).words
    profile, facts = tmp_path / "t4.json", json.loads(codec.dumps(load_profile("t4")))
    profile.write_text(json.dumps(facts | {"disk_bytes_per_s": 1e8}))
    slow = cli.json(*given, most_bytes, "--hardware", profile)
    assert slow["predicted_ns"] >= slow["file_bytes"] * 10 > ample["predicted_ns"]
    # A machine whose disk is not known has no room for the model.
    profile.write_text(json.dumps(facts | {"disk_bytes_per_s": 0.0}))
    says = f"--host-memory is {most_bytes} bytes"
    cli.refuses(*given, most_bytes, "--hardware", profile, says=says)


def test_ample_memory_moves_nothing(plan: list[str], cli: Cli, tmp_path: Path) -> None:
    found = cli.json(*plan, "--no-split")
    assert found["budget_bytes"] == load_profile("t4").capacity_bytes - (512 << 20)
    assert (found["reloaded_bytes"], found["lower_bound_bytes"]) == (0, 0)
    assert found["entry_reloaded_bytes"] == found["weight_bytes"]
    # Tasks of a small model wait for the host that issues them, and for nothing else.
    assert found["predicted_ns"] == found["lower_bound_ns"]
    assert found["predicted_ns"] == found["compute_ns"] + found["stall_ns"]
    prompt = tmp_path / "prompt.json"
    codec.save(dataclasses.replace(load_profile("t4"), host_op_ns=0), prompt)
    found = cli.json(*plan, "--no-split", "--hardware", prompt)
    assert (found["reloaded_bytes"], found["lower_bound_bytes"], found["stall_ns"]) == (0, 0, 0)
    assert found["predicted_ns"] == found["lower_bound_ns"] == found["compute_ns"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy(plan: list[str], policy: str, cli: Cli) -> None:
    found = cli.json(*plan, "--policy", policy, "--device-budget", "200%weights")
    assert found["policy"] == policy
    assert found["lower_bound_ns"] > 0
    assert found["predicted_ns"] >= found["lower_bound_ns"]


def test_the_table_says_what_comes_next(plan: list[str], model: str, cli: Cli) -> None:
    out = cli(*plan, "--device-budget", "4MiB").out
    assert "4.00 MiB" in out and "least possible" in out
    assert f"ds-finepage curve --model {model} --batch 1 --seq 64 --hardware t4" in out


def test_a_share_of_the_weights_may_be_more_than_the_device(
    plan: list[str], tmp_path: Path, cli: Cli
) -> None:
    arguments = [*plan, "--hardware", str(card(tmp_path, capacity_bytes=1 << 20)), "--json"]
    said = cli(*arguments, "--device-budget", "90%weights")
    assert json.loads(said.out)["budget_bytes"] > 1 << 20
    assert "more than the 1.00 MiB of" in said.err
    cli.refuses(*arguments, "--device-budget", "2MiB", says="the device has 1.00 MiB")


# Several ranks.


def test_a_model_is_cut_over_ranks(plan: list[str], cli: Cli) -> None:
    one, two, four = (
        cli.json(*plan, "--device-budget", "50%weights", "--ranks", n) for n in (1, 2, 4)
    )
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
    plan: list[str], tmp_path: Path, cli: Cli
) -> None:
    slow, fast = (
        card(tmp_path, f"card{latency_ns}", rank_latency_ns=latency_ns)
        for latency_ns in (7_000_000, 5_000_000)
    )
    slow_ns, fast_ns = (
        cli.json(*plan, "--hardware", path, "--ranks", "2")["compute_ns"] for path in (slow, fast)
    )
    assert slow_ns - fast_ns == (4 * 2 + 1) * 2_000_000


def test_the_table_says_what_is_of_one_rank(plan: list[str], cli: Cli) -> None:
    said = cli(*plan, "--ranks", "2")
    assert "each of 2 ranks" in said.words
    assert "tokens a second, all ranks together" in said.out
    assert "--ranks 2" in said.out.splitlines()[-1]
    assert said.err == ""


def test_a_card_without_a_link_between_ranks_is_named(
    plan: list[str], tmp_path: Path, cli: Cli
) -> None:
    path = card(tmp_path, rank_bytes_per_s=None)
    assert "little has no rank_bytes_per_s" in cli(*plan, "--ranks", "2", "--hardware", path).err
    assert cli(*plan, "--hardware", path).err == ""


# The plan as a file.


def test_the_plan_is_the_same_under_any_hash_seed(plan: list[str], tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        out = tmp_path / f"plan{seed}.json"
        code = "from ds_finepage.cli import main; raise SystemExit(main())"
        command = [*plan, "--device-budget", "60%weights", "--out", out]
        python(code, *command, PYTHONHASHSEED=seed)
        texts.append(out.read_bytes())
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["kind"] == "memgraph"


def test_no_file_is_overwritten(plan: list[str], tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "plan.json"
    out.write_text("mine")
    cli.refuses(*plan, "--out", out, says="--force")
    assert out.read_text() == "mine"
    cli(*plan, "--out", out, "--force")
    assert out.read_text() != "mine"
    for path in (tmp_path, tmp_path / "none" / "plan.json"):
        cli.refuses(*plan, "--out", path, says=str(path.parent))


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
        (["--device-budget", "100KiB"], ["task ", "aten.", "min_budget_bytes"]),
        (["--seq", "129"], ["129", "128 positions"]),
        (["--batch", "0"], ["batch", "less than 1"]),
        (["--ranks", "3"], ["3 ranks do not divide the 4 attention heads"]),
    ],
)
def test_bad_options(
    plan: list[str], tmp_path: Path, changes: list[str], words: list[str], cli: Cli
) -> None:
    cli.refuses(*plan, "--out", tmp_path / "plan.json", *changes, says=words)
    assert not list(tmp_path.glob("*plan*"))


@pytest.mark.parametrize("rate", [None, -1e9, 0])
def test_a_profile_without_a_rate(plan: list[str], tmp_path: Path, rate: Any, cli: Cli) -> None:
    path = card(tmp_path, h2d_bytes_per_s=rate)
    cli.refuses(*plan, "--hardware", path, says="h2d_bytes_per_s")


@pytest.mark.parametrize("policy", PAGING)
def test_the_least_budget_that_is_named_suffices(plan: list[str], policy: str, cli: Cli) -> None:
    """Without cuts a byte less does not."""
    arguments = [*plan, "--policy", policy, "--no-split", "--device-budget"]
    least = cli.json(*arguments, "4MiB")["min_budget_bytes"]
    assert cli.json(*arguments, least)["budget_bytes"] == least
    cli.refuses(*arguments, least - 1, says=f"min_budget_bytes {least}")


# One at full scale.


def test_seven_billion_parameters(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", "--model", "llama-2-7b", "--hardware", "v100-16gb", "--out", file]
    found = cli.json(*arguments, "--device-budget", "50%weights")
    assert found["weight_bytes"] == 2 * 6_738_415_616
    assert found["reloaded_bytes"] <= 1.02 * found["lower_bound_bytes"]
    assert found["predicted_ns"] <= 1.05 * found["lower_bound_ns"]
    assert found["offloaded_bytes"] == 0
    memgraph = codec.load(file, MemGraph)
    assert memgraph.peak_bytes <= 1.02 * largest_live_bytes(memgraph)
