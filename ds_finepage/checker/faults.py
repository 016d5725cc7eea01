"""Every way in which a memgraph can be wrong."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fault(str, enum.Enum):
    """Every way in which a memgraph can be wrong."""

    # The taskgraph and the shape of the memgraph. With one of these, the checker stops.
    TASKGRAPH = "taskgraph"  # ids are not positions, or a task names its buffers badly
    WEIGHT_WRITTEN = "weight_written"  # a task changes a weight that is no rows of a KV cache
    ALIGNMENT = "alignment"  # not positive
    NODE_ID = "node_id"  # not the node's position
    NODE_FIELDS = "node_fields"  # a field is missing, superfluous or out of range
    EDGE_RANGE = "edge_range"  # names a node that does not exist
    EDGE_BACKWARD = "edge_backward"  # does not point to a higher id
    EDGE_UNSORTED = "edge_unsorted"
    EDGE_REPEATED = "edge_repeated"

    # Tasks.
    TASK_MISSING = "task_missing"  # no node computes it
    TASK_REPEATED = "task_repeated"  # more than one node does

    # Extents.
    NOT_PAGED = "not_paged"  # a node places a buffer that does not live in the arena
    EXTENT_OUTSIDE = "extent_outside"  # not inside the arena
    EXTENT_UNALIGNED = "extent_unaligned"
    EXTENT_TOO_SMALL = "extent_too_small"  # shorter than the buffer
    EXTENT_CHANGED = "extent_changed"  # not the extent that the buffer was given
    OVERLAP = "overlap"  # bytes of a live buffer are given to another
    ALREADY_LIVE = "already_live"  # a second extent for a live buffer
    NOT_LIVE = "not_live"  # a task or a transfer needs a buffer that has no extent
    NOT_RELEASED = "not_released"  # live at the end, and not a weight
    ENTRY_MISMATCH = "entry_mismatch"  # ``entry`` and the RESIDENT nodes differ
    GATHER_KEPT = "gather_kept"  # rows that each call chooses are listed as resident
    EXIT_MISMATCH = "exit_mismatch"  # ``exit`` and the weights that are valid at the end differ

    # Contents.
    UNDEFINED_READ = "undefined_read"  # read before any task wrote it
    STALE_CONTENTS = "stale_contents"  # not the contents that program order gives
    UNJOINED_READ = "unjoined_read"  # touched, but no join between the touches and the use
    CONTENTS_LOST = "contents_lost"  # dropped, used again later, and no copy exists
    NO_HOST_COPY = "no_host_copy"  # reloaded, but the host has no valid copy
    RELOAD_OVERWRITES = "reload_overwrites"  # reloaded over contents that are already there
    OFFLOAD_UNDEFINED = "offload_undefined"  # no task wrote it yet
    WEIGHT_OFFLOADED = "weight_offloaded"  # a weight is clean: drop it (not ``PUBLISHED``)
    ROUTE_WRONG = (
        "route_wrong"  # a routed reload reads another table than its task, or cannot be routed
    )
    COLLECT_WRONG = "collect_wrong"  # a collect without the reload of this rank's part before it

    # Host memory.
    FILE_WRONG = "file_wrong"  # read from a file: no weight, or none that is one range of a file
    HOST_SLOT_MISSING = "host_slot_missing"  # an offloaded buffer has none, or more than one
    HOST_SLOT_OUTSIDE = "host_slot_outside"  # not inside ``host_bytes``
    HOST_SLOT_OVERLAP = "host_slot_overlap"
    HOST_RACE = "host_race"  # an offload may overwrite a copy before its last reload ends

    # Waits. An edge of any kind is enough: the kind only says why it exists.
    NO_DATA_EDGE = "no_data_edge"  # holder of the contents -> reader
    NO_ALLOC_EDGE = "no_alloc_edge"  # alloc -> first writer or reload
    NO_MEMORY_EDGE = "no_memory_edge"  # vacator -> alloc of the same bytes
    NO_READ_DROP_EDGE = "no_read_drop_edge"  # every reader, and the holder -> drop
    NO_USE_OFFLOAD_EDGE = "no_use_offload_edge"  # every user, and the holder -> offload
    NO_STORE_RELOAD_EDGE = "no_store_reload_edge"  # offload -> reload
    NO_JOIN_EDGE = "no_join_edge"  # every touch -> join
    NO_ORDER_EDGE = "no_order_edge"  # readers of the old contents, and their writer -> new writer


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault, and the node at which it shows."""

    fault: Fault
    node: int | None  # None: no single node
    message: str
