"""Writes the result folder and the report of a run: ``finepage.report`` in a ds_config.

It writes when the model is detached, or when the interpreter ends: before that, in a function of
``atexit``, while torch still works. Nothing here makes a run fail. A failure is a warning, and as
far as possible it comes when the model is attached.
"""

from __future__ import annotations

import atexit
import logging
import resource
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.reporting.drawing import require_packages
from ds_finepage.reporting.findings import PROFILE_FILE
from ds_finepage.reporting.page import OURS, write_report
from ds_finepage.reporting.results import (
    DECODE,
    PREFILL,
    RESULTS_FILE,
    ObservedPass,
    PhaseFigures,
    Results,
    Run,
    load_results,
    run_folder,
    save_passes,
    save_results,
)
from ds_finepage.runtime.observing import token_tables
from ds_finepage.runtime.plan_runner import PlanRunner
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Stats

logger = logging.getLogger(__name__)

KEY = "finepage.report"


class ReportWriter:
    """Writes the folder of one attached model, once."""

    def __init__(
        self, name: str, runner: PlanRunner, observed: Callable[[], list[ObservedPass]]
    ) -> None:
        """Look whether the report can be written, and see to it that it is."""
        self._runner, self._observed = runner, observed
        self._folder: Path | None = None
        try:
            self._folder = report_folder(name)
            require_packages(f"the page of {KEY}")
        except ConfigError as error:
            logger.warning("%s", error)
        if self._folder is not None:
            atexit.register(self.write)

    def write(self) -> None:
        """Write everything; a second call does nothing."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        atexit.unregister(self.write)
        try:
            self._write(folder)
        except Exception as error:
            # A report must not make a run fail that has done its work.
            logger.warning("%s: the report in %s is not complete: %s", KEY, folder, error)

    def _write(self, folder: Path) -> None:
        passes = self._observed()
        if not passes:
            logger.warning(
                "%s: no pass has run by plan, so there is nothing to write in %s. A model that "
                "stays on the device as a whole runs without a plan.",
                KEY,
                folder,
            )
            return
        settings = self._runner.settings
        run = run_of(settings, passes, self._runner.stats())
        of_run = run_folder(folder, run.name)
        of_run.mkdir(parents=True, exist_ok=True)
        for suffix in ("plan", "predicted", "measured"):
            for path in of_run.glob(f"*.{suffix}.json"):
                path.unlink()
        save_passes(passes, of_run)
        codec.save(settings.profile, folder / PROFILE_FILE)
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        results = Results.of_today(None, device_of(settings.device).name, command, (run,))
        save_results(results, folder)
        require_packages(f"the page of {KEY}")
        write_report(folder, results, {run.name: passes})


def report_folder(name: str) -> Path:
    """Return the folder of a report; make it if it does not exist.

    Args:
        name: The setting; ``~`` is the home folder.

    Raises:
        ConfigError: It is a file, cannot be made or written to, or holds a comparison.
    """
    try:
        folder = Path(name).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    # RuntimeError: there is no such home folder. ValueError: a null byte.
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{KEY}: nothing can be written in {name!r}: {error}. {_NO}") from error
    if (folder / RESULTS_FILE).exists():
        try:
            is_ours = load_results(folder).settings is None
        except FinepageError:
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{KEY}: {name!r} has the results of a comparison or of another version. {_NO} "
                "Name another folder."
            )
    return folder


_NO = "This run goes on and writes no report."


def run_of(settings: RunSettings, passes: Sequence[ObservedPass], stats: Stats) -> Run:
    """Return the figures of a run that its handle knows."""
    device = device_of(settings.device)
    by_name = {found.name: found for found in passes}
    first = by_name.get(DECODE) or by_name.get(PREFILL) or passes[0]
    config = settings.config
    return Run(
        arm=OURS,
        batch=sequences_of(first.memgraph.graph),
        budget_bytes=settings.budget_bytes,
        weight_bytes=stats.weight_bytes,
        peak_bytes=device.peak_bytes if isinstance(device, Accelerator) else None,
        prefill=figures_of(by_name.get(PREFILL)),
        decode=figures_of(by_name.get(DECODE)),
        probe_bytes_per_s=settings.profile.h2d_bytes_per_s,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        pinned_bytes=device.pinned_bytes,
        settings={
            "finepage.device_budget": str(config.device_budget),
            "finepage.policy": config.policy,
            "finepage.split": config.split,
        },
        notes=tuple(f"ran without a plan: {reason}" for reason in stats.unplanned_reasons),
    )


def figures_of(found: ObservedPass | None) -> PhaseFigures:
    """Return the figures of a pass; bytes are those of its last run."""
    if found is None or found.measured is None:
        return PhaseFigures()
    nodes = found.memgraph.nodes
    copied = {Lane.H2D: 0, Lane.D2H: 0}
    for span in found.measured.spans:
        if span.lane in copied:
            copied[span.lane] += found.memgraph.bytes_at(nodes[span.node])
    return PhaseFigures(
        h2d_bytes=copied[Lane.H2D],
        d2h_bytes=copied[Lane.D2H],
        wall_ns=found.measured.total_ns,
        predicted_ns=found.predicted.total_ns,
    )


def sequences_of(graph: TaskGraph) -> int:
    """Return the sequences in the batch, or 1 where the inputs do not tell."""
    return next((sequences for sequences, _ in token_tables(graph)), 1)
