"""The buffers and tasks that a recorder writes down, before sizes are known and unused ones go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ds_finepage.capture.dynamo_graph import BufferChangedError
from ds_finepage.capture.lengths import Size
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import BufferKind


@dataclass(frozen=True)
class Formula:
    """Stands for a size in a task's arguments that differs from call to call."""

    size: Any


@dataclass
class BufferDraft:
    """Bytes that ops make, or that are given to the graph."""

    storage: torch.UntypedStorage  # held: its identity is not given away
    kind: BufferKind
    nbytes: Size
    name: str = ""
    payload: bytes | None = None
    is_written: bool = False
    handed: int | None = None  # tensor in host memory that it is a copy of
    is_module_buffer: bool = False  # of a weight

    def refusal(self, message: str) -> Exception:
        """Return the error of a use that a weight does not allow."""
        return BufferChangedError(self.name) if self.is_module_buffer else CaptureError(message)


@dataclass
class TaskDraft:
    """An op that computes."""

    op: str
    label: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[int | None, ...]
    reads: set[int]
    writes: set[int]
    flops: Size
    moved_bytes: Size


@dataclass
class CallDraft:
    """A call of a module."""

    name: str
    class_name: str
    depth: int
    begin: int
    end: int
