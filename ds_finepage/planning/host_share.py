"""Divides the weights that a plan reloads between host memory and files.

The disk lane runs beside the link. So a pass takes least time if its reads are spread over it: then
the disk is busy throughout, and a reload from host memory seldom waits for one from a file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import Buffer, BufferKind, TaskGraph


def can_be_filed(graph: TaskGraph, buffer: Buffer) -> bool:
    """Tell whether a plan can read a buffer from a file: it is one range of one weight."""
    return (
        buffer.kind is BufferKind.WEIGHT
        and buffer.gather is None
        and graph.num_parts(buffer) == graph.num_pieces(buffer) == 1
    )


def reloads_of(memgraph: MemGraph, names: Collection[str]) -> dict[str, Buffer]:
    """Return what a plan reloads and may read from files, in order: ``Buffer.key`` -> buffer.

    Args:
        memgraph: A plan.
        names: The weights that lie in files.
    """
    graph = memgraph.graph
    ids = (n.buffer for n in memgraph.nodes if n.kind is NodeKind.RELOAD and n.buffer is not None)
    buffers = (graph.buffers[b] for b in ids)
    return {b.key: b for b in buffers if b.name in names and can_be_filed(graph, b)}


def with_files(memgraph: MemGraph, names: Collection[str], held: Collection[str]) -> MemGraph:
    """Return a plan that reads weights from files.

    Args:
        memgraph: A plan.
        names: The weights that lie in files.
        held: The keys of buffers that have a copy in host memory.
    """
    graph = memgraph.graph
    filed = (
        b.id
        for b in graph.buffers
        if b.name in names and b.key not in held and can_be_filed(graph, b)
    )
    return replace(memgraph, filed=tuple(filed))


@dataclass(frozen=True, slots=True)
class Division:
    """A plan, with what it has in host memory and what it reads from files.

    Attributes:
        memgraph: The plan.
        host_bytes: Host memory that it takes.
        least_file_bytes: Bytes that a pass reads from files at least, whatever the plan.
    """

    memgraph: MemGraph
    host_bytes: int
    least_file_bytes: int = 0


def divided(
    memgraph: MemGraph, *, other_bytes: int, most_bytes: int, lower_bound_bytes: int
) -> Division:
    """Leave weights in files for which host memory has no room.

    Args:
        memgraph: A plan.
        other_bytes: Host memory for everything else.
        most_bytes: All host memory.
        lower_bound_bytes: Bytes that a pass reloads at least.
    """
    graph = memgraph.graph
    names = {b.name for b in graph.buffers if b.kind is BufferKind.WEIGHT}
    row_bytes = sum(b.nbytes for b in graph.buffers if graph.is_handed(b))  # lie in no file
    reloads = {key: b.nbytes for key, b in reloads_of(memgraph, names).items()}
    room_bytes = max(0, most_bytes - other_bytes)
    held = host_share(reloads, (), room_bytes)
    return Division(
        check(with_files(memgraph, names, held)),
        other_bytes + sum(reloads[key] for key in held),
        max(0, lower_bound_bytes - row_bytes - room_bytes),
    )


def host_share(reloads: Mapping[str, int], held: Collection[str], host_bytes: int) -> set[str]:
    """Choose what has a copy in host memory.

    Args:
        reloads: The keys of buffers that a plan reloads, in order -> their bytes.
        held: Those that have a copy already; they keep it.
        host_bytes: What all copies may take.
    """
    chosen = {key for key in reloads if key in held}
    others = {key: nbytes for key, nbytes in reloads.items() if key not in chosen}
    left_bytes = host_bytes - sum(reloads[key] for key in chosen)
    share, due_bytes = left_bytes / max(1, sum(others.values())), 0.0
    for key, nbytes in others.items():
        due_bytes += nbytes * share
        if nbytes <= min(due_bytes, left_bytes):
            chosen.add(key)
            due_bytes, left_bytes = due_bytes - nbytes, left_bytes - nbytes
    for key in sorted(others.keys() - chosen, key=lambda k: (-others[k], k)):
        if others[key] <= left_bytes:
            chosen.add(key)
            left_bytes -= others[key]
    return chosen
