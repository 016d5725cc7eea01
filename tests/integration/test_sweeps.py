"""The sweeps over architectures and families (benchmarks/): a model or two, and the reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Script


@pytest.fixture(scope="module")
def sweep(script: Script) -> Any:
    return script("architectures")


@pytest.fixture(scope="module")
def families(script: Script) -> Any:
    return script("families")


def test_there_are_fifty_architectures_beyond_the_families(sweep: Any, families: Any) -> None:
    assert len(set(sweep.TINY) - set(families.FAMILIES)) >= 50
    groups = {tiny.group for tiny in sweep.TINY.values()}
    assert groups == {
        *("vision", "diffusion", "speech", "state space", "time series", "multimodal"),
        *("text", "encoder"),
    }


def test_a_model_is_swept_in_a_process_of_its_own_and_reported(sweep: Any, tmp_path: Path) -> None:
    out = tmp_path / "architectures"
    words = ["--architectures", "vit", "--dtypes", "float32", "--out", str(out)]
    assert sweep.main(words) == 0
    document = json.loads(out.with_suffix(".json").read_text())
    assert [found["budget"] for found in document["cells"]] == list(sweep.ALL_BUDGETS)
    for found in document["cells"]:
        assert found["fault"] == "" and found["unplanned"] == 0
        assert 0 < found["peak_bytes"] <= found["budget_bytes"]
    assert "| vit | vision | float32 | 0 | same |" in out.with_suffix(".md").read_text()


def test_a_model_that_generates_is_measured(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "ALL_BUDGETS", ("ample", "min"))
    monkeypatch.setitem(sweep.TINY, "granite", replace(sweep.TINY["granite"], tokens=2))
    torch._dynamo.reset()
    found = list(sweep.measure_model("granite", "bfloat16"))
    assert [c.budget for c in found] == ["ample", "min"]
    assert not any(c.fault or c.skipped or c.unplanned for c in found)


def test_differences_are_named(sweep: Any) -> None:
    one, nan = torch.ones(2, 3), torch.full((2, 3), torch.nan)
    assert sweep.difference([one, nan], [one.clone(), nan.clone()]) == ""
    assert sweep.difference([one, one + 2], [one, one]) == "result 1 of 2 differs by 2.00e+00"
    assert "shapes [(2, 3)], not [(2,)]" in sweep.difference([one], [torch.ones(2)])
    assert "differs" in sweep.difference([one.bfloat16()], [one])


def test_a_family_is_swept_and_reported(families: Any, tmp_path: Path) -> None:
    out = tmp_path / "families"
    words = ["--families", "llama", "--dtypes", "float32", "--prompts", "5", "--tokens", "6"]
    assert families.main([*words, "--out", str(out)]) == 0
    document = json.loads(out.with_suffix(".json").read_text())
    assert [cell["budget"] for cell in document["cells"]] == ["ample", "min", "50%", "100%"]
    for cell in document["cells"]:
        assert cell["fault"] == "" and cell["unplanned"] == 0
        assert 0 < cell["peak_bytes"] <= cell["budget_bytes"]
        assert cell["distinct"] > 1
    assert "| llama | float32 | 5 |" in out.with_suffix(".md").read_text()


def test_a_wrong_cell_is_reported_as_such(
    families: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = families.Cell(family="llama", dtype="float32", prompt=5, budget="min", fault="a\nfault")
    monkeypatch.setattr(families, "BUDGETS", ("min",))
    monkeypatch.setattr(
        families, "measure_family", lambda *_: [cell, replace(cell, budget="ample", fault="")]
    )
    out = tmp_path / "families"
    words = ["--families", "llama", "--dtypes", "float32", "--out", str(out)]
    assert families.main(words) == 1
    line = "- llama float32, prompt 5, min: a fault"
    assert line in out.with_suffix(".md").read_text()
    printed = capsys.readouterr().out
    assert line in printed and "1 of 2 cells are right, 1 wrong" in printed


def test_the_first_difference_is_named(families: Any) -> None:
    model = families.make_model("llama", "float32")
    cell = families.Cell(family="llama", dtype="float32", prompt=5, budget="min")
    assert "logits of a second run are the same" in families.first_difference(model, cell, 3)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    assert "logits of step 0 differ by" in families.first_difference(model, cell, 3)


def test_all_families_are_run_where_nothing_is_chosen(families: Any) -> None:
    options = families.parse([])
    assert options.families == list(families.FAMILIES) and len(options.families) == 18
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
    families: Any, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        families.parse(words)
    assert error.value.code == 2
    assert text in capsys.readouterr().err
