"""Check a plan that 'plan --out' wrote, and print its figures.

Exit status: 0; 1 if the file is not a right plan; 2 if it cannot be read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from ds_finepage.checker.checker import check
from ds_finepage.cli import output
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.reporting.figures import entry_bytes, layout_overhead, num_memory_dependencies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that 'plan --out' wrote")
    output.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the plan, check it, print its figures."""
    figures = figures_of(check(codec.load_plan(arguments.file)))
    output.show_figures(str(arguments.file), figures, as_json=arguments.json)
    return 0


def figures_of(memgraph: MemGraph) -> dict[str, Any]:
    """Return the figures of a plan, of one steady pass."""
    graph = memgraph.graph
    return {
        "taskgraph": graph.name,
        "policy": memgraph.policy,
        "num_tasks": len(graph.tasks),
        "weight_bytes": graph.weight_bytes,
        "arena_bytes": memgraph.arena_bytes,
        "peak_bytes": memgraph.peak_bytes,
        "resident_bytes": entry_bytes(memgraph),
        "host_pool_bytes": memgraph.host_bytes,
        "reloaded_bytes": memgraph.reloaded_bytes,
        "offloaded_bytes": memgraph.offloaded_bytes,
        **{f"num_{kind.value}": n for kind, n in Counter(n.kind for n in memgraph.nodes).items()},
        "num_memory_dependencies": num_memory_dependencies(memgraph),
        "layout_overhead": round(layout_overhead(memgraph), 4),
    }
