"""From a sized pass to its checked plan, made by the planner or kept in a folder."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

from ds_finepage.checker.checker import check
from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.files import write_file
from ds_finepage.graph.codec import dumps, fingerprint, load_memgraph
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.finepage.stacking import residents_of
from ds_finepage.planning.pipeline import Planned, graph_to_plan, plan_checked
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters

logger = logging.getLogger(__name__)


def plan_folder(plan_dir: str) -> Path:
    """Return the folder that keeps plans; make it if it does not exist.

    Args:
        plan_dir: The setting; ``~`` is the home folder.

    Raises:
        ConfigError: It is a file, cannot be made, or nothing can be written there.
    """
    try:
        folder = Path(plan_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    # RuntimeError: there is no such home folder. ValueError: a null byte.
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"finepage.plan_dir: plans cannot be kept in {plan_dir!r}: {error}. Name a folder that "
            f"can be made and written to, or leave plan_dir out."
        ) from error
    return folder


def alternating_plan(found: Pass, arena_bytes: int) -> MemGraph | None:
    """Return the plan of the pass that a pass alternates with; forget one in another arena.

    Args:
        found: The pass.
        arena_bytes: Size of its arena.
    """
    theirs = None if found.alternating is None else found.alternating.memgraph
    if theirs is not None and theirs.arena_bytes == arena_bytes:
        return theirs
    found.forget_alternating()  # its next plan may differ
    return None


def plan_pass(found: Pass, arena_bytes: int, settings: RunSettings, counters: Counters) -> Planned:
    """Plan a pass, or read its plan from the folder; either is checked.

    Args:
        found: The pass. It forgets the pass that it alternates with if that has another arena now.
        arena_bytes: Size of the arena.
        settings: The settings of now.
        counters: Counts new plans.

    Raises:
        PlanInfeasibleError: There is no plan in this arena.
        InvalidPlanError: The plan breaks a rule, which is a fault of the planner.
    """
    planning = settings.planning
    theirs = alternating_plan(found, arena_bytes)
    residents = () if theirs is None else residents_of(theirs)
    graph = graph_to_plan(found.graph, arena_bytes, planning)
    path = None
    # The files know neither cut graphs nor plans that depend on another plan.
    if settings.plan_dir is not None and not planning.cuts_weights and not residents:
        name = f"{fingerprint(graph)[:16]}-{planning.policy}-{arena_bytes}-{planning.alignment}"
        path = settings.plan_dir / f"{name}.json"
    if path is not None and path.exists():
        try:
            kept = load_memgraph(path, graph)
            if kept.arena_bytes == arena_bytes:
                return Planned(graph, check(kept), planning)
            reason = f"it is a plan for an arena of {kept.arena_bytes} bytes, not {arena_bytes}"
        except (ConfigError, InvalidPlanError) as error:
            reason = str(error)
        logger.warning("%s cannot be used, and is replaced: %s", path, reason)
    start = time.perf_counter_ns()
    planned = plan_checked(graph, arena_bytes, planning, residents)
    counters.plan_ns += time.perf_counter_ns() - start
    counters.num_plans += 1
    if path is not None and planned.memgraph.graph is graph:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, dumps(planned.memgraph))
        except (ConfigError, OSError) as error:
            logger.warning("%s cannot be kept: %s", path, error)
    return planned
