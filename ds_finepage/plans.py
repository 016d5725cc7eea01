"""From a captured pass to its checked plan (floor 3)."""

from __future__ import annotations

from pathlib import Path

from ds_finepage.captures import Pass
from ds_finepage.counters import Stats
from ds_finepage.graph.checker import check
from ds_finepage.graph.codec import fingerprint, load_memgraph, save
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.bounds import divisible_lower_bound_bytes, lower_bound_bytes
from ds_finepage.planning.policies import plan_steady, with_tables_that_fit
from ds_finepage.planning.standing import Standing, standing_of


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
        InvalidPlanError: A file is no plan of this pass.
    """
    graph = found.graph
    if not split:
        graph = with_tables_that_fit(
            graph, arena_bytes=arena_bytes, policy=policy, alignment=alignment
        )
    path = None
    standing: tuple[Standing, ...] = ()
    if found.neighbour is not None:
        kept = found.neighbour.memgraph
        if kept is None or kept.arena_bytes != arena_bytes:
            found.neighbour = None  # it will be planned anew, and then this pass again
        else:
            standing = standing_of(kept)
    # A plan of a cut graph, or one that depends on another plan, is planned anew.
    if plan_dir is not None and not split and not standing:
        name = f"{fingerprint(graph)[:16]}-{policy}-{arena_bytes}-{alignment}.json"
        path = plan_dir / name
    if path is not None and path.exists():
        memgraph = load_memgraph(path, graph)
    else:
        memgraph = plan_steady(
            graph,
            arena_bytes=arena_bytes,
            policy=policy,
            alignment=alignment,
            profile=profile,
            split=split,
            standing=standing,
        )
        stats.num_plans += 1
        # A plan of another taskgraph than the captured one is planned anew.
        if path is not None and memgraph.graph is graph:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(memgraph, path)
    check(memgraph)
    found.stats.arena_bytes = arena_bytes
    bound = divisible_lower_bound_bytes if split else lower_bound_bytes
    found.stats.lower_bound_bytes = bound(graph, arena_bytes, alignment)
    return memgraph
