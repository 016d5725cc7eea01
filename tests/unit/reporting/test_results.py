"""The folder of a comparison: written and read without loss, and refused if it is not ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_finepage.errors import ConfigError
from ds_finepage.reporting import results
from ds_finepage.reporting.results import (
    Run,
    load_passes,
    load_results,
    run_folder,
    save_passes,
    save_results,
)
from tests.unit.reporting.folders import RESULTS, observed


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    on_ranks = replace(RESULTS.runs[2], arm="zero", notes=("a note",), ranks=RESULTS.runs[1:])
    save_results(RESULTS.with_run(on_ranks), tmp_path)
    assert load_results(tmp_path) == RESULTS.with_run(on_ranks)


def test_a_run_replaces_the_one_of_its_name() -> None:
    *others, run = RESULTS.runs
    other = Run(arm="finepage", batch=8, settings={})
    again = replace(run, reason="no room")
    assert RESULTS.with_run(other).with_run(again).runs == (*others, other, again)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read") as error:
        load_results(tmp_path)
    assert str(error.value).count(str(tmp_path)) == 1
    assert "'ds-finepage compare --out DIR'" in str(error.value)
    assert "finepage.report in a ds_config" in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "memgraph"}'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / results.RESULTS_FILE).write_text(text)
    with pytest.raises(ConfigError, match="is not a result of this version"):
        load_results(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    save_results(RESULTS, tmp_path)
    path = tmp_path / results.RESULTS_FILE
    path.write_text(path.read_text().replace('"format": 5', '"format": 0'))
    with pytest.raises(ConfigError, match="version of ds_finepage: format: Input should be 5"):
        load_results(tmp_path)


def test_passes_come_back_as_they_were(tmp_path: Path) -> None:
    passes = [observed("decode", measured=False), observed("prefill")]
    folder = run_folder(tmp_path, "finepage_b8")
    folder.mkdir(parents=True)
    save_passes(passes, folder)
    assert load_passes(folder) == passes
