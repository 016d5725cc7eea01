"""The modules that run the tasks, for systems that work module by module."""

from __future__ import annotations

from dataclasses import dataclass

from ds_finepage.graph.taskgraph import BufferKind, ModuleCall, TaskGraph


def module_calls(graph: TaskGraph) -> tuple[ModuleCall, ...]:
    """Return the calls of modules: as captured, or derived from the tasks' labels.

    A label is the path of a module, so the modules on that path were called too, except lists of
    modules, which are followed by a number. A module that runs no task leaves no label, and two
    calls of one module with nothing in between look like one.
    """
    return graph.calls or _from_labels(graph)


def _from_labels(graph: TaskGraph) -> tuple[ModuleCall, ...]:
    num_tasks = len(graph.tasks)
    calls: list[ModuleCall] = []
    open_calls: list[int] = []

    def close(depth: int, end: int) -> None:
        while len(open_calls) > depth:
            index = open_calls.pop()
            call = calls[index]
            calls[index] = ModuleCall(call.name, "", call.depth, call.begin, end)

    for task in graph.tasks:
        path = _called_on_the_way_to(task.label)
        depth = 0
        while depth < min(len(path), len(open_calls)) and (
            calls[open_calls[depth]].name == path[depth]
        ):
            depth += 1
        close(depth, task.index)
        for name in path[depth:]:
            open_calls.append(len(calls))
            calls.append(ModuleCall(name, "", len(open_calls) - 1, task.index, num_tasks))
    close(0, num_tasks)
    return tuple(calls)


def _called_on_the_way_to(label: str) -> list[str]:
    """List the called modules on the path of a label: ``a.2.b`` has the root, ``a.2``, itself."""
    parts = label.split(".") if label else []
    found = [""]
    for i in range(1, len(parts) + 1):
        if i == len(parts) or not parts[i].isdigit():
            found.append(".".join(parts[:i]))
    return found


@dataclass(frozen=True, slots=True)
class Module:
    """A module at one call."""

    name: str
    is_leaf: bool
    own: tuple[int, ...]  # weights of its own, in the order in which they were registered
    nested: tuple[int, ...]  # its own and those of all submodules


def walk(
    graph: TaskGraph, leaf_classes: tuple[str, ...] = ()
) -> tuple[list[Module], list[tuple[str, int]]]:
    """List the called modules in the order of their calls, and all events in order.

    A module has the weights that are named after it. It also has those that its own tasks read and
    no enclosing module has: tied weights, and DeepSpeed's external parameters.

    Args:
        graph: The pass.
        leaf_classes: Modules that have the weights of all their submodules, which are not listed.

    Returns:
        The modules; the events, "enter" or "leave" with a module's position, "task" with a task's.
    """
    weights = [b for b in graph.buffers if b.kind is BufferKind.WEIGHT]
    owned: dict[str, list[int]] = {}
    for weight in weights:
        owned.setdefault(weight.name.rpartition(".")[0], []).append(weight.id)
    is_weight = {w.id for w in weights}
    below: dict[str, tuple[int, ...]] = {}  # by module, with those of its submodules
    for call in module_calls(graph):
        if call.name not in below:
            prefix = f"{call.name}." if call.name else ""
            below[call.name] = tuple(w.id for w in weights if w.name.startswith(prefix))

    modules: list[Module] = []
    events: list[tuple[str, int]] = []
    open_calls: list[tuple[int, int, int]] = []  # depth, end, position of each open call
    done = 0

    def run_tasks(end: int) -> None:
        nonlocal done
        events.extend(("task", i) for i in range(done, end))
        done = max(done, end)

    def leave(depth: int) -> None:
        while open_calls and open_calls[-1][0] >= depth:
            _, end, position = open_calls.pop()
            run_tasks(end)
            events.append(("leave", position))

    for call in module_calls(graph):
        leave(call.depth)
        if open_calls and modules[open_calls[-1][2]].is_leaf:
            continue
        run_tasks(call.begin)
        is_leaf = call.class_name in leaf_classes
        own = dict.fromkeys(below[call.name] if is_leaf else owned.get(call.name, ()))
        others = {p for _, _, position in open_calls for p in modules[position].own}
        for task in graph.tasks[call.begin : call.end]:
            if is_leaf or task.label == call.name:
                own |= dict.fromkeys(b for b in task.reads if b in is_weight and b not in others)
        nested = tuple(dict.fromkeys([*own, *below[call.name]]))
        open_calls.append((call.depth, call.end, len(modules)))
        events.append(("enter", len(modules)))
        modules.append(Module(call.name, is_leaf, tuple(sorted(own)), nested))
    leave(0)
    run_tasks(len(graph.tasks))
    return modules, events
