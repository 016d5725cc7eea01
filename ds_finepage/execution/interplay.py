"""Measures what lanes do to each other: overlapping ops and copies, and waits between lanes."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch

from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.lanes import CpuLanes
from ds_finepage.execution.program import LANES, Program, Step
from ds_finepage.execution.spans import CpuSpanRecorder
from ds_finepage.graph.memgraph import Extent, Lane, Node, NodeKind

PIECE_BYTES = 1 << 20
"""Of one copy, and of one op's operand; as many as fit the scratch are used in turn."""

SECONDS, REPEATS = 2e-3, 3
"""Time of the ops alone, and of the copies alone, in one measurement; the shortest counts."""

NUM_WAITS, NUM_STEPS = 16, 32
ROW = 1024

Run = Callable[[int], None]
"""Issues an op, or a copy, with the piece of this number."""


def slowdowns(on_device: torch.Tensor, host: torch.Tensor) -> tuple[float, float]:
    """Measure the factors of the time of an op while copies run, and of a copy while ops run.

    The op reads memory, which it shares with copies.

    Args:
        on_device: Scratch on the device, 1-d uint8; more than two pieces.
        host: Host memory, 1-d uint8.
    """
    device, op = device_of(on_device.device), _piecewise_product(on_device)
    half = _half(on_device)
    nbytes = min(half, PIECE_BYTES)

    def copy(number: int) -> None:
        target = half + number * nbytes % (half - nbytes + 1)
        source = number * nbytes % (len(host) - nbytes + 1)
        on_device[target : target + nbytes].copy_(host[source : source + nbytes], non_blocking=True)

    side_by_side = _on_streams(device, op, copy) if isinstance(device, Accelerator) else None
    return _factors(side_by_side or _on_threads(op, copy))


def _half(memory: torch.Tensor) -> int:
    """Return the bytes of whole rows of float32 in the first half of some memory."""
    return len(memory) // 2 // (4 * ROW) * (4 * ROW)


def _piecewise_product(on_device: torch.Tensor) -> Run:
    """Return an op that reads one piece of the first half of some memory."""
    matrices = on_device[: _half(on_device)].zero_().view(torch.float32).view(-1, ROW)
    rows = min(len(matrices), PIECE_BYTES // (4 * ROW))
    vector, out = (torch.zeros(n, device=on_device.device) for n in (ROW, rows))

    def op(number: int) -> None:
        first = number * rows % (len(matrices) - rows + 1)
        torch.mv(matrices[first : first + rows], vector, out=out)

    return op


SideBySide = Callable[[int, int], tuple[float, float]]
"""Runs some ops and some copies side by side; returns the seconds of either."""


def _factors(side_by_side: SideBySide) -> tuple[float, float]:
    side_by_side(1, 1)
    num_ops = math.ceil(SECONDS * 2 / max(side_by_side(2, 0)[0], 1e-6))
    num_copies = math.ceil(SECONDS * 2 / max(side_by_side(0, 2)[1], 1e-6))
    op_alone = min(side_by_side(num_ops, 0)[0] for _ in range(REPEATS))
    copy_alone = min(side_by_side(0, num_copies)[1] for _ in range(REPEATS))
    both = [side_by_side(num_ops, num_copies) for _ in range(REPEATS)]
    op, copy = (min(seconds) for seconds in zip(*both, strict=True))
    return max(1.0, op / max(op_alone, 1e-9)), max(1.0, copy / max(copy_alone, 1e-9))


def _repeated(run: Run, count: int) -> float:
    start = time.perf_counter()
    for number in range(count):
        run(number)
    return time.perf_counter() - start


def _on_threads(op: Run, copy: Run) -> SideBySide:
    def side_by_side(num_ops: int, num_copies: int) -> tuple[float, float]:
        if not num_ops or not num_copies:
            return _repeated(op, num_ops), _repeated(copy, num_copies)
        copied: list[float] = []
        both = threading.Barrier(2)

        def copies() -> None:
            with torch.no_grad():
                both.wait()
                copied.append(_repeated(copy, num_copies))

        thread = threading.Thread(target=copies, daemon=True)
        thread.start()
        both.wait()
        took = _repeated(op, num_ops)
        thread.join()
        return took, copied[0]

    return side_by_side


def _on_streams(device: Accelerator, op: Run, copy: Run) -> SideBySide:
    copies = device.new_stream()

    def side_by_side(num_ops: int, num_copies: int) -> tuple[float, float]:
        begin, op_end, copy_end = (device.new_event(is_timed=True) for _ in range(3))
        compute: Any = device.current_stream()
        device.synchronize()
        begin.record(compute)
        copies.wait_event(begin)
        with copies:
            _repeated(copy, num_copies)
        copy_end.record(copies)
        _repeated(op, num_ops)
        op_end.record(compute)
        device.synchronize()
        return begin.elapsed_time(op_end) / 1e3, begin.elapsed_time(copy_end) / 1e3

    return side_by_side


def wait_seconds(on_device: torch.Tensor, host: torch.Tensor) -> float:
    """Measure how long a lane takes to go on after it had to wait for another.

    Two lanes take turns: a copy, and then nothing on the compute lane. It counts as 0 for an
    accelerator, whose streams would wait for the host instead.

    Args:
        on_device: Scratch on the device, 1-d uint8.
        host: Host memory, 1-d uint8.
    """
    if device_of(on_device.device).is_accelerator:
        return 0.0
    nbytes = min(len(on_device), PIECE_BYTES)
    program = _taking_turns(nbytes)
    source, target = host[:nbytes], on_device[:nbytes]

    def copy() -> None:
        target.copy_(source)

    actions = {step.node.id: copy if step.lane is Lane.H2D else _nothing for step in program.merged}
    copies = min(_repeated(lambda _: copy(), NUM_WAITS) for _ in range(REPEATS))
    lanes = CpuLanes()
    try:
        runs = [_repeated(lambda _: lanes.run(program, actions), 1) for _ in range(REPEATS)]
    finally:
        lanes.close()
    return max(0.0, min(runs) - copies) / (2 * NUM_WAITS)


def step_seconds(on_device: torch.Tensor) -> float:
    """Measure how long a lane takes from the end of an op to the begin of the next.

    The ops go through much memory, so that the code between them is no longer in the caches. It
    counts as 0 for an accelerator, whose streams hold the next op when one ends.

    Args:
        on_device: Scratch on the device, 1-d uint8; more than two pieces.
    """
    if device_of(on_device.device).is_accelerator:
        return 0.0
    op = _piecewise_product(on_device)
    nodes = [Node(i, NodeKind.COMPUTE, task=0) for i in range(NUM_STEPS)]
    steps = tuple(Step(n, Lane.COMPUTE, n.id + 1, (), signals=False) for n in nodes)
    program = Program({lane: steps if lane is Lane.COMPUTE else () for lane in LANES}, steps)
    recorder = CpuSpanRecorder()
    with closing(CpuLanes()) as lanes:
        gaps = [_gaps_ns(program, recorder, op, lanes) for _ in range(REPEATS)]
    return statistics.median(gaps) / (NUM_STEPS - 1) / 1e9


def _gaps_ns(program: Program, recorder: CpuSpanRecorder, op: Run, lanes: CpuLanes) -> int:
    """Run an op in every step of a program of one lane; return the time between the steps."""
    actions = {step.node.id: partial(op, step.node.id) for step in program.merged}
    lanes.run(program, recorder.begin(program.merged, actions))
    spans = recorder.spans()
    return spans[-1].end_ns - spans[0].start_ns - sum(s.end_ns - s.start_ns for s in spans)


def _nothing() -> None:
    pass


def _taking_turns(nbytes: int) -> Program:
    """Return a program in which each copy waits for a task, and each task for a copy."""
    extent = Extent(0, nbytes)
    steps = []
    for turn in range(1, NUM_WAITS + 1):
        reload = Node(2 * turn, NodeKind.RELOAD, buffer=0, extent=extent)
        waits = ((Lane.COMPUTE, turn - 1),) if turn > 1 else ()
        steps.append(Step(reload, Lane.H2D, turn, waits, signals=True))
        task = Node(2 * turn + 1, NodeKind.COMPUTE, task=0)
        steps.append(Step(task, Lane.COMPUTE, turn, ((Lane.H2D, turn),), signals=True))
    return Program(
        {lane: tuple(s for s in steps if s.lane is lane) for lane in LANES}, tuple(steps)
    )
