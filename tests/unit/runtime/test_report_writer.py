"""``finepage.report``: a run leaves its results, and no report makes it fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import Buffer, BufferKind, GraphInput, TaskGraph, TensorView
from ds_finepage.reporting import drawing
from ds_finepage.reporting.findings import PROFILE_FILE
from ds_finepage.reporting.page import PAGE_FILE
from ds_finepage.reporting.results import (
    RESULTS_FILE,
    load_passes,
    load_results,
    run_folder,
    save_results,
)
from ds_finepage.runtime import report_writer
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.report_writer import sequences_of
from tests.unit.reporting.folders import RESULTS, observed
from tests.unit.runtime.test_handle import WIDTH, Layers

BUDGET = 100_000
Exits = list[Callable[[], None]]


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    """The functions that would run when the interpreter ends."""
    found: Exits = []
    fake = SimpleNamespace(register=found.append, unregister=found.remove)
    monkeypatch.setattr(report_writer, "atexit", fake)
    monkeypatch.setattr(drawing, "png", lambda figure: b"picture")
    return found


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    torch._dynamo.reset()
    yield Layers().eval()
    torch._dynamo.reset()


def attached(model: torch.nn.Module, report: Path, **settings: Any) -> Handle:
    settings = {"device_budget": BUDGET, "device": "cpu", **settings}
    return attach(model, report=str(report), **settings)


def run_and_detach(model: torch.nn.Module, report: Path, **settings: Any) -> None:
    handle = attached(model, report, **settings)
    run_twice(model)
    handle.detach()
    assert not handle.attached


def run_twice(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(4, WIDTH))


def test_detach_writes_the_results_and_the_page(
    model: torch.nn.Module, exits: Exits, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "report"
    handle = attached(model, folder)
    run_twice(model)
    assert len(exits) == 1 and not (folder / RESULTS_FILE).exists()
    stats, profile = handle.stats, handle.profile
    handle.detach()
    assert exits == []
    results = load_results(folder)
    (run,) = results.runs
    assert results.settings is None and (run.arm, run.batch) == ("finepage", 1)
    assert (run.budget_bytes, run.weight_bytes) == (BUDGET, stats.weight_bytes)
    assert run.settings["finepage.device_budget"] == str(BUDGET)
    assert run.probe_bytes_per_s == profile.h2d_bytes_per_s and run.host_bytes
    (found,) = load_passes(run_folder(folder, run.name))
    assert found.name == "pass" and found.measured is not None
    assert codec.load(folder / PROFILE_FILE, HardwareProfile) == profile
    text = (folder / PAGE_FILE).read_text()
    assert "A run of ds_finepage" in text and "finepage_b1_pass_memory" in text


def test_the_figures_are_those_of_the_last_run() -> None:
    step = observed()
    figures = report_writer.figures_of(step)
    assert figures.h2d_bytes == step.memgraph.reloaded_bytes > 0
    assert figures.d2h_bytes == step.memgraph.offloaded_bytes
    assert step.measured is not None and figures.wall_ns == step.measured.total_ns
    assert figures.predicted_ns == step.predicted.total_ns != figures.wall_ns
    assert report_writer.figures_of(None).wall_ns is None


def test_a_run_without_detach_writes_at_exit_and_only_once(
    model: torch.nn.Module, exits: Exits, tmp_path: Path
) -> None:
    handle = attached(model, tmp_path)
    run_twice(model)
    exits[0]()
    assert exits == []
    page = tmp_path / PAGE_FILE
    assert page.exists()
    page.unlink()
    handle.detach()
    assert not page.exists()


def test_the_budget_is_the_one_of_the_end(model: torch.nn.Module, tmp_path: Path) -> None:
    handle = attached(model, tmp_path)
    run_twice(model)
    handle.replan(budget_bytes=BUDGET + 512)
    run_twice(model)
    handle.detach()
    assert load_results(tmp_path).runs[0].budget_bytes == BUDGET + 512


def test_without_the_key_nothing_is_recorded(model: torch.nn.Module, exits: Exits) -> None:
    handle = attach(model, device_budget=BUDGET, device="cpu")
    run_twice(model)
    assert handle.observed() == [] and exits == []
    handle.detach()


def test_a_folder_that_cannot_be_written_is_a_warning_when_the_model_is_attached(
    model: torch.nn.Module, exits: Exits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    handle = attached(model, path)
    assert "finepage.report: nothing can be written in" in caplog.text and exits == []
    run_twice(model)
    handle.detach()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("damaged", [False, True])
def test_the_results_of_a_comparison_are_not_replaced(
    model: torch.nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    save_results(RESULTS, tmp_path)
    path = tmp_path / RESULTS_FILE
    if damaged:
        path.write_text("{}")
    before = path.read_text()
    run_and_detach(model, tmp_path)
    assert "Name another folder" in caplog.text
    assert path.read_text() == before and not (tmp_path / PAGE_FILE).exists()


def test_an_earlier_report_of_a_run_is_replaced(model: torch.nn.Module, tmp_path: Path) -> None:
    save_results(replace(RESULTS, settings=None), tmp_path)
    old = run_folder(tmp_path, "finepage_b1")
    old.mkdir(parents=True)
    (old / "decode.plan.json").write_text("of an earlier run")
    (old / "notes.txt").write_text("mine")
    run_and_detach(model, tmp_path)
    assert len(load_results(tmp_path).runs) == 1
    assert [found.name for found in load_passes(old)] == ["pass"]
    assert (old / "notes.txt").read_text() == "mine"


def test_without_the_packages_the_figures_are_written_and_the_page_is_not(
    model: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run_and_detach(model, tmp_path)
    assert "pip install 'ds_finepage[report]'" in caplog.text
    assert load_results(tmp_path).runs and not (tmp_path / PAGE_FILE).exists()


def test_a_full_disk_is_a_warning(
    model: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise ConfigError("cannot write results.json: No space left on device")

    monkeypatch.setattr(report_writer, "save_results", full)
    run_and_detach(model, tmp_path)
    assert "is not complete: cannot write results.json: No space left" in caplog.text


def test_a_model_that_never_ran_by_plan_is_a_warning(
    model: torch.nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run_and_detach(model, tmp_path, device_budget="1GiB")
    assert "no pass has run by plan" in caplog.text and not (tmp_path / RESULTS_FILE).exists()


def test_the_batch_is_read_from_the_token_ids() -> None:
    shapes = [("float32", (3, 8)), ("int64", (5,)), ("int64", (2, 7))]
    buffers = tuple(Buffer(i, BufferKind.INPUT, 8) for i in range(3))
    tensors = tuple(TensorView(i, i, d, shape, ()) for i, (d, shape) in enumerate(shapes))
    inputs = tuple(GraphInput(i, i) for i in range(3))
    graph = TaskGraph("pass", buffers, tensors, (), inputs=inputs)
    assert sequences_of(graph) == 2
    assert sequences_of(replace(graph, inputs=inputs[:2])) == 1
