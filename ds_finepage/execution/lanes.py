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
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeAlias

import torch

from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.program import LANES, Program, Step
from ds_finepage.graph.memgraph import Lane

Action = Callable[[], object]

logger = logging.getLogger(__name__)

DELAYED_SHARE = 0.1
"""Of the steps, where lanes are delayed at random."""

SMALL_TRANSFER_BYTES = 1 << 20
"""A smaller copy takes less time than passing it to another thread."""


Delays = Callable[[], float]
"""Draws the delay of one step, in microseconds."""

Work = Callable[[list[BaseException]], None]
"""What a thread does in a pass. It ends where the list has an error, of whichever thread."""


class _Threads:
    """The caller's thread, and one for each lane beside it, pass after pass."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._pools: dict[tuple[int, Lane], ThreadPoolExecutor] = {}

    def run(self, works: Mapping[Lane, Work], flags: Collection[threading.Event]) -> None:
        """Run the work of each lane, that of the compute lane on the caller's thread.

        Args:
            works: What to run.
            flags: What the works wait for. After an error all are raised, so that every work ends.

        Raises:
            BaseException: The first error of a work, or Ctrl-C; all threads are idle by then.
        """
        errors: list[BaseException] = []

        def wake_all() -> None:
            for flag in flags:
                flag.set()

        def guarded(work: Work) -> None:
            try:
                with torch.no_grad():
                    work(errors)
            except BaseException as error:
                errors.append(error)
                wake_all()

        busy: list[Future[None]] = []
        try:
            for lane, work in works.items():
                if lane is not Lane.COMPUTE:
                    busy.append(self._thread(lane).submit(guarded, work))
            guarded(works[Lane.COMPUTE])
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
        for thread in self._pools.values():
            thread.shutdown()
        self._pools = {}

    def _thread(self, lane: Lane) -> ThreadPoolExecutor:
        key = os.getpid(), lane  # a process that was forked has no thread but the caller's
        if key not in self._pools:
            self._pools[key] = ThreadPoolExecutor(1, f"finepage-{lane.value}")
        return self._pools[key]


def _wait_through_interrupts(busy: list[Future[None]]) -> None:
    """Wait for lanes even if Ctrl-C is pressed again; their steps end by themselves."""
    while not all(future.done() for future in busy):
        try:
            wait(busy)
        except KeyboardInterrupt:
            continue


class CpuLanes:
    """Computes on the calling thread; each transfer lane has a thread, pass after pass.

    If transfers are small, the calling thread does everything, in the order of the plan.
    """

    def __init__(self, delays: Delays | None = None) -> None:
        """Start no thread yet."""
        self._delays = delays
        self._threads = _Threads()

    def follow(self) -> None:
        """Do nothing: the last pass is over."""

    def run(self, program: Program, actions: dict[int, Action]) -> None:
        """Run each step's action (by node id) after those it waits for; return when all are done.

        Raises:
            BaseException: The error of an action, or Ctrl-C; all lanes are idle by then.
        """
        if self._delays is None and program.mean_transfer_bytes < SMALL_TRANSFER_BYTES:
            with torch.no_grad():
                for step in program.merged:
                    actions[step.node.id]()
            return
        done = {(s.lane, s.position): threading.Event() for s in program.merged if s.signals}
        num_threads = torch.get_num_threads()

        def run_lane(steps: tuple[Step, ...], errors: list[BaseException]) -> None:
            if torch.get_num_threads() != num_threads:  # each thread has its own setting
                torch.set_num_threads(num_threads)
            for step in steps:
                for before in step.waits:
                    done[before].wait()
                if self._delays is not None:
                    if delay_us := self._delays():
                        time.sleep(delay_us * 1e-6)
                if errors:
                    return
                actions[step.node.id]()
                if step.signals:
                    done[step.lane, step.position].set()

        own = {Lane.COMPUTE: program.lanes[Lane.COMPUTE]}
        lanes = own | {lane: steps for lane, steps in program.lanes.items() if steps}
        works = {lane: partial(run_lane, steps) for lane, steps in lanes.items()}
        self._threads.run(works, done.values())

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


class StreamLanes:
    """A stream for each lane; the compute lane is the caller's current stream.

    That of h2d overlaps reloads with compute, that of d2h overlaps offloads with both, and that of
    ranks overlaps collects with all of them. All waits are event waits on the device. On every lane
    a pass begins after the end of the pass before. At its end the caller's stream waits for the
    transfer lanes, so no other stream uses a tensor that the caller frees.

    A read holds the host until the disk has answered, so the steps of the disk lane are enqueued on
    a thread of their own. A stream can wait for an event only once that is recorded. So a step that
    waits for one of the other thread is behind a flag, which that thread raises behind the record.
    A task that the host computes waits on its stream for its activations, and runs on the caller's
    thread while the other streams go on.
    """

    def __init__(self, device: Accelerator, delays: Delays | None = None) -> None:
        """Create the streams; delays are on the device."""
        self._device, self._delays = device, delays
        self._streams = {lane: device.new_stream() for lane in LANES[1:]}  # all but compute
        self._threads = _Threads()
        self._order: weakref.WeakKeyDictionary[Program, _Order] = weakref.WeakKeyDictionary()
        # Of the last pass, and used again: a wait is for what was recorded when it was enqueued.
        self._begin, self._end = device.new_event(), device.new_event()
        self._has_run = False
        if delays is not None and not device.can_delay:
            logger.warning(
                "debug.lane_delay_seed has no effect: torch cannot delay %s", device.name
            )
            self._delays = None

    def follow(self) -> None:
        """Let the caller's current stream wait for the last pass, wherever that was enqueued."""
        stream = self._device.current_stream()
        if self._has_run:
            stream.wait_event(self._end)

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
        self._threads.close()
        self._has_run = False

    def _enqueue(self, program: Program, actions: dict[int, Action]) -> None:
        order = self._order.get(program)
        if order is None:
            # A lane without steps need not be woken.
            streams = {lane: own for lane, own in self._streams.items() if program.lanes[lane]}
            self._order[program] = order = _ordered(program, streams, self._device.new_event)
        others, threads, flags = order
        compute = self._device.current_stream()
        self.follow()
        compute.record_event(self._begin)
        for stream in others:
            stream.wait_event(self._begin)
        works = {
            thread: partial(self._enqueue_stretches, compute, stretches, actions)
            for thread, stretches in threads.items()
        }
        if len(works) == 1:
            works[Lane.COMPUTE]([])
        else:
            for flag in flags:
                flag.clear()
            self._threads.run(works, flags)
        for stream in others:
            compute.wait_stream(stream)
        compute.record_event(self._end)
        self._has_run = True

    def _enqueue_stretches(
        self,
        compute: torch.Stream,
        stretches: list[_Stretch],
        actions: dict[int, Action],
        errors: list[BaseException],
    ) -> None:
        for own, steps in stretches:
            if own is None:
                self._enqueue_steps(compute, steps, actions, errors)
            else:
                with own:
                    self._enqueue_steps(own, steps, actions, errors)

    def _enqueue_steps(
        self,
        stream: torch.Stream,
        steps: list[_Enqueued],
        actions: dict[int, Action],
        errors: list[BaseException],
    ) -> None:
        delays = self._delays
        for flags, waits, node, event, flag in steps:
            for other in flags:
                other.wait()
            if errors:
                return
            for before in waits:
                stream.wait_event(before)
            if delays is not None:
                self._device.delay(stream, delays())
            actions[node]()
            if event is not None:
                stream.record_event(event)
            if flag is not None:
                flag.set()


_Enqueued = tuple[
    tuple[threading.Event, ...],
    tuple[torch.Event, ...],
    int,
    torch.Event | None,
    threading.Event | None,
]
"""The flags and the events that a step waits for, its node, and the event and the flag that it
signals."""

_Stretch = tuple[torch.Stream | None, list[_Enqueued]]
"""Steps of one lane that are enqueued one after another; None is the caller's stream."""

_Order = tuple[list[torch.Stream], dict[Lane, list[_Stretch]], list[threading.Event]]
"""The streams of transfers that a program uses, what each thread enqueues, and their flags."""


def _ordered(
    program: Program, streams: dict[Lane, torch.Stream], new_event: Callable[[], torch.Event]
) -> _Order:
    """Give events and flags to the steps of a program, once, so that a pass looks nothing up."""
    signalled: dict[tuple[Lane, int], torch.Event] = {}
    threads: dict[Lane, list[_Stretch]] = {Lane.COMPUTE: []}
    last: dict[Lane, Lane] = {}  # of each thread
    flags = {
        before: threading.Event()
        for step in program.merged
        for before in step.waits
        if _thread_of(before[0]) is not _thread_of(step.lane)
    }
    for step in program.merged:
        thread, own = _thread_of(step.lane), (step.lane, step.position)
        stretches = threads.setdefault(thread, [])
        if last.get(thread) is not step.lane:
            last[thread] = step.lane
            stretches.append((streams.get(step.lane), []))
        event = new_event() if step.signals else None
        if event is not None:
            signalled[own] = event
        others = tuple(flags[b] for b in step.waits if _thread_of(b[0]) is not thread)
        waits = tuple(signalled[before] for before in step.waits)
        stretches[-1][1].append((others, waits, step.node.id, event, flags.get(own)))
    return list(streams.values()), threads, list(flags.values())


def _thread_of(lane: Lane) -> Lane:
    return Lane.DISK if lane is Lane.DISK else Lane.COMPUTE


Lanes: TypeAlias = CpuLanes | StreamLanes
"""Runs programs. After an exception no step of the program is still running."""


def make_lanes(
    device: torch.device, *, delay_seed: int | None = None, max_delay_us: int = 200
) -> Lanes:
    """Return lanes for the device.

    Args:
        device: Where ops run.
        delay_seed: Delay steps of every lane at random, so that races show as wrong results.
        max_delay_us: The longest delay.
    """
    delays = None if delay_seed is None else delays_of(delay_seed, max_delay_us)
    found = device_of(device)
    return StreamLanes(found, delays) if isinstance(found, Accelerator) else CpuLanes(delays)


def delays_of(seed: int, max_delay_us: int) -> Delays:
    """Return random delays; most are none."""
    draw = random.Random(seed)
    return lambda: draw.random() * max_delay_us if draw.random() < DELAYED_SHARE else 0.0
