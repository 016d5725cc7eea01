"""Recorded runs: tasks on fixed addresses that a device replays with one launch.

A task whose operands lie in the arena enqueues the same kernels in every pass. Where a device has
graphs, a run of such tasks is recorded once. A launch of the graph then costs the host about as
much as one kernel.

A run is enqueued task by task when it is recorded, on the stream that records. So kernels are
loaded and libraries have their workspaces before a graph refers to them. torch drops these
workspaces when it drops any graph of a stream, so all graphs of a stream go at once
(https://github.com/pytorch/pytorch/issues/193402).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ds_finepage.execution.device import Accelerator
from ds_finepage.execution.lanes import Action
from ds_finepage.execution.ops import BoundTask, copy_to_host, is_random, run_and_copy
from ds_finepage.execution.program import Program, Step
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import Task

logger = logging.getLogger(__name__)

MOST_GRAPHS = 1024
"""Graphs that are kept, those of dropped plans too; then all are dropped and recorded again."""


def can_be_recorded(task: Task, bound: BoundTask) -> bool:
    """Tell whether a task enqueues the same kernels in each pass, without memory of its own."""
    leaves_the_plan = bound.call in (run_and_copy, copy_to_host) or task.workspace_bytes > 0
    return not (bound.waits or leaves_the_plan or is_random(task))


def joined(program: Program, recordable: Collection[int]) -> tuple[Program, list[tuple[int, ...]]]:
    """Make one step of each run of tasks.

    In a run, tasks follow one another on the compute lane. Only its first task waits for another
    lane, and another lane waits only for its last task.

    Returns:
        The program, in which a run is a step of its first node, and the nodes of each run.
    """
    runs: list[list[Step]] = []
    is_open = False
    for step in program.lanes[Lane.COMPUTE]:
        can_join = step.node.id in recordable
        if is_open and can_join and not step.waits:
            runs[-1].append(step)
        else:
            runs.append([step])
        is_open = can_join and not step.signals
    first = {run[0].node.id: run for run in runs if len(run) > 1}
    gone = {step.node.id for run in first.values() for step in run[1:]}

    def whole(step: Step) -> Step:
        run = first.get(step.node.id)
        if run is None:
            return step
        return replace(step, position=run[-1].position, signals=run[-1].signals)

    merged = tuple(whole(step) for step in program.merged if step.node.id not in gone)
    lanes = {lane: tuple(s for s in merged if s.lane is lane) for lane in program.lanes}
    return Program(lanes, merged), [tuple(s.node.id for s in run) for run in first.values()]


class Graphs:
    """The graphs of a device, recorded on one stream; it is a device that has graphs."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._stream = device.new_stream()
        self._numbers = itertools.count()
        self._replays: dict[int, Action] = {}  # by the number of a run; they hold the graphs

    def replayed(
        self, program: Program, actions: Mapping[int, Action], recordable: Collection[int]
    ) -> tuple[Program, dict[int, Action]]:
        """Return a pass whose runs of tasks are recorded in their first call, and then replayed.

        A run is enqueued for the caller's current stream; one by one if it can't be recorded.
        """
        program, runs = joined(program, recordable)
        recorded = {
            nodes[0]: partial(self._run, next(self._numbers), [actions[n] for n in nodes])
            for nodes in runs
        }
        return program, {**actions, **recorded}

    def _run(self, number: int, actions: Sequence[Action]) -> None:
        if number in self._replays:
            self._replays[number]()
            return
        if len(self._replays) >= MOST_GRAPHS:
            self.clear()
        current = self._device.current_stream()
        self._stream.wait_stream(current)
        with self._stream:
            _run(actions)
        current.wait_stream(self._stream)
        replay = partial(_run, actions)
        try:
            self._replays[number] = self._device.record(replay, self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.warning(
                "%d tasks run one by one: they cannot be recorded: %s", len(actions), error
            )
            self._replays[number] = replay

    def clear(self) -> None:
        """Drop all graphs; the host waits until none of them runs."""
        if self._replays:
            self._device.synchronize()
        self._replays.clear()


def _run(actions: Sequence[Callable[[], object]]) -> None:
    for action in actions:
        action()
