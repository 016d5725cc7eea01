"""Chooses the rows of weights that the host multiplies by.

A pass that misses ``m`` bytes of weights copies them over the link, at rate ``l``. The host can
multiply by ``h`` of the ``w`` bytes of all weights instead, at rate ``r``, while the link copies
the others. Two ways are known:

- *Cut* products: the host makes some columns of each, beside the device. The pass takes ``n``, the
  time of the tasks that are no products, and that of the host: ``c`` to begin its tasks, and
  ``h / r``.
- *Whole* products: the host makes some, the device makes the others, one after the other. On the
  device all of them take ``d``. The pass takes ``n + d (1 - h / w) + c h / w + h / r``.

It also takes ``(m - h) / l``, the time of the copies. The longer of both is least where they are
equal. Where ``h`` is not positive there, the copies hide behind the tasks, and the host has nothing
to do. Beside cut products the device needs ``n + d (1 - h / w)``, so a slow one leaves more to the
host. The host issues tasks as well, so none takes less time than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ds_finepage.graph.host_work import host_work
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.routes import Route, routes
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.bounds import lower_bound
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_products import with_host_rows
from ds_finepage.planning.rewrite.split import Divisible, divisible_weights, quantum
from ds_finepage.planning.simulator import Costs


def can_multiply(graph: TaskGraph) -> list[Divisible]:
    """List the weights that the host can multiply by; none where ranks share the weights."""
    return [] if graph.num_ranks > 1 else divisible_weights(graph)


def with_host_lane(problem: Problem) -> Iterator[TaskGraph]:
    """Let the host compute products, as many as may make the pass fast; yield each way to do so.

    Args:
        problem: The pass, its arena, and a profile that knows the host.
    """
    graph, known = problem.graph, routes(problem.graph)
    units = can_multiply(graph)
    routed = [unit for unit in units if unit.buffer in known]
    if routed:
        ways = _missing_experts(problem, routed, known)
    else:
        ways = iter([_balanced(problem, units)] if units else [])
    for rows in ways:
        if any(rows.values()):
            yield with_host_rows(graph, units, rows)


def _missing_experts(
    problem: Problem, units: Sequence[Divisible], known: Mapping[int, Route]
) -> Iterator[dict[int, int]]:
    """Choose the layers whose experts have no room on the device, all of each or all but the last.

    The copies of a layer's experts wait for its router, as the host does. So the link can bring the
    last ones while the host multiplies by the others, and other layers cannot help.
    """
    missing = needed_arena_bytes(problem.graph, problem.alignment) - problem.arena_bytes
    layers: dict[int, list[Divisible]] = {}
    for unit in units:
        layers.setdefault(known[unit.buffer].source, []).append(unit)
    if missing <= 0:
        return
    chosen = _evenly(list(layers.values()), missing / sum(unit.nbytes for unit in units))
    for end in (None, -1):
        yield {unit.buffer: unit.num_rows for layer in chosen for unit in layer[:end]}


def _balanced(problem: Problem, units: Sequence[Divisible]) -> dict[int, int]:
    """Choose as many rows as let the host and the link end together."""
    graph, profile = problem.graph, problem.profile
    assert profile is not None
    costs, products = Costs(profile), [graph.tasks[unit.task] for unit in units]
    times = [max(costs.task_ns(graph, task), profile.host_op_ns) for task in graph.tasks]
    products_ns = sum(times[task.index] for task in products)
    others_ns = sum(times) - products_ns
    hosts = [costs.host_product_ns(*host_work(graph, task)) for task in products]
    host_ns = sum(hosts) + len(units) * profile.host_op_ns
    begins_ns = len(units) * (costs.host_product_ns(0, 0) + profile.host_op_ns)
    missing = lower_bound(graph, problem.arena_bytes, problem.alignment, may_cut=problem.split)
    link = costs.links[Lane.H2D]
    missing_ns, all_ns = link.ns(missing.nbytes), link.ns(sum(unit.nbytes for unit in units))

    def share_of(fixed_ns: int, more_ns: int) -> float:
        """Return the share of the host: it adds as much of ``more_ns`` to ``fixed_ns``."""
        if missing_ns <= fixed_ns:
            return 0.0
        return min(1.0, (missing_ns - fixed_ns) / (all_ns + more_ns))

    whole = share_of(others_ns + products_ns, host_ns - products_ns)
    ends_ns = missing_ns - whole * all_ns, sum(times) + whole * (host_ns - products_ns)
    more_ns = host_ns - begins_ns
    cut = share_of(others_ns + begins_ns, more_ns) if problem.split else 0.0
    if cut > 0:
        if missing_ns > sum(times):
            cut = max(cut, (products_ns - begins_ns) / (products_ns + more_ns))
        lanes_ns = begins_ns + cut * more_ns, products_ns - cut * products_ns
        if max(missing_ns - cut * all_ns, others_ns + max(lanes_ns)) < max(ends_ns):
            return _rows_of_each(units, cut)
    return {unit.buffer: unit.num_rows for (unit,) in _evenly([[u] for u in units], whole)}


def _rows_of_each(units: Sequence[Divisible], share: float) -> dict[int, int]:
    """Choose the same share of the rows of each weight."""
    found, due_bytes = dict[int, int](), 0.0
    for unit in units:
        due_bytes += share * unit.nbytes
        step = quantum(unit)
        rows = min(int(due_bytes / unit.row_bytes) // step * step, unit.num_rows)
        if unit.num_matrices > 1 and rows < unit.num_rows:
            rows = 0  # the rows of several matrices do not lie side by side
        found[unit.buffer] = rows
        due_bytes -= rows * unit.row_bytes
    return found


def _evenly(weights: Sequence[list[Divisible]], share: float) -> list[list[Divisible]]:
    """Choose weights, or groups of them, evenly over the pass."""
    found, due_bytes = list[list[Divisible]](), 0.0
    for group in weights:
        nbytes = sum(unit.nbytes for unit in group)
        due_bytes += share * nbytes
        if due_bytes >= nbytes / 2:
            found.append(group)
            due_bytes -= nbytes
    return found
