"""Write the timelines of a result folder, or of a plan, as a Chrome trace.

The file is DIR/trace.json, or PLAN with the suffix .trace.json. https://ui.perfetto.dev opens it.
Each pass is a process, predicted and measured; its threads are the lanes, and its counter is the
device memory by kind. For a file of 'plan --out' the timeline is predicted with the rates of
--hardware.

Exit status: 0; 1 if a plan is damaged; 2 for a folder, a file or an option that cannot be used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_finepage.checker.checker import check
from ds_finepage.errors import ConfigError
from ds_finepage.files import write_file
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.timeline import Timeline
from ds_finepage.reporting.chrome_trace import chrome_trace_json
from ds_finepage.reporting.results import load_passes, load_results, names_of_ranks, run_folder

TRACE_FILE = "trace.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="DIR|PLAN",
        help="a folder with a results.json, or a file that 'plan --out' wrote",
    )
    parser.add_argument("--hardware", help="for a plan: the profile to predict its times with")


def run(arguments: argparse.Namespace) -> int:
    """Read the timelines, write the trace."""
    source: Path = arguments.source
    if not source.exists():
        raise ConfigError(
            f"cannot read {source}: there is no such folder or file. 'ds-finepage compare --out "
            "DIR' writes such a folder, 'ds-finepage plan --out FILE' such a file."
        )
    if source.is_dir():
        path = source / TRACE_FILE
        named = of_folder(source)
    else:
        path = source.with_suffix(f".{TRACE_FILE}")
        named = of_plan(source, arguments.hardware)
    write_file(path, chrome_trace_json(named))
    print(f"trace: {path}; open it with https://ui.perfetto.dev")
    return 0


def of_folder(folder: Path) -> dict[str, tuple[MemGraph, Timeline]]:
    """Return the passes of all runs with their plans, by their names in the trace.

    Raises:
        ConfigError: It is no result folder, or no run has kept a pass.
        InvalidPlanError: A file in it is damaged.
    """
    found = {}
    runs = load_results(folder).runs
    for run_name in (name for run in runs for name in names_of_ranks(run.name, len(run.ranks))):
        for each in load_passes(run_folder(folder, run_name)):
            name = f"{run_name} {each.name}"
            found[f"{name}, predicted"] = (each.memgraph, each.predicted)
            if each.measured is not None:
                found[f"{name}, measured"] = (each.memgraph, each.measured)
    if not found:
        raise ConfigError(
            f"{folder} has no plan of a pass, so there is no timeline. Only runs of ds_finepage "
            "keep them."
        )
    return found


def of_plan(path: Path, hardware: str | None) -> dict[str, tuple[MemGraph, Timeline]]:
    """Return a plan and its predicted timeline.

    Raises:
        ConfigError: The file cannot be read, or no profile is named.
        InvalidPlanError: It is no right plan.
    """
    memgraph = check(codec.load(path, MemGraph))
    if hardware is None:
        raise ConfigError("a plan has no times. Name the machine with --hardware.")
    from ds_finepage.planning.simulator import simulate

    timeline = simulate(memgraph, load_profile(hardware), entry_missing=memgraph.lost)
    return {f"{path.name}, predicted": (memgraph, timeline)}
