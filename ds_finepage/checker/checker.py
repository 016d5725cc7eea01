"""Proof that a memgraph is right: reads plain data, finds everything that is wrong.

Independent of whatever wrote the memgraph, and deliberately naive: it walks the nodes once in the
order of their ids, keeps what each byte and each buffer holds, and asks for every wait that makes
any other order of execution come out the same.

[Note: why direct edges are enough]
For each relation below the checker wants one edge between the two nodes themselves; a path would
do, but direct edges need no search. A buffer is *live* from its RESIDENT or ALLOC node to the DROP
or OFFLOAD that vacates its bytes. Within one life every task comes after the node that holds the
contents, and whatever changes the contents comes after whoever read the old ones; the vacator comes
after them all; the next tenant of a byte comes after the vacator of the latest one, and so, by
induction, after all tenants before. Two lives of a buffer share no byte of the arena unless a
memory edge orders them, so nothing else is asked between them. What they do share is the host
copy, for which alone a path is searched (``Fault.HOST_RACE``), because it hardly ever occurs.
"""

from __future__ import annotations

from ds_finepage.checker.faults import Violation
from ds_finepage.checker.shape import shape_violations
from ds_finepage.checker.walk import Walk
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.memgraph import MemGraph

_MAX_LISTED = 20  # violations that an error spells out


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

    Where its shape is wrong (ids, fields, edges), only that is listed.
    """
    return shape_violations(memgraph) or Walk(memgraph).run()
