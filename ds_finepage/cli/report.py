"""Write the report of a result folder: one HTML page with pictures, which opens offline.

The folder is one of 'compare --out' or of finepage.report in a ds_config. The page DIR/report.html
holds its pictures; the same ones are in DIR/figures as PNG files. It shows where the memory goes,
when the device waits, what stays on the device, and other policies and budgets beside.

Exit status: 0; 1 if a plan in the folder is damaged; 2 for a folder or an option that cannot be
used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_finepage.cli.output import with_progress
from ds_finepage.errors import ConfigError
from ds_finepage.reporting.drawing import require_packages
from ds_finepage.reporting.page import FIGURES_FOLDER, write_report
from ds_finepage.reporting.results import load_passes, load_results, run_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder with a results.json")
    parser.add_argument(
        "--points",
        type=int,
        default=5,
        metavar="N",
        help="budgets to plan beside the one of the comparison, for the picture of times against "
        "budgets (5); 0 leaves it out",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the folder, plan what is to stand beside, write the page."""
    folder: Path = arguments.folder
    if arguments.points < 0:
        raise ConfigError(f"--points: {arguments.points} is negative. Write 0 or more.")
    results = load_results(folder)
    require_packages("report")
    passes = {run.name: load_passes(run_folder(folder, run.name)) for run in results.runs}

    from ds_finepage.compare.findings import find

    findings = find(folder, results, passes, num_budgets=arguments.points, progress=with_progress)
    page = write_report(folder, results, passes, findings)
    print(f"report: {page}; pictures: {folder / FIGURES_FOLDER}")
    return 0
