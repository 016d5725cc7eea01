"""Verify a plan that 'plan --out' wrote, without the planner, and print its figures.

They are of a steady pass: the bytes that it moves, the lower bound for any plan of the same
taskgraph, the gap between both, and the peak of the arena.

Exit status: 0; 1 if the file is not a right plan; 2 if it cannot be read.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from ds_finepage.checker.checker import check
from ds_finepage.cli import output
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.reporting.figures import entry_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that 'plan --out' wrote")
    output.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the plan, check it, print its figures."""
    found = figures_of(check(codec.load(arguments.file, MemGraph)))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        output.show_figures(f"the plan is right: {arguments.file}", found.items())
    return 0


def figures_of(memgraph: MemGraph) -> dict[str, Any]:
    """Return what a right plan moves, beside what any plan of its taskgraph has to move."""
    graph = memgraph.graph
    reloaded = memgraph.steady_reloaded_bytes
    bound = lower_bound_bytes(graph, memgraph.arena_bytes, memgraph.alignment)
    return {
        "taskgraph": graph.name,
        "policy": memgraph.policy,
        "num_tasks": len(graph.tasks),
        "weight_bytes": graph.weight_bytes,
        "arena_bytes": memgraph.arena_bytes,
        "peak_bytes": memgraph.peak_bytes,
        "resident_bytes": entry_bytes(memgraph),
        "host_pool_bytes": memgraph.host_bytes,
        "reloaded_bytes": reloaded,
        "offloaded_bytes": memgraph.offloaded_bytes,
        "lower_bound_bytes": bound,
        "gap_share": round(reloaded / bound - 1, 6) if bound else None,
        **{f"num_{kind.value}": n for kind, n in Counter(n.kind for n in memgraph.nodes).items()},
    }
