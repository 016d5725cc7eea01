"""The sweep over families (benchmarks/families.py): options, report, what it calls wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "families.py"


@pytest.fixture(scope="module")
def sweep() -> Any:
    spec = importlib.util.spec_from_file_location("families_sweep", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_everything_is_run_where_nothing_is_chosen(sweep: Any) -> None:
    options = sweep.parse([])
    assert options.families == list(sweep.FAMILIES) and len(options.families) == 18
    assert options.dtypes == ["float32", "bfloat16"]
    assert options.prompts == [5, 40, 200]
    assert options.tokens == 64 and options.out is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--families", "lama"], "--families: unknown 'lama'. Did you mean 'llama'"),
        (["--dtypes", "float16"], "--dtypes: unknown 'float16'"),
        (["--prompts", "5,x"], "--prompts: 'x' is not a whole number"),
        (["--tokens", "0"], "--tokens: 0 behind a prompt of 200"),
        (["--tokens", "312"], "the models have 512 positions"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(
    sweep: Any, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        sweep.parse(words)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_a_model_is_swept_and_reported(sweep: Any, tmp_path: Path) -> None:
    out = tmp_path / "families"
    words = ["--families", "llama", "--dtypes", "float32", "--prompts", "5", "--tokens", "6"]
    assert sweep.main([*words, "--out", str(out)]) == 0
    document = json.loads(out.with_suffix(".json").read_text())
    assert [cell["budget"] for cell in document["cells"]] == ["ample", "min", "50%", "100%"]
    for cell in document["cells"]:
        assert cell["fault"] == "" and cell["unplanned"] == 0
        assert 0 < cell["peak_bytes"] <= cell["budget_bytes"]
        assert cell["distinct"] > 1
    assert "| llama | float32 | 5 |" in out.with_suffix(".md").read_text()


def test_a_wrong_cell_is_reported_as_such(
    sweep: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = sweep.Cell(family="llama", dtype="float32", prompt=5, budget="min", fault="a\nfault")
    monkeypatch.setattr(sweep, "BUDGETS", ("min",))
    monkeypatch.setattr(
        sweep, "measure_family", lambda *_: [cell, replace(cell, budget="ample", fault="")]
    )
    out = tmp_path / "families"
    words = ["--families", "llama", "--dtypes", "float32", "--out", str(out)]
    assert sweep.main(words) == 1
    line = "- llama float32, prompt 5, min: a fault"
    assert line in out.with_suffix(".md").read_text()
    printed = capsys.readouterr().out
    assert line in printed and "1 of 2 cells are right, 1 wrong" in printed


def test_the_first_difference_is_named(sweep: Any) -> None:
    model = sweep.make_model("llama", "float32")
    cell = sweep.Cell(family="llama", dtype="float32", prompt=5, budget="min")
    assert "logits of a second run are the same" in sweep.first_difference(model, cell, 3)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    assert "logits of step 0 differ by" in sweep.first_difference(model, cell, 3)
