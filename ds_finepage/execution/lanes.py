"""Lanes that wait for each other through events only.

On the CPU each transfer lane is a thread, and the compute lane is the caller's thread. Torch copies
release the GIL, so transfers really run beside tasks. On an accelerator each lane is a stream, and
the host only enqueues work: it never blocks inside a pass.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeAlias

import torch

from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.disk_lane import CHECK, Handovers
from ds_finepage.execution.program import Program, Step
from ds_finepage.graph.memgraph import Lane

Action = Callable[[], object]

logger = logging.getLogger(__name__)

DELAYED_SHARE = 0.1
"""Of the steps, where lanes are delayed at random."""

SMALL_TRANSFER_BYTES = 1 << 20
"""A smaller copy takes less time than passing it to another thread."""


class CpuLanes:
    """Computes on the calling thread; each transfer lane has a thread, pass after pass.

    If transfers are small, the calling thread does everything, in the order of the plan.
    """

    def __init__(self, *, delay_seed: int | None = None, max_delay_us: int = 200) -> None:
        """Start no thread yet.

        Args:
            delay_seed: Delay steps of every lane at random, so that races show as wrong results.
            max_delay_us: The longest delay.
        """
        self._random = None if delay_seed is None else random.Random(delay_seed)
        self._max_delay_us = max_delay_us
        self._threads: dict[tuple[int, Lane], ThreadPoolExecutor] = {}

    def follow(self) -> None:
        """Do nothing: the last pass is over."""

    def run(self, program: Program, actions: dict[int, Action]) -> None:
        """Run each step's action (by node id) after those it waits for; return when all are done.

        Raises:
            BaseException: The error of an action, or Ctrl-C; all lanes are idle by then.
        """
        if self._random is None and program.mean_transfer_bytes < SMALL_TRANSFER_BYTES:
            with torch.no_grad():
                for step in program.merged:
                    actions[step.node.id]()
            return
        done = {(s.lane, s.position): threading.Event() for s in program.merged if s.signals}
        errors: list[BaseException] = []  # where there is one, every lane stops
        num_threads = torch.get_num_threads()

        def wake_all() -> None:
            for event in done.values():
                event.set()

        def run_lane(steps: tuple[Step, ...]) -> None:
            try:
                if torch.get_num_threads() != num_threads:  # each thread has its own setting
                    torch.set_num_threads(num_threads)
                with torch.no_grad():
                    self._run_steps(steps, actions, done, errors)
            except BaseException as error:
                errors.append(error)
                wake_all()

        busy: list[Future[None]] = []
        try:
            for lane, steps in program.lanes.items():
                if steps and lane is not Lane.COMPUTE:
                    busy.append(self._thread(lane).submit(run_lane, steps))
            run_lane(program.lanes[Lane.COMPUTE])
            if not errors:
                wait(busy)
        except BaseException as error:  # Ctrl-C, outside of any step
            errors.insert(0, error)
            wake_all()
        if errors:
            _wait_through_interrupts(busy)
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads = {}

    def _thread(self, lane: Lane) -> ThreadPoolExecutor:
        key = os.getpid(), lane  # a process that was forked has no thread but the caller's
        if key not in self._threads:
            self._threads[key] = ThreadPoolExecutor(1, f"finepage-{lane.value}")
        return self._threads[key]

    def _run_steps(
        self,
        steps: tuple[Step, ...],
        actions: dict[int, Action],
        done: dict[tuple[Lane, int], threading.Event],
        errors: list[BaseException],
    ) -> None:
        for step in steps:
            for before in step.waits:
                done[before].wait()
            if self._random is not None:
                if delay_us := _delay_us(self._random, self._max_delay_us):
                    time.sleep(delay_us * 1e-6)
            if errors:
                return
            actions[step.node.id]()
            if step.signals:
                done[step.lane, step.position].set()


def _wait_through_interrupts(busy: list[Future[None]]) -> None:
    """Wait for lanes even if Ctrl-C is pressed again; their steps end by themselves."""
    while not all(future.done() for future in busy):
        try:
            wait(busy)
        except KeyboardInterrupt:
            continue


class StreamLanes:
    """A stream for each lane; the compute lane is the caller's current stream.

    ``_h2d`` overlaps reloads with compute, ``_d2h`` overlaps offloads with both, and ``_ranks``
    overlaps collects with all of them. All waits are event waits on the device. On every lane a
    pass begins after the end of the pass before. At its end the caller's stream waits for the
    transfer lanes, so no other stream uses a tensor that the caller frees. The disk lane has a
    thread: see ``disk_lane``. A task that the host computes waits on its stream for its
    activations, and runs on the caller's thread while the other streams go on.
    """

    def __init__(
        self, device: Accelerator, *, delay_seed: int | None = None, max_delay_us: int = 200
    ) -> None:
        """Create the streams.

        Args:
            device: The accelerator.
            delay_seed: Delay steps of every lane at random, on the device, so that races show as
                wrong results.
            max_delay_us: The longest delay.
        """
        self._device = device
        self._h2d, self._d2h, self._ranks, self._disk, self._host = (
            device.new_stream() for _ in range(5)
        )
        self._disk_thread: tuple[int, ThreadPoolExecutor] | None = None  # of a process
        self._order: weakref.WeakKeyDictionary[Program, _Order] = weakref.WeakKeyDictionary()
        # Of the last pass, and used again: a wait is for what was recorded when it was enqueued.
        self._begin, self._end = device.new_event(), device.new_event()
        self._has_run = False
        self._random = None if delay_seed is None else random.Random(delay_seed)
        self._max_delay_us = max_delay_us
        if self._random is not None and not device.can_delay:
            logger.warning(
                "debug.lane_delay_seed has no effect: torch cannot delay %s", device.name
            )
            self._random = None

    def follow(self) -> None:
        """Let the caller's current stream wait for the last pass, wherever that was enqueued."""
        self._follow(self._device.current_stream())

    def run(self, program: Program, actions: dict[int, Action]) -> None:
        """Enqueue a pass; the host does not wait for it.

        Raises:
            BaseException: The error of an action, or Ctrl-C; all streams are idle by then.
        """
        try:
            self._enqueue(program, actions)
        except BaseException:
            self._device.synchronize()
            raise

    def close(self) -> None:
        """Forget streams and events."""
        self._device.synchronize()
        self._order.clear()
        if self._disk_thread is not None:
            self._disk_thread[1].shutdown()
        self._disk_thread, self._has_run = None, False

    def _follow(self, stream: torch.Stream) -> None:
        if self._has_run:
            stream.wait_event(self._end)

    def _enqueue(self, program: Program, actions: dict[int, Action]) -> None:
        order = self._order.get(program)
        if order is None:
            streams = {Lane.H2D: self._h2d, Lane.D2H: self._d2h, Lane.RANKS: self._ranks}
            streams |= {Lane.DISK: self._disk, Lane.HOST: self._host}
            # A lane without steps need not be woken.
            streams = {lane: stream for lane, stream in streams.items() if program.lanes[lane]}
            stretches, reads = _stretches(program, streams, self._device.new_event)
            self._order[program] = order = (list(streams.values()), stretches, reads)
        others, stretches, reads = order
        compute = self._device.current_stream()
        self._follow(compute)
        compute.record_event(self._begin)
        for stream in others:
            stream.wait_event(self._begin)
        if reads is None:
            self._enqueue_stretches(compute, stretches, actions)
        else:
            self._enqueue_beside(reads, compute, stretches, actions)
        for stream in others:
            compute.wait_stream(stream)
        compute.record_event(self._end)
        self._has_run = True

    def _enqueue_stretches(
        self, compute: torch.Stream, stretches: list[_Stretch], actions: dict[int, Action]
    ) -> None:
        for own, steps in stretches:
            if own is None:
                self._enqueue_steps(compute, steps, actions)
            else:
                with own:
                    self._enqueue_steps(own, steps, actions)

    def _enqueue_beside(
        self,
        reads: _Reads,
        compute: torch.Stream,
        stretches: list[_Stretch],
        actions: dict[int, Action],
    ) -> None:
        """Enqueue the disk lane on a thread of its own, and the others meanwhile."""
        steps, handovers = reads
        actions = {**actions, **handovers.actions}
        handovers.begin()

        def read() -> None:
            try:
                with torch.no_grad(), self._disk:
                    self._enqueue_steps(self._disk, steps, actions)
            except BaseException as error:
                handovers.stop(error)

        if self._disk_thread is None or self._disk_thread[0] != os.getpid():
            self._disk_thread = os.getpid(), ThreadPoolExecutor(1, f"finepage-{Lane.DISK.value}")
        busy = self._disk_thread[1].submit(read)
        try:
            self._enqueue_stretches(compute, stretches, actions)
        except BaseException as error:
            handovers.stop(error)
            raise
        finally:
            _wait_through_interrupts([busy])
        handovers.check()

    def _enqueue_steps(
        self, stream: torch.Stream, steps: list[_Enqueued], actions: dict[int, Action]
    ) -> None:
        delayed = self._random
        for waits, node, event in steps:
            for before in waits:
                stream.wait_event(before)
            if delayed is not None:
                self._device.delay(stream, _delay_us(delayed, self._max_delay_us))
            actions[node]()
            if event is not None:
                stream.record_event(event)


_Enqueued = tuple[tuple[torch.Event, ...], int, torch.Event | None]
"""The events that a step waits for, its node, and the event that it signals."""

_Stretch = tuple[torch.Stream | None, list[_Enqueued]]
"""Steps of one lane that are enqueued one after another; None is the caller's stream."""

_Reads = tuple[list[_Enqueued], Handovers]
"""The steps of the disk lane, and the flags between its thread and the caller's."""

_Order = tuple[list[torch.Stream], list[_Stretch], _Reads | None]
"""The streams of transfers that a program uses, its steps, and those of the disk lane."""


def _stretches(
    program: Program, streams: dict[Lane, torch.Stream], new_event: Callable[[], torch.Event]
) -> tuple[list[_Stretch], _Reads | None]:
    """Give events to the steps of a program, once, so that a pass looks nothing up."""
    signalled: dict[tuple[Lane, int], torch.Event] = {}
    stretches: list[_Stretch] = []
    reads: list[_Enqueued] = []
    handovers = Handovers()
    over = {  # steps that the other thread waits for
        before
        for step in program.merged
        for before in step.waits
        if (before[0] is Lane.DISK) != (step.lane is Lane.DISK)
    }
    last: Lane | None = None
    for step in program.merged:
        event = new_event() if step.signals else None
        if event is not None:
            signalled[step.lane, step.position] = event
        if step.lane is not last and step.lane is not Lane.DISK:
            last = step.lane
            stretches.append((streams.get(last), []))
        is_read = step.lane is Lane.DISK
        steps = reads if is_read else stretches[-1][1]
        waits = tuple(signalled[before] for before in step.waits)
        for before in step.waits:
            if (before[0] is Lane.DISK) != is_read:
                steps.append(((), handovers.waited(before), None))
        if is_read:
            steps.append(((), CHECK, None))
        steps.append((waits, step.node.id, event))
        if (step.lane, step.position) in over:
            steps.append(((), handovers.raised((step.lane, step.position)), None))
    return stretches, (reads, handovers) if reads else None


def _delay_us(draw: random.Random, max_delay_us: int) -> float:
    """Draw the delay of one step, in microseconds; most have none."""
    return draw.random() * max_delay_us if draw.random() < DELAYED_SHARE else 0.0


Lanes: TypeAlias = CpuLanes | StreamLanes
"""Runs programs. After an exception no step of the program is still running."""


def make_lanes(
    device: torch.device, *, delay_seed: int | None = None, max_delay_us: int = 200
) -> Lanes:
    """Return lanes for the device; :class:`CpuLanes` describes the delays."""
    found = device_of(device)
    if isinstance(found, Accelerator):
        return StreamLanes(found, delay_seed=delay_seed, max_delay_us=max_delay_us)
    return CpuLanes(delay_seed=delay_seed, max_delay_us=max_delay_us)
