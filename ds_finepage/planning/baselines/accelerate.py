"""Policy ``accelerate-map``: Accelerate's ``dispatch_model`` with a device map, module by module.

The first modules stay on the device for good, as many as there is room for. Such a module is a
layer, or a module outside all layers; ties go with the one that has the weight's name. Each other
module fetches the parameters that are its own just before its forward and frees them just after it.
Nothing is prefetched. A fetch is ``tensor.to(device)`` on the stream that computes: it starts when
all tasks before it are done, and the tasks behind it wait for it. A tied weight is fetched for each
module that has it.

Kinder than the real thing in four ways: copies run at the rate of pinned memory, and its own are
pageable unless the caller pins them; it empties the allocator's cache after each fetch; the host
waits for each fetch; its hooks take time on the host.

Source: ``AlignDevicesHook`` in ``hooks.py``, ``dispatch_model`` in ``big_modeling.py`` and
``set_module_tensor_to_device`` in ``utils/modeling.py`` of Accelerate 1.15.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph, block_of
from ds_finepage.planning.baselines.modules import walk
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, largest_that_fits, realize

POLICY = "accelerate-map"


@dataclass(frozen=True, slots=True)
class MapSettings:
    """The device map: how many of :func:`map_modules` stay on the device, from the first on."""

    modules_on_device: int

    @property
    def keys(self) -> dict[str, int]:
        """The settings by name."""
        return {"modules_on_device": self.modules_on_device}


def map_settings(passes: Sequence[tuple[Problem, int]]) -> MapSettings:
    """Return the device map with the most modules that each pass of a model has room for.

    Args:
        passes: The passes, each with the number of times that it runs, which is not used.
    """
    return MapSettings(min(most_modules(problem) for problem, _ in passes))


def plan_accelerate_map(problem: Problem) -> MemGraph:
    """Plan ``dispatch_model`` with the given settings, or with all modules that there is room for.

    Raises:
        PlanInfeasibleError: It holds more bytes at one time than the arena has.
    """
    settings = problem.engine or map_settings([(problem, 1)])
    assert isinstance(settings, MapSettings)
    return realize(problem, _map_script(problem.graph, settings.modules_on_device))


def most_modules(problem: Problem) -> int:
    """Return how many modules can stay on the device; 0 if not even one can."""
    script_of, most = partial(_map_script, problem.graph), len(map_modules(problem.graph))
    found = largest_that_fits(problem, script_of, most)
    return 0 if found is None else found[0]


def map_modules(graph: TaskGraph) -> dict[str, list[int]]:
    """Return the weights of each module of a device map by its name, in the order of the model."""
    found: dict[str, list[int]] = {}
    for buffer in graph.buffers:
        if buffer.kind is BufferKind.WEIGHT:
            found.setdefault(block_of(buffer.name), []).append(buffer.id)
    return found


def _map_script(graph: TaskGraph, num_modules: int) -> Script:
    """Write a pass with a number of modules on the device."""
    chosen = list(map_modules(graph).values())[:num_modules]
    kept = [b for weights in chosen for b in weights]
    present = set(kept)
    fetched: dict[int, list[int]] = {}  # call -> what it brought
    steps: list[Step] = []
    modules, events = walk(graph)
    for what, at in events:
        if what == "task":
            steps.append(Step(Act.COMPUTE, at))
        elif what == "enter":
            fetched[at] = [b for b in modules[at].own if b not in present]
            present.update(fetched[at])
            if fetched[at]:
                steps.append(Step(Act.AWAIT_TASKS))
                steps += [Step(Act.RELOAD, b) for b in fetched[at]]
                steps.append(Step(Act.AWAIT_COPIES))
        else:
            steps += [Step(Act.DROP, b) for b in fetched[at]]
            present.difference_update(fetched[at])
    return Script(POLICY, tuple(kept), tuple(steps))
