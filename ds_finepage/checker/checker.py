"""Proof that a memgraph is right: reads plain data, finds everything that is wrong.

The checker shares no code with the policies and is deliberately naive. It walks the nodes once in
the order of their ids, tracks the contents of each byte and each buffer, and requires every wait
that gives all other orders of execution the same results.

[Note: why direct edges are enough]
For each relation below the checker requires one edge between the two nodes themselves. A path
would be enough, but direct edges need no search. A buffer is *live* from its RESIDENT or ALLOC node
to the DROP or OFFLOAD that vacates its bytes. Within one life:

- every task comes after the node that holds the contents;
- a task that changes the contents comes after all readers of the old contents;
- the vacator comes after all of them.

The next tenant of a byte comes after the vacator of the last tenant, and so, by induction, after
all earlier tenants. Two lives of a buffer share no byte of the arena unless a memory edge orders
them. They share the host copy: an offload comes after the one before it, and after all reloads of
that copy (``Fault.HOST_RACE``).
"""

from __future__ import annotations

from ds_finepage.checker.faults import Violation
from ds_finepage.checker.shape import shape_violations
from ds_finepage.checker.walk import Walk
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.memgraph import MemGraph

_MAX_LISTED = 20  # violations in the message of an error


def check(memgraph: MemGraph) -> MemGraph:
    """Return the memgraph if nothing is wrong with it.

    Raises:
        InvalidPlanError: Something is wrong; the message lists what.
    """
    found = violations(memgraph)
    if not found:
        return memgraph
    lines = [f"{v.fault.value}: {v.message}" for v in found[:_MAX_LISTED]]
    if len(found) > _MAX_LISTED:
        lines.append(f"and {len(found) - _MAX_LISTED} more")
    raise InvalidPlanError(
        f"memgraph of {memgraph.graph.name!r} (policy {memgraph.policy!r}) breaks "
        f"{len(found)} rule(s):\n  " + "\n  ".join(lines)
    )


def violations(memgraph: MemGraph) -> list[Violation]:
    """List everything that is wrong with a memgraph; empty if it is right.

    If its shape is wrong (ids, fields, edges), the list has only those faults.
    """
    return shape_violations(memgraph) or Walk(memgraph).run()
