"""Policy ``group-offload``: diffusers' group offloading of leaf modules, with a stream.

Each leaf module is a group, and so is each other module with weights of its own. When a group is
entered, the host waits for the copies of its weights, and then gives those of the next group to a
stream of their own, so that they travel while this group computes. When it is left, the host waits
for all tasks so far and frees its weights; so the group after the next is not copied before this
one is done. The first group is copied when the model is entered. Nothing is kept, whatever the
room. A tied weight is copied for each module that has it.

This is the pass from the second forward on: the first one finds the order of the groups. Buffers
of modules, which are copied too, are not simulated, nor is the time of the hooks on the host. The
setting ``record_stream``, which is off by default and waits less, has no limit on the device bytes.

Source: ``_apply_group_offloading_leaf_level``, ``GroupOffloadingHook`` and ``ModuleGroup`` in
``hooks/group_offloading.py`` of diffusers 0.42.0.
"""

from __future__ import annotations

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.baselines.script import Act, Script, Step, realize
from ds_finepage.planning.baselines.visits import ENTER, TASK, Visits, module_visits
from ds_finepage.planning.problem import Problem

NAME = "group-offload"


def plan_group_offload(problem: Problem) -> MemGraph:
    """Plan group offloading at the leaf level.

    Raises:
        PlanInfeasibleError: It holds more bytes at one time than the arena has.
    """
    return realize(problem, Script(NAME, (), _steps(module_visits(problem.graph))))


def _steps(visits: Visits) -> tuple[Step, ...]:
    present: set[int] = set()
    steps: list[Step] = []

    def fetch(group: int) -> None:
        missing = [b for b in visits.weights[group] if b not in present]
        present.update(missing)
        steps.extend(Step(Act.RELOAD, b) for b in missing)

    if visits.weights:
        fetch(0)
    for at, index in visits.events:
        if at == TASK:
            steps.append(Step(Act.COMPUTE, index))
        elif at == ENTER:
            fetch(index)  # only if a group in between freed a weight that is tied
            steps.append(Step(Act.AWAIT_COPIES))
            if index + 1 < len(visits.weights):
                fetch(index + 1)
        else:
            left = [b for b in visits.weights[index] if b in present]
            present.difference_update(left)
            steps.append(Step(Act.AWAIT_TASKS))
            steps += [Step(Act.DROP, b) for b in left]
    return tuple(steps)
