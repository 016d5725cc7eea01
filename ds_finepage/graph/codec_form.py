"""The form of the JSON that codec.py describes: kinds, fields and columns."""

from __future__ import annotations

import math
from typing import TypeAlias

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import EdgeKind, Lane, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.graph.timeline import Timeline

FORMAT_VERSION = 1
"""Raised with every change of the form; there is no reader for older ones: plan again."""

Encodable: TypeAlias = TaskGraph | MemGraph | Timeline | HardwareProfile
Standalone: TypeAlias = TaskGraph | Timeline | HardwareProfile

KINDS: dict[type[Encodable], str] = {
    TaskGraph: "taskgraph",
    MemGraph: "memgraph",
    Timeline: "timeline",
    HardwareProfile: "hardware_profile",
}

BUFFER_COLUMNS = ("id", "kind", "nbytes", "name", "payload", "offset", "gather")
TENSOR_COLUMNS = ("id", "buffer", "dtype", "shape", "stride", "offset")
TASK_COLUMNS = (
    "index", "op", "label", "args", "kwargs", "results", "reads", "writes", "touches",
    "flops", "moved_bytes", "workspace_bytes", "time_ns",
)  # fmt: skip
NUM_MEASURED = 2  # the last columns of a task are costs, which a fingerprint leaves out
INPUT_COLUMNS = ("position", "tensor")
OUTPUT_COLUMNS = ("tensor", "position", "host")
CALL_COLUMNS = ("name", "class_name", "depth", "begin", "end")
NODE_COLUMNS = ("id", "kind", "buffer", "task", "offset", "nbytes")
EDGE_COLUMNS = ("before", "after", "kind")
RESIDENCY_COLUMNS = ("buffer", "offset", "nbytes")
SLOT_COLUMNS = ("buffer", "offset")
SPAN_COLUMNS = ("node", "lane", "start_ns", "end_ns", "name")

TASKGRAPH_FIELDS = (
    "name", "num_batches", "versions", "buffers", "tensors", "tasks", "inputs", "outputs", "calls",
)  # fmt: skip
MEMGRAPH_FIELDS = (
    "taskgraph", "fingerprint", "versions", "policy", "arena_bytes", "alignment", "host_bytes",
    "entry", "exit", "host_slots", "routed", "nodes", "edges",
)  # fmt: skip
TIMELINE_COUNTS = (
    "total_ns", "compute_ns", "transfer_ns", "stall_ns", "peak_bytes", "lower_bound_ns",
)  # fmt: skip
PROFILE_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s")
PROFILE_COUNTS = ("capacity_bytes", "launch_ns", "transfer_latency_ns")

BUFFER_KINDS = {kind.value: kind for kind in BufferKind}
NODE_KINDS = {kind.value: kind for kind in NodeKind}
EDGE_KINDS = {kind.value: kind for kind in EdgeKind}
LANES = {lane.value: lane for lane in Lane}
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
