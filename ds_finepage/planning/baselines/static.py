"""Policies ``static*``: fixed shares, layer by layer, as FlexGen does it.

A share of the weights stays on the device for good. The rest streams: while one layer computes, the
weights of the next are reloaded, never more than one layer ahead; those of the first layer are
reloaded during the last. Weights are assigned whole.

``static`` is the row order: one batch goes through all layers. It tries the largest share that
fits, in several forms: the first or the last weights of each layer stay, and the stretches before
and after the layers take part, stream as a whole, or stay. The plan with the shortest predicted
time is taken.

``static-zigzag`` lets several batches go through a layer before it is replaced, so that one reload
serves all of them. The pass is then unrolled: a plan's bytes and times are for
``graph.num_batches`` calls. The activations between two layers stay on the device, or those of all
batches but one wait in host memory. KV caches stay on the device, and their bytes are taken from
the arena. With one batch both orders are the same.

Source: "FlexGen" (arXiv 2303.06865), section 4, with the KV cache not paged. Kinder than its code
in five ways: the shares are those of the shortest plan, not of a linear program over a cost model;
one wait joins two layers, not one wait a batch; the copy of a layer is spread over all batches of
the layer before; bytes that rounding to whole weights leaves over in one layer go to the next;
``static`` tries several forms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.baselines.modules import layer_of
from ds_finepage.planning.baselines.unroll import Unrolled, unroll
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, live_bytes, realize
from ds_finepage.planning.simulator import predicted_ns

NUM_BATCHES = (2, 4, 8)
"""Numbers of alternating batches to choose from. More hide more copies, and need more KV cache."""

FRAGMENTATION_STEPS = 10
"""How often a form gives up two thousandths of its share until the offsets fit, and then ten."""


@dataclass(frozen=True, slots=True)
class Form:
    """Which weights stay for a share.

    Attributes:
        outer: What the stretches before and after the layers do.
        takes_first: The first weights of a layer stay, not the last.
    """

    outer: Literal["take part", "stream", "stay"] = "take part"
    takes_first: bool = False


FORMS = tuple(
    Form(outer, first) for first in (False, True) for outer in ("take part", "stream", "stay")
)


def plan_static(problem: Problem) -> MemGraph:
    """Plan with fixed shares, one batch at a time.

    Raises:
        PlanInfeasibleError: Even two layers' weights in turn are too much for the arena.
    """
    return _in_rows(problem, "static")


def plan_static_zigzag(problem: Problem) -> MemGraph:
    """Plan with fixed shares, and the number of alternating batches with the shortest plan.

    Returns:
        A plan whose taskgraph is the pass unrolled for ``plan.graph.num_batches`` batches.

    Raises:
        PlanInfeasibleError: As for ``static``.
    """
    found = [_in_rows(problem, "static-zigzag")]
    for num_batches in NUM_BATCHES:
        static = Static(problem, num_batches, "static-zigzag")
        for num_waiting in (0, num_batches - 1):
            found += filter(None, [static.largest(FORMS[0], num_waiting)])
    return min(found, key=lambda plan: _cost(problem, plan) / plan.graph.num_batches)


def _in_rows(problem: Problem, policy: str) -> MemGraph:
    """Plan one batch in the form that takes least time."""
    problem.require_feasible()
    static = Static(problem, 1, policy)
    plans = list(filter(None, map(static.largest, FORMS)))
    return min(plans, key=partial(_cost, problem)) if plans else static.nothing_kept()


def _cost(problem: Problem, plan: MemGraph) -> int:
    """Return the predicted time of a plan; without a machine, the bytes that it reloads."""
    if problem.profile is None:
        return plan.reloaded_bytes
    return predicted_ns(plan, problem.profile)[0]


class Static:
    """The schedules of one number of batches.

    A *stretch* is the tasks of a layer in program order. The tasks before the first layer are a
    stretch too, and so are those after the last.
    """

    def __init__(self, problem: Problem, num_batches: int, policy: str) -> None:
        self._problem, self._policy = problem, policy
        self._graph = problem.graph
        self._alignment = problem.alignment
        self.num_batches = num_batches
        self._starts = _stretches(problem.graph)
        self._uses = problem.graph.uses
        self._weights = [self._read_by(*span) for span in self._spans()]

    def _spans(self) -> list[tuple[int, int]]:
        ends = [*self._starts[1:], len(self._graph.tasks)]
        return list(zip(self._starts, ends, strict=True))

    def _read_by(self, begin: int, end: int) -> list[int]:
        buffers = self._graph.buffers
        return list(
            dict.fromkeys(
                b
                for task in self._graph.tasks[begin:end]
                for b in task.buffers
                if buffers[b].kind is BufferKind.WEIGHT
            )
        )

    @cached_property
    def _unrolled(self) -> Unrolled:
        if self.num_batches == 1:
            return Unrolled(self._graph, ({b.id: b.id for b in self._graph.buffers},))
        return unroll(self._graph, self._starts, self.num_batches)

    @cached_property
    def _unrolled_problem(self) -> Problem:
        return self._problem.of(self._unrolled.graph)

    @cached_property
    def _reserved_bytes(self) -> int:
        """Device bytes outside the arena for the batches after the first."""
        one = dataclasses.replace(self._graph, tasks=())
        all_of_them = unroll(one, [0], self.num_batches).graph
        before, after = (non_arena_bytes(g, self._alignment) for g in (one, all_of_them))
        return after - before

    def _crossing(self, start: int) -> list[int]:
        """List the activations that are made before a task and used by it or later."""
        return [
            b.id
            for b in self._graph.buffers
            if b.kind is BufferKind.ACTIVATION
            and self._uses[b.id]
            and self._uses[b.id][0] < start <= self._uses[b.id][-1]
        ]

    # The schedule.

    def nothing_kept(self) -> MemGraph:
        """Write the plan that streams all weights.

        Raises:
            PlanInfeasibleError: It does not fit.
        """
        return self._realize(self._script(0, 0))

    def largest(self, form: Form, num_waiting: int = 0) -> MemGraph | None:
        """Write the plan with the largest share that fits; None if no share does.

        Args:
            form: Which weights stay.
            num_waiting: The last batches, whose activations wait in host memory.
        """
        room = self._problem.arena_bytes - self._reserved_bytes
        least, most = 0, 1000
        while least < most:
            middle = (least + most + 1) // 2
            script = self._script(middle, num_waiting, form)
            if live_bytes(self._unrolled_problem, script) <= room:
                least = middle
            else:
                most = middle - 1
        fine = least - 2 * FRAGMENTATION_STEPS
        for permille in (*range(least, max(-1, fine), -2), *range(fine, -1, -10)):
            try:
                return self._realize(self._script(permille, num_waiting, form))
            except PlanInfeasibleError:
                continue
        return None

    def _realize(self, script: Script) -> MemGraph:
        return realize(self._unrolled_problem, script, reserved_bytes=self._reserved_bytes)

    def _script(self, permille: int, num_waiting: int, form: Form = FORMS[0]) -> Script:
        """Write the schedule with a share of the weights kept.

        Args:
            permille: Share of each layer's weights to keep.
            num_waiting: The last batches, whose activations wait in host memory.
            form: Which weights stay.
        """
        kept = _kept(self._graph, self._weights, permille, form)
        streamed = [[b for b in layer if b not in kept] for layer in self._weights]
        n, num_layers = self.num_batches, len(streamed)
        steps: list[Step] = []
        if num_layers == 1:  # there is no next layer
            steps += [Step(Act.RELOAD, b) for b in streamed[0]]
        done = 0
        for layer, (begin, end) in enumerate(self._spans()):
            following = streamed[(layer + 1) % num_layers]
            coming = [b for b in following if b not in streamed[layer]]
            steps.append(Step(Act.AWAIT_TASKS))
            for batch in range(n):
                if batch + 1 < n:
                    steps += self._copy_crossing(Act.RELOAD, begin, batch + 1, num_waiting)
                else:
                    steps += self._copy_crossing(Act.RELOAD, end, 0, num_waiting)
                share = slice(len(coming) * batch // n, len(coming) * (batch + 1) // n)
                steps += [Step(Act.RELOAD, b) for b in coming[share]]
                steps += [Step(Act.COMPUTE, done + i) for i in range(end - begin)]
                done += end - begin
                steps += self._copy_crossing(Act.EVICT, end, batch, num_waiting)
            going = streamed[layer] if num_layers == 1 else set(streamed[layer]) - set(following)
            steps += [Step(Act.DROP, b) for b in sorted(going)]
        entry = sorted({*kept, *(streamed[0] if num_layers > 1 else ())})
        return Script(self._policy, tuple(entry), tuple(steps))

    def _copy_crossing(self, act: Act, start: int, batch: int, num_waiting: int) -> list[Step]:
        """Copy a batch's activations that cross a task out or back in, if they wait on the host."""
        if batch < self.num_batches - num_waiting:
            return []
        ids = self._unrolled.buffers[batch]
        return [Step(act, ids[b]) for b in self._crossing(start)]


def _stretches(graph: TaskGraph) -> list[int]:
    """List the first task of each stretch.

    If no label names a layer, every change of label begins a stretch.
    """
    layers: list[str | None] = [layer_of(task.label) for task in graph.tasks]
    if not any(layers):
        layers = [task.label for task in graph.tasks]
    starts = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    return [0, *starts]


def _kept(graph: TaskGraph, layers: list[list[int]], permille: int, form: Form) -> set[int]:
    """Choose weights to keep: a share of each layer's bytes, in a form."""
    kept: set[int] = set()
    due = 0  # bytes still to be kept, times 1000
    for number, layer in enumerate(layers):
        new = [b for b in layer if b not in kept]
        is_outer = number in (0, len(layers) - 1)
        if is_outer and form.outer != "take part":
            kept.update(new if form.outer == "stay" else ())
            continue
        due += permille * sum(graph.buffers[b].nbytes for b in new)
        for buffer in new if form.takes_first else reversed(new):
            if due >= 1000 * graph.buffers[buffer].nbytes:
                due -= 1000 * graph.buffers[buffer].nbytes
                kept.add(buffer)
    return kept
