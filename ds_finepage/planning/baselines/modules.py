"""The modules that run the tasks, for systems that work module by module."""

from __future__ import annotations

from ds_finepage.graph.taskgraph import ModuleCall, TaskGraph


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


def layer_of(label: str) -> str | None:
    """Return the layer of a label, the path up to its first number; None outside all layers."""
    parts = label.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None
