"""The folder of a comparison: written and read without loss, and refused if it is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.reporting import results
from ds_finepage.reporting.results import (
    CompareSettings,
    ObservedPass,
    PhaseFigures,
    Results,
    Run,
    load_passes,
    load_results,
    run_folder,
    save_passes,
    save_results,
)
from tests.unit.planning.sketches import chain

SETTINGS = CompareSettings(
    model="llama-7b",
    layers=2,
    ds_config="",
    device_budget="50%weights",
    batches=(1, 8),
    prompt_tokens=16,
    new_tokens=4,
    arms=("plain", "finepage"),
    hardware="v100-16gb",
    repeats=3,
)
RUN = Run(
    arm="finepage",
    batch=8,
    tokens_equal=True,
    decode=PhaseFigures(h2d_bytes=10, modelled_ns=7),
    settings={"finepage.device_budget": "50%weights"},
    notes=("a note",),
)
RESULTS = Results(
    settings=SETTINGS, device="cpu", versions={"torch": "2.13.0"}, date="2026-11-22", command="x"
)


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    save_results(RESULTS.with_run(RUN), tmp_path)
    assert load_results(tmp_path) == RESULTS.with_run(RUN)


def test_a_run_replaces_the_one_of_its_name() -> None:
    other = Run(arm="finepage", batch=1, settings={})
    again = Run(arm="finepage", batch=8, reason="no room", settings={})
    assert RESULTS.with_run(RUN).with_run(other).with_run(again).runs == (other, again)


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
    profile: HardwareProfile = load_profile("v100-16gb")
    settings = PlanSettings(policy="finepage", split=False, alignment=64, profile=profile)
    planned = plan_checked(chain(9), 5 * 64, settings)
    timeline = planned.timeline
    passes = [
        ObservedPass(name="decode", memgraph=planned.memgraph, predicted=timeline),
        ObservedPass(
            name="prefill", memgraph=planned.memgraph, predicted=timeline, measured=timeline
        ),
    ]
    folder = run_folder(tmp_path, RUN.name)
    folder.mkdir(parents=True)
    save_passes(passes, folder)
    assert load_passes(folder) == passes
