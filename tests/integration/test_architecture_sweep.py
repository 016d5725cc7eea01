"""The sweep over architectures (benchmarks/architectures.py): its list, two models, the report."""

from __future__ import annotations

import importlib
import json
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


def test_there_are_fifty_architectures_beyond_the_families(sweep: Any) -> None:
    families = importlib.import_module("families").FAMILIES
    assert len(set(sweep.TINY) - set(families)) >= 50
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
