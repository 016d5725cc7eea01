"""From a captured pass to its checked plan."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from ds_finepage.checker.checker import check
from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.graph.codec import fingerprint, load_memgraph, save
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.stacking import SharedResident, residents_of
from ds_finepage.planning.pipeline import Planned, PlanSettings, graph_to_plan, plan_checked
from ds_finepage.runtime.pass_table import Pass
from ds_finepage.runtime.stats import Stats

logger = logging.getLogger(__name__)


def plan_folder(plan_dir: str) -> Path:
    """Return the folder in which plans are kept; it is made if it is not there.

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


def plan_pass(
    found: Pass,
    arena_bytes: int,
    *,
    stats: Stats,
    policy: str,
    split: bool,
    alignment: int,
    profile: HardwareProfile,
    plan_dir: Path | None,
) -> MemGraph:
    """Plan a pass, or find its plan on disk; check it, and note its figures.

    Args:
        found: The pass. Its neighbour is forgotten where that has another arena now.
        arena_bytes: Size of the arena.
        stats: Counters to keep.
        policy: A key of ``POLICIES``.
        split: Whether weights may be cut.
        alignment: Of extents, in bytes.
        profile: Rates to plan with.
        plan_dir: Folder in which plans are kept.

    Raises:
        PlanInfeasibleError: There is no plan in this arena.
        InvalidPlanError: The plan breaks an invariant, which is a fault of the planner.
    """
    settings = PlanSettings(policy=policy, split=split, alignment=alignment, profile=profile)
    graph = graph_to_plan(found.graph, arena_bytes, settings)
    path = None
    shared: tuple[SharedResident, ...] = ()
    if found.neighbour is not None:
        kept = found.neighbour.memgraph
        if kept is None or kept.arena_bytes != arena_bytes:
            found.neighbour = None  # it will be planned anew, and then this pass again
        else:
            shared = residents_of(kept)
    # A plan of a cut graph, or one that depends on another plan, is planned anew.
    if plan_dir is not None and not split and not shared:
        name = f"{fingerprint(graph)[:16]}-{policy}-{arena_bytes}-{alignment}.json"
        path = plan_dir / name
    memgraph = None if path is None else _kept_plan(path, graph, arena_bytes)
    if memgraph is None:
        planned = plan_checked(graph, arena_bytes, settings, shared)
        stats.num_plans += 1
        # A plan of another taskgraph than the captured one is planned anew.
        if path is not None and planned.memgraph.graph is graph:
            _keep_plan(planned.memgraph, path)
    else:
        planned = Planned(graph, memgraph, settings)
    found.stats.arena_bytes = arena_bytes
    found.stats.lower_bound_bytes = planned.lower_bound_bytes
    return planned.memgraph


def _kept_plan(path: Path, graph: TaskGraph, arena_bytes: int) -> MemGraph | None:
    """Return a plan that is kept in a file; None where there is none that can be used.

    The files are a cache: one that is no plan of this pass costs a plan, and is written anew.
    """
    if not path.exists():
        return None
    try:
        memgraph = check(load_memgraph(path, graph))
        if memgraph.arena_bytes == arena_bytes:
            return memgraph
        reason = f"it is a plan for an arena of {memgraph.arena_bytes} bytes, not {arena_bytes}"
    except (ConfigError, InvalidPlanError) as error:
        reason = str(error)
    logger.warning("%s cannot be used, and is made anew: %s", path, reason)
    return None


def _keep_plan(memgraph: MemGraph, path: Path) -> None:
    """Write a plan to a file. Where that fails the pass runs all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(memgraph, path)
    except (ConfigError, OSError) as error:
        logger.warning("%s cannot be kept: %s", path, error)
