"""Policy ``static``: fixed shares, layer by layer, as FlexGen does it.

A share of the weights stays on the device for good. The rest streams: while one layer computes, the
weights of the next are reloaded, never more than one layer ahead; those of the first layer are
reloaded during the last. Weights are assigned whole.

It is the row order: one batch goes through all layers. The policy tries the largest share that
fits, in several forms: the first or the last weights of each layer stay, and the stretches before
and after the layers take part, stream as a whole, or stay. The plan with the shortest predicted
time is taken.

Source: "FlexGen" (arXiv 2303.06865), section 4, with the KV cache not paged, and without its block
schedule of several batches. Kinder than its code in three ways: the shares are those of the
shortest plan, not of a linear program over a cost model; bytes that rounding to whole weights
leaves over in one layer go to the next; several forms are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph, layer_of
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, largest_that_fits, realize
from ds_finepage.planning.simulator import predicted_ns


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
    problem.require_feasible()
    static = Static(problem)
    plans = list(filter(None, map(static.largest, FORMS)))
    return min(plans, key=partial(_cost, problem)) if plans else static.nothing_kept()


def _cost(problem: Problem, plan: MemGraph) -> int:
    """Return the predicted time of a plan; without a machine, the bytes that it reloads."""
    if problem.profile is None:
        return plan.reloaded_bytes
    return predicted_ns(plan, problem.profile)[0]


class Static:
    """The schedules of a pass.

    A *stretch* is the tasks of a layer in program order. The tasks before the first layer are a
    stretch too, and so are those after the last.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._graph = problem, problem.graph
        self._starts = _stretches(problem.graph)
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

    # The schedule.

    def nothing_kept(self) -> MemGraph:
        """Write the plan that streams all weights.

        Raises:
            PlanInfeasibleError: It does not fit.
        """
        return realize(self._problem, self._script(0))

    def largest(self, form: Form) -> MemGraph | None:
        """Write the plan with the largest share that fits; None if no share does."""
        found = largest_that_fits(self._problem, lambda n: self._script(n, form), 1000, step=2)
        return None if found is None else found[1]

    def _script(self, permille: int, form: Form = FORMS[0]) -> Script:
        """Write the schedule with a share of each layer's weights kept."""
        kept = _kept(self._graph, self._weights, permille, form)
        streamed = [[b for b in layer if b not in kept] for layer in self._weights]
        num_layers = len(streamed)
        steps: list[Step] = []
        if num_layers == 1:  # there is no next layer
            steps += [Step(Act.RELOAD, b) for b in streamed[0]]
        for layer, (begin, end) in enumerate(self._spans()):
            following = streamed[(layer + 1) % num_layers]
            steps.append(Step(Act.AWAIT_TASKS))
            steps += [Step(Act.RELOAD, b) for b in following if b not in streamed[layer]]
            steps += [Step(Act.COMPUTE, task) for task in range(begin, end)]
            going = streamed[layer] if num_layers == 1 else set(streamed[layer]) - set(following)
            steps += [Step(Act.DROP, b) for b in sorted(going)]
        entry = sorted({*kept, *(streamed[0] if num_layers > 1 else ())})
        return Script("static", tuple(entry), tuple(steps))


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
