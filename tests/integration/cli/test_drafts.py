"""``--draft`` of ``plan`` and ``curve``: a model and its draft in one budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_finepage.drafted import DraftedPoint
from ds_finepage.graph.profiles import load_profile
from ds_finepage.integrations.transformers.price import best_length, tokens_a_round
from ds_finepage.whatif import capture_model
from tests.commands import Cli
from tests.integration.cli.models import card, small_model

WEIGHTS = 2 * (2 * 500 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256)
TABLES = 2 * 2 * 500 * 256


@pytest.fixture
def given(model: str, tmp_path: Path) -> list[str]:
    slow = card(tmp_path, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    return ["--seq", "64", "--hardware", str(slow), "--model", model]


def plan(cli: Cli, given: list[str], budget: int, *more: str) -> list[dict[str, Any]]:
    found = cli.json("plan", *given, "--device-budget", str(budget), "--draft", *more)["draft"]
    assert isinstance(found, list)
    return found


def test_a_stand_in_shares_what_there_is_room_for(cli: Cli, given: list[str]) -> None:
    budget = WEIGHTS * 8 // 10
    (found,) = plan(cli, given, budget, "stand-in", "--acceptance", "0,0.5,0.9")
    assert 1.5 * TABLES < found["shared_bytes"] < found["draft_bytes"] < budget
    # What is not shared is there in int4, with a scale and a minimum in float16 for 64 weights.
    layers = WEIGHTS - found["shared_bytes"]
    assert found["draft_bytes"] - found["shared_bytes"] == layers // 4 + layers // 32
    more = found["reloaded_bytes"] - found["plain_reloaded_bytes"]
    assert found["plain_reloaded_bytes"] > 0 and more > layers // 4
    speeds = list(found["tokens_per_s"].values())
    assert list(found["tokens_per_s"]) == ["0.0", "0.5", "0.9"]
    alone = 1e9 / found["plain_ns"]
    assert speeds[0] < speeds[1] < speeds[2] and speeds[0] < alone
    said = cli("plan", *given, "--device-budget", budget, "--draft", "stand-in")
    assert "with the draft stand-in: tok/s at an acceptance of" in said.words


def test_a_step_of_a_stand_in_reads_a_cache_without_room(
    cli: Cli, given: list[str], tmp_path: Path
) -> None:
    longer = small_model(tmp_path, "longer", max_position_embeddings=512)
    steps_ns = []
    for seq in ("32", "400"):
        words = [*given, "--model", str(longer), "--seq", seq]
        (found,) = plan(cli, words, WEIGHTS * 8 // 10, "stand-in")
        steps_ns.append(found["step_ns"])
    copies_ns = 10 * 2 * 2 * 256 * 2 * 400  # keys and values of two layers, at 0.1 GB/s
    assert steps_ns[1] == steps_ns[0] + copies_ns


def test_another_model_takes_its_weights_and_its_cache(
    cli: Cli, given: list[str], tmp_path: Path
) -> None:
    little = small_model(tmp_path, "other", hidden_size=64, intermediate_size=128)
    (found,) = plan(cli, given, WEIGHTS, str(little))
    weights = 2 * (2 * 500 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64)
    cache = 2 * 2 * 64 * 64 * 2
    assert found["draft_bytes"] == weights + cache and found["shared_bytes"] == 0
    (less,) = plan(cli, given, WEIGHTS - 100_000, str(little))
    assert less["reloaded_bytes"] > found["reloaded_bytes"]


def test_a_curve_has_a_line_for_each_budget_with_room(cli: Cli, given: list[str]) -> None:
    found = cli.json("curve", *given, "--points", "5", "--draft", "stand-in")
    budgets = [point["budget_bytes"] for point in found["points"]]
    drafted = [point["budget_bytes"] for point in found["draft"]]
    assert drafted == budgets[-len(drafted) :] and 0 < len(drafted) < 5
    said = cli("curve", *given, "--points", "3", "--draft", "stand-in")
    assert "with the draft stand-in" in said.words


def test_where_no_budget_has_room_a_note_says_so(cli: Cli, given: list[str]) -> None:
    said = cli("plan", *given, "--device-budget", WEIGHTS * 3 // 10, "--draft", "stand-in")
    assert "note: no budget has room for the draft stand-in" in said.err
    assert "acceptance" not in said.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--acceptance", "0.5"], "--acceptance: there is no --draft"),
        (["--draft", "stand-in", "--acceptance", "1.5"], "--acceptance: '1.5' is no chance"),
        (["--draft", "stand-in", "--acceptance", "x"], "--acceptance: 'x' is no chance"),
        (["--draft", "stand-in", "--batch", "2"], "--batch: 2 with --draft"),
        (["--draft", "stand-in", "--ranks", "2"], "--ranks: 2 with --draft"),
        (["--draft", "stand-in", "--policy", "lru"], "--draft: it is planned by finepage"),
        (["--draft", "stand-in", "--no-split"], "Leave out --policy and --no-split"),
        (["--draft", "stand-in", "--weights", "int8"], 'draft: "stand-in" packs layers'),
        (["--draft", "nowhere"], "nowhere"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "curve"])
def test_options_that_cannot_be_used_are_refused(
    cli: Cli, given: list[str], command: str, words: list[str], says: str
) -> None:
    cli.of(command, *given).refuses(*words, says=says)


def test_one_form_of_the_weights_is_planned(cli: Cli, given: list[str]) -> None:
    several = ["--weights", "bf16,int8", "--draft", "stand-in"]
    cli.of("curve", *given).refuses(*several, says="and name one form")


def test_a_pass_that_checks_reads_more_rows(model: str) -> None:
    given: dict[str, Any] = {
        "phase": "decode",
        "batch": 1,
        "seq": 64,
        "profile": load_profile("t4"),
    }
    step, check = (capture_model(model, num_new=n, **given).graph for n in (1, 5))
    for graph, num_rows in ((step, 1), (check, 5)):
        (logits, *_) = graph.outputs
        assert logits.tensor is not None
        assert graph.tensors[logits.tensor].shape == (1, num_rows, 500)
        ids = next(b.id for b in graph.buffers if b.name == "input_ids")
        assert next(t.shape for t in graph.tensors if t.buffer == ids) == (1, num_rows)
    with_kv = [b.nbytes for b in step.buffers if b.name.startswith("cache.")]
    assert with_kv == [b.nbytes for b in check.buffers if b.name.startswith("cache.")]


def test_the_speed_of_a_round() -> None:
    point = DraftedPoint(
        budget_bytes=8, draft_bytes=4, shared_bytes=2, most=9, step_ns=10**6, pass_ns=10**8,
        plain_ns=5 * 10**7, reloaded_bytes=9, plain_reloaded_bytes=6,
    )  # fmt: skip
    assert point.gain(0.9) == pytest.approx(point.tokens_per_s(0.9) / 20)
    length = point.length(0.9)
    assert length == best_length(0.9, 1e6, 1e8, 9) == 9
    assert point.tokens_per_s(0.9) == pytest.approx(tokens_a_round(0.9, 9) * 1e9 / 1.09e8)
