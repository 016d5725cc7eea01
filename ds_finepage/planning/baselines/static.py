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
    plans = list(filter(None, map(partial(largest, problem), FORMS)))
    if not plans:
        return realize(problem, script_of(problem.graph, 0))
    return min(plans, key=problem.cost_of)


def largest(problem: Problem, form: Form) -> MemGraph | None:
    """Write the plan with the largest share that fits; None if no share does."""
    script = partial(script_of, problem.graph, form=form)
    found = largest_that_fits(problem, script, 1000, step=2)
    return None if found is None else found[1]


def script_of(graph: TaskGraph, permille: int, form: Form = FORMS[0]) -> Script:
    """Write the schedule with a share of each layer's weights kept.

    A *stretch* is the tasks of a layer in program order. The tasks before the first layer are a
    stretch too, and so are those after the last.
    """
    starts = _stretches(graph)
    spans = list(zip(starts, [*starts[1:], len(graph.tasks)], strict=True))
    weights = [_read_by(graph, *span) for span in spans]
    kept = _kept(graph, weights, permille, form)
    streamed = [[b for b in layer if b not in kept] for layer in weights]
    num_layers = len(streamed)
    steps: list[Step] = []
    if num_layers == 1:  # there is no next layer
        steps += [Step(Act.RELOAD, b) for b in streamed[0]]
    for layer, (begin, end) in enumerate(spans):
        following = streamed[(layer + 1) % num_layers]
        steps.append(Step(Act.AWAIT_TASKS))
        steps += [Step(Act.RELOAD, b) for b in following if b not in streamed[layer]]
        steps += [Step(Act.COMPUTE, task) for task in range(begin, end)]
        going = streamed[layer] if num_layers == 1 else set(streamed[layer]) - set(following)
        steps += [Step(Act.DROP, b) for b in sorted(going)]
    entry = sorted({*kept, *(streamed[0] if num_layers > 1 else ())})
    return Script("static", tuple(entry), tuple(steps))


def _read_by(graph: TaskGraph, begin: int, end: int) -> list[int]:
    used = dict.fromkeys(b for task in graph.tasks[begin:end] for b in task.buffers)
    return [b for b in used if graph.buffers[b].kind is BufferKind.WEIGHT]


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
