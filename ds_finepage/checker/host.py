"""The checker's view of host memory: which copies are there, and who may overwrite them."""

from __future__ import annotations

from collections import Counter

from ds_finepage.checker.faults import Fault
from ds_finepage.checker.report import Report, placed, span
from ds_finepage.checker.shape import title_of
from ds_finepage.checker.state import INITIAL, UNDEFINED, Contents
from ds_finepage.graph.memgraph import PUBLISHED, Extent, Node, NodeKind
from ds_finepage.graph.taskgraph import BufferKind


class HostCopies:
    """Contents of the host copies, and the nodes that wrote and read them."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._memgraph = report.memgraph
        self._graph = report.memgraph.graph
        self.contents: dict[int, Contents] = {
            b.id: INITIAL for b in self._graph.buffers if b.kind is BufferKind.WEIGHT
        }
        self._source: dict[int, int] = {}  # node that wrote the host copy, if one of the pass did
        self._users: dict[int, list[int]] = {}  # nodes that used the pinned slot, first to last

    def reload(self, node: Node, latest: Contents) -> Contents:
        """Verify that a RELOAD finds a valid copy.

        Returns:
            The contents that it brings in.
        """
        buffer, _ = placed(node)
        if buffer not in self.contents or self.contents[buffer] != latest:
            self._report.wrong(Fault.NO_HOST_COPY, node.id, "has no valid copy on the host")
        source = self._source.get(buffer)
        if source is not None:
            self._report.require_waits(Fault.NO_STORE_RELOAD_EDGE, [source], node.id, "its offload")
        if buffer in self._users:
            self._users[buffer].append(node.id)
        return self.contents.get(buffer, UNDEFINED)

    def offload(self, node: Node, contents: Contents) -> None:
        """Verify an OFFLOAD, which overwrites the host copy with some contents."""
        buffer, _ = placed(node)
        is_weight = self._graph.buffers[buffer].kind is BufferKind.WEIGHT
        if is_weight and self.contents[buffer] == contents and self._memgraph.policy != PUBLISHED:
            text = "copies a weight; the host has it already"
            self._report.wrong(Fault.WEIGHT_OFFLOADED, node.id, text)
        if not contents.is_defined:
            self._report.wrong(Fault.OFFLOAD_UNDEFINED, node.id, "copies bytes that no node wrote")
        self._report.require_waits(
            Fault.HOST_RACE, self._users.get(buffer, []), node.id, "a user of the old host copy"
        )
        self.contents[buffer] = contents
        self._source[buffer] = node.id
        self._users[buffer] = [node.id]

    def _files(self, offloaded: set[int | None]) -> None:
        """Verify that weights in files are one range of a file, which no node writes."""
        graph, filed = self._graph, self._memgraph.filed
        if list(filed) != sorted(set(filed)):
            text = f"weights in files {filed} are not sorted or repeat"
            self._report.wrong(Fault.FILE_WRONG, None, text)
        for b in filed:
            buffer = graph.buffers[b] if 0 <= b < len(graph.buffers) else None
            if (
                buffer is None
                or buffer.kind is not BufferKind.WEIGHT
                or buffer.gather is not None
                or graph.num_parts(buffer) > 1
                or graph.num_pieces(buffer) > 1
                or b in offloaded
            ):
                name = f"buffer {b}" if buffer is None else title_of(graph, b)
                text = f"{name} is read from a file, and is no range of one that stays as it is"
                self._report.wrong(Fault.FILE_WRONG, None, text)

    def end(self) -> None:
        """Verify the slots in the pinned pool: one a buffer, inside the pool, without overlap."""
        slots = Counter(b for b, _ in self._memgraph.host_slots)
        offloaded = {n.buffer for n in self._memgraph.nodes if n.kind is NodeKind.OFFLOAD}
        wrong = self._report.wrong
        for buffer in self._graph.buffers:
            if slots[buffer.id] > 1 or (slots[buffer.id] == 0 and buffer.id in offloaded):
                name = title_of(self._graph, buffer.id)
                text = f"{name} has {slots[buffer.id]} host slots; it needs 1"
                wrong(Fault.HOST_SLOT_MISSING, None, text)
        self._files(offloaded)
        end = 0
        for b, offset in sorted(self._memgraph.host_slots, key=lambda s: (s[1], s[0])):
            if not 0 <= b < len(self._graph.buffers):
                text = f"a host slot is for buffer {b}, which does not exist"
                wrong(Fault.HOST_SLOT_MISSING, None, text)
                continue
            slot = Extent(offset, self._graph.buffers[b].nbytes)
            text = f"host slot {span(slot)} of {title_of(self._graph, b)} "
            if offset < 0 or slot.end > self._memgraph.host_bytes:
                text += f"is not inside {self._memgraph.host_bytes} bytes"
                wrong(Fault.HOST_SLOT_OUTSIDE, None, text)
            elif offset < end and slot.nbytes:
                wrong(Fault.HOST_SLOT_OVERLAP, None, text + "overlaps the one before it")
            end = max(end, slot.end)
