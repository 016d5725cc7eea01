"""The sweep over architectures (benchmarks/architectures.py): options, report, what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("architectures", "families", "tiny_media", "tiny_models", "tiny_text")


@pytest.fixture(scope="module")
def sweep() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("architectures")
    for name in MODULES:
        sys.modules.pop(name, None)


def cell(sweep: Any, **values: Any) -> Any:
    about = {"family": "vit", "group": "vision", "dtype": "float32", "budget": "min"}
    return sweep.Cell(**{**about, **values})


def test_there_are_fifty_architectures_beyond_the_families(sweep: Any) -> None:
    families = importlib.import_module("families").FAMILIES
    assert len(set(sweep.TINY) - set(families)) >= 50
    groups = {tiny.group for tiny in sweep.TINY.values()}
    assert groups == {
        *("vision", "diffusion", "speech", "state space", "time series", "multimodal"),
        *("text", "encoder"),
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--architectures", "vitt"], "--architectures: unknown 'vitt'. Did you mean 'vit'"),
        (["--dtypes", "float16"], "--dtypes: unknown 'float16'"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(
    sweep: Any, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        sweep.parse(words)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


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


def test_a_library_that_is_not_installed_is_named(
    sweep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(sweep.TINY["vit"], library="no_such_library")
    monkeypatch.setitem(sweep.TINY, "vit", tiny)
    (found,) = sweep.measure_model("vit", "float32")
    assert found.skipped == "no_such_library is not installed"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (subprocess.TimeoutExpired("python", 7, output=b""), "not done after 7 s"),
        (None, "exit status -11: gone"),
    ],
)
def test_a_process_that_ends_early_is_wrong_where_it_was(
    sweep: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None, fault: str
) -> None:
    line = json.dumps({**sweep.asdict(cell(sweep, budget="ample")), "reasons": ["why"]})

    def run(*args: Any, **kwargs: Any) -> Any:
        if error is not None:
            raise error
        return subprocess.CompletedProcess(args, -11, f"noise\n{line}\n", "gone")

    monkeypatch.setattr(sweep.subprocess, "run", run)
    *before, last = sweep.run_apart("vit", ["float32"], 7)
    assert last.fault == fault
    assert [c.reasons for c in before] == ([] if error else [("why",)])
    assert last.budget == ("ample" if error else "min")


def test_a_wrong_cell_is_reported_as_such(
    sweep: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = cell(sweep, budget="ample", unplanned=1, reasons=("a break",))
    skipped = cell(sweep, family="fnet", skipped="no kernel")
    cells = [right, cell(sweep, fault="a fault"), skipped]
    monkeypatch.setattr(sweep, "run_apart", lambda *_: cells)
    out = tmp_path / "architectures"
    assert sweep.main(["--architectures", "vit", "--out", str(out)]) == 1
    text = out.with_suffix(".md").read_text()
    printed = capsys.readouterr().out
    for line in (
        "- WRONG: vit float32, min: a fault",
        "- skipped: fnet float32: no kernel",
        "- in part without a plan: vit: a break",
    ):
        assert line in text and line in printed
    assert "1 of 2 cells are right, 1 wrong" in printed
    assert "| vit | vision | float32 | 1 | same | WRONG | - | - |" in text


def test_differences_are_named(sweep: Any) -> None:
    one, nan = torch.ones(2, 3), torch.full((2, 3), torch.nan)
    assert sweep.difference([one, nan], [one.clone(), nan.clone()]) == ""
    assert sweep.difference([one, one + 2], [one, one]) == "result 1 of 2 differs by 2.00e+00"
    assert "shapes [(2, 3)], not [(2,)]" in sweep.difference([one], [torch.ones(2)])
    assert "differs" in sweep.difference([one.bfloat16()], [one])
