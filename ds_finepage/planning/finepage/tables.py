"""Chooses embedding tables to keep where the copies of their rows take time."""

from __future__ import annotations

from collections.abc import Iterator

from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import looked_up_bytes


def tables_to_keep(problem: Problem, worth_ns: float) -> Iterator[frozenset[int]]:
    """Yield sets of tables: all of them, and all but the largest.

    To keep a table costs room, so a set has to save time.

    Args:
        problem: The pass.
        worth_ns: The copies of the rows of a set have to take longer than this.
    """
    profile, rows = problem.profile, looked_up_bytes(problem.graph)
    if profile is None or not rows:
        return
    largest = max(rows, key=problem.size)
    for kept in (frozenset(rows), frozenset(rows) - {largest}):
        rows_ns = len(kept) * profile.transfer_latency_ns
        rows_ns += sum(rows[b] for b in kept) * 10**9 // int(profile.h2d_bytes_per_s)
        if rows_ns > worth_ns:
            yield kept
