"""The checker's view of the arena: which buffer holds which bytes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ds_finepage.checker.faults import Fault
from ds_finepage.checker.report import Report, placed, span
from ds_finepage.checker.shape import title_of
from ds_finepage.graph.memgraph import Extent, Node


@dataclass(slots=True)
class _Segment:
    """Neighbouring bytes with one history."""

    start: int
    tenant: int | None  # the buffer that has the bytes or had them last; None: no buffer yet
    vacator: int | None  # node that freed the bytes; None: no node yet, or the tenant is live


class Arena:
    """Verifies extents: each is inside the arena, and no two live ones overlap.

    It knows the last tenant of each byte: an interval map, of sorted segments without gaps.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._memgraph = report.memgraph
        self._segments = [_Segment(0, None, None)]  # the last one never ends

    def accepts(self, node: Node) -> bool:
        """Verify the extent of a node by itself; False if the walk must leave the node out."""
        buffer, extent = placed(node)
        wrong = self._report.wrong
        if not self._memgraph.graph.buffers[buffer].kind.is_paged:
            wrong(Fault.NOT_PAGED, node.id, "does not live in the arena")
            return False
        nbytes = self._memgraph.graph.buffers[buffer].nbytes
        where = f"at {span(extent)} "
        if extent.nbytes < nbytes:
            wrong(Fault.EXTENT_TOO_SMALL, node.id, where + f"is too small for {nbytes} bytes")
        if extent.offset % self._memgraph.alignment:
            text = where + f"does not begin at a multiple of {self._memgraph.alignment}"
            wrong(Fault.EXTENT_UNALIGNED, node.id, text)
        if extent.offset < 0 or extent.nbytes < 0 or extent.end > self._memgraph.arena_bytes:
            text = where + f"is not inside the arena of {self._memgraph.arena_bytes} bytes"
            wrong(Fault.EXTENT_OUTSIDE, node.id, text)
            return False
        return True

    def take(self, node: Node) -> None:
        """Give a node's extent to its buffer; its bytes must be free, and their vacators done."""
        buffer, extent = placed(node)
        vacators: dict[int, None] = {}  # each once, in order
        where = self._range(extent)
        for segment in self._segments[where]:
            if segment.vacator is not None:
                vacators[segment.vacator] = None
            elif segment.tenant is not None:
                other = title_of(self._memgraph.graph, segment.tenant)
                text = f"at {span(extent)} overlaps live {other}"
                self._report.wrong(Fault.OVERLAP, node.id, text)
        if extent.nbytes:
            self._segments[where] = [_Segment(extent.offset, buffer, None)]
        self._report.require_waits(
            Fault.NO_MEMORY_EDGE, vacators, node.id, "the vacator of its bytes"
        )

    def free(self, extent: Extent, node: Node) -> None:
        """Take back the extent of a node's buffer."""
        buffer, _ = placed(node)
        for segment in self._segments[self._range(extent)]:
            if segment.tenant == buffer and segment.vacator is None:
                segment.vacator = node.id

    def _range(self, extent: Extent) -> slice:
        """Cut segments at the borders of an extent; return the ones inside."""
        cuts = []
        for offset in (extent.offset, extent.end):
            at = bisect_left(self._segments, offset, key=lambda s: s.start)
            if at == len(self._segments) or self._segments[at].start != offset:
                old = self._segments[at - 1]
                self._segments.insert(at, _Segment(offset, old.tenant, old.vacator))
            cuts.append(at)
        return slice(*cuts)
