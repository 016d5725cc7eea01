"""Keeps the taskgraphs of calls in the cache folder, beside the traces of their graphs.

A taskgraph follows from a graph, the shapes of a call's arguments and a few settings of torch. So a
process that has a kept trace need not record its calls. Calls that are recorded for a range of
sizes are not kept. A taskgraph names ops, so a file is read only where no other user can write it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.layouts import StridesOf
from ds_finepage.capture.plain import require_plain
from ds_finepage.capture.recording import record
from ds_finepage.capture.unguarded import kernel_settings
from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.execution.disk_cache import read_own_file, write_own_file
from ds_finepage.graph.codec import dumps, loads
from ds_finepage.graph.taskgraph import TaskGraph

logger = logging.getLogger(__name__)

MAX_TASKGRAPHS = 16
"""Taskgraphs of one graph that are kept."""

_START = "ds_finepage_taskgraphs"


def keep_taskgraphs(module: GraphModule, folder: Path, digest: str) -> None:
    """Say where the taskgraphs of a graph are kept.

    Args:
        module: The graph.
        folder: Holds the files.
        digest: The hash of the graph.
    """
    module.meta[_START] = folder / digest


def record_or_read(
    graph: DynamoGraph, args: Sequence[Any], *, strides_of: StridesOf | None = None
) -> TaskGraph:
    """Return the taskgraph of a call for exactly its sizes: a kept one, or else record it.

    Args:
        graph: Of the call.
        args: Of the call.
        strides_of: As in :func:`ds_finepage.capture.recording.record`.

    Raises:
        CaptureError: The graph cannot be written down as a taskgraph.
    """
    start = graph.module.meta.get(_START)
    if start is None or graph.sharing_of(args):
        return record(graph, args, strides_of=strides_of)
    path = start.with_name(f"{start.name}-{_digest_of_call(graph, args)}.json")
    kept = _read(path)
    if kept is not None:
        return dataclasses.replace(kept, name=graph.name)
    found = record(graph, args, strides_of=strides_of)
    if len(list(path.parent.glob(f"{start.name}-*.json"))) < MAX_TASKGRAPHS:
        _write(path, found)
    return found


def _digest_of_call(graph: DynamoGraph, args: Sequence[Any]) -> str:
    described = [
        _described(arg, graph.weights[position][1] if position in graph.weights else None)
        for position, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) or position in graph.key_positions
    ]
    kinds = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
    found = described, _state_of_torch({"cpu", *kinds})
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _described(arg: Any, weight: str | None) -> tuple[Any, ...]:
    """Return all of an argument that a taskgraph depends on."""
    if not isinstance(arg, torch.Tensor):
        return type(arg).__name__, arg
    require_plain(arg)
    if arg.layout is not torch.strided:
        return str(arg.layout), weight
    nbytes, place = arg.untyped_storage().nbytes(), (arg.storage_offset(), str(arg.device))
    kind = type(arg).__name__, str(arg.dtype), arg.requires_grad, arg.is_conj(), arg.is_neg()
    return weight, kind, tuple(arg.shape), arg.stride(), nbytes, place


def _state_of_torch(kinds: Set[str]) -> tuple[Any, ...]:
    """Return what decides into which ops a call falls, and which tensors they make.

    Args:
        kinds: Types of devices.
    """
    return (
        *kernel_settings(),
        torch.are_deterministic_algorithms_enabled(),
        [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)],
        torch.get_default_dtype(),
        torch.get_default_device(),
    )


def _read(path: Path) -> TaskGraph | None:
    if not path.exists():
        return None
    try:
        content = read_own_file(path)
        return None if content is None else loads(content.decode(), TaskGraph)
    except (OSError, UnicodeDecodeError, InvalidPlanError) as error:
        logger.warning("%s cannot be used: %s", path, error)
        return None


def _write(path: Path, graph: TaskGraph) -> None:
    try:
        write_own_file(path, dumps(graph))
    except (ConfigError, InvalidPlanError, OSError) as error:
        logger.warning("a taskgraph cannot be kept: %s", error)
