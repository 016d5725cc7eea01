"""``ds-finepage demo`` with a model that is too small to take time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli import demo, main
from ds_finepage.cli.demo import example
from ds_finepage.cli.demo_results import JSON_KEYS, DemoResult, EngineResult, problems_of

STOCK = EngineResult(
    tokens_equal=True,
    peak_bytes=2000,
    prefill_reloaded_bytes=1500,
    decode_reloaded_bytes=1500,
    weight_bytes=1500,
    wall_s=1.0,
    wall_again_s=0.5,
)
OURS = EngineResult(
    tokens_equal=True,
    peak_bytes=600,
    prefill_reloaded_bytes=1000,
    prefill_lower_bound_bytes=900,
    decode_reloaded_bytes=950,
    decode_lower_bound_bytes=900,
    budget_bytes=600,
    weight_bytes=1500,
    wall_s=2.0,
    wall_again_s=0.5,
)
GOOD = DemoResult(
    budget_bytes=600, weight_bytes=1500, engines={"zero_inference": STOCK, "finepage": OURS}
)


def changed(engine: str, **changes: Any) -> DemoResult:
    engines = {**GOOD.engines, engine: dataclasses.replace(GOOD.engines[engine], **changes)}
    return dataclasses.replace(GOOD, engines=engines)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (GOOD, None),
        (changed("finepage", tokens_equal=False), "the tokens of ds_finepage differ"),
        (changed("zero_inference", tokens_equal=False), "of stock ZeRO-Inference differ"),
        (
            changed("finepage", peak_bytes=601),
            "ds_finepage had 601 bytes on the device; the budget is 600 bytes",
        ),
        (changed("zero_inference", peak_bytes=10**9), None),  # it has no budget
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_judges_the_result(
    result: DemoResult,
    problem: str | None,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo.Demo, "run", lambda self, shape: [result])
    assert main(["demo", "--json"] if as_json else ["demo"]) == (problem is not None)
    captured = capsys.readouterr()
    if problem is None:
        assert problems_of(result) == [] and captured.err == ""
    else:
        assert len(problems_of(result)) == 1 and problem in captured.err
    if as_json:
        assert json.loads(captured.out) == result.as_json()
    else:
        assert "600 B (budget)" in captured.out and ">= 900 B" in captured.out


def test_both_problems_are_named() -> None:
    assert len(problems_of(changed("finepage", tokens_equal=False, peak_bytes=10**9))) == 2


def test_the_example_that_runs_is_the_one_in_the_repository() -> None:
    """setup.py installs the folder of examples; in a checkout they are where they are."""
    root = Path(__file__).parents[2]
    assert example("generate.py") == root / "examples" / "generate.py"
    assert '"ds_finepage.examples": "examples"' in (root / "setup.py").read_text()


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the demo of a packed model, from a folder that has nothing to do with the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    code = "import sys; from ds_finepage.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--json", "--tiny", "--budget", "80%weights", "--new-tokens", "6"]
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", *options, "--weights", "int4", "--keep", "kept"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "kept", done


def test_json(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = kept
    found = json.loads(done.stdout)
    weight_bytes = found["weight_bytes"]
    linear = 4 * 128 * 128 + 3 * 128 * 256
    others = 2 * (2 * 1024 * 128 + 3 * 128)
    assert weight_bytes == others + linear // 2 + linear // 64 * 4
    assert found["budget_bytes"] == weight_bytes * 80 // 100
    assert list(found) == ["budget_bytes", "weight_bytes", "weights", "engines"]
    assert found["weights"] == "int4"
    assert list(found["engines"]) == ["zero_inference", "finepage"]
    stock, ours = found["engines"].values()
    assert list(ours) == list(JSON_KEYS)
    assert list(stock) == [key for key in JSON_KEYS if key != "decode_lower_bound_bytes"]
    assert stock["tokens_equal"] is ours["tokens_equal"] is True
    assert 0 < ours["peak_bytes"] <= found["budget_bytes"] < weight_bytes < stock["peak_bytes"]
    assert 0 < ours["decode_lower_bound_bytes"] <= ours["decode_reloaded_bytes"] <= weight_bytes
    assert stock["decode_reloaded_bytes"] <= weight_bytes
    assert ours["wall_s"] > 0 and stock["wall_s"] > 0
    config = json.loads((folder / "zero_inference.json").read_text())["finepage"]
    assert (config["enabled"], config["weights"], config["weights_group"]) == (False, "int4", 64)


def test_progress_and_what_is_kept(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = kept
    assert [line.rpartition(":")[0] for line in done.stderr.splitlines()] == [
        "making a Llama checkpoint",
        "plain transformers for reference; both engines with a memory meter",
        "stock ZeRO-Inference",
        "ds_finepage",
    ]
    configs = [json.loads((folder / f"{name}.json").read_text()) for name in demo.ENGINES]
    assert [c["finepage"].pop("enabled") for c in configs] == [False, True]
    assert configs[0] == configs[1]
    outputs = [json.loads(path.read_text()) for path in sorted(folder.glob("*_output.json"))]
    assert len(outputs) == 5
    assert len({tuple(output["tokens"]) for output in outputs}) == 1


def test_both_engines_run_on_two_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    code = "import sys; from ds_finepage.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--json", "--tiny", "--budget", "80%weights", "--new-tokens", "4", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)["ranks"]
    assert len(ranks) == 2
    linear = 4 * 128 * 128 + 3 * 128 * 256 + 1024 * 128  # the output layer is cut, too
    others = 1024 * 128 + 3 * 128
    for found in ranks:
        stock, ours = found["engines"].values()
        assert stock["tokens_equal"] is ours["tokens_equal"] is True
        assert found["weight_bytes"] == 4 * (linear // 2 + others)
        assert 0 < ours["peak_bytes"] <= found["budget_bytes"] < stock["peak_bytes"]
        assert 0 < ours["decode_reloaded_bytes"] < stock["decode_reloaded_bytes"]


def test_a_kept_folder_is_not_overwritten(
    kept: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--keep", str(kept[0])]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
