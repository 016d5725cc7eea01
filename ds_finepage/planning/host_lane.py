"""Chooses what the host computes: attention to rows of a KV cache, and products.

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
host. If it takes longer than the host, all whole products go there, even where all weights have
room. The host issues tasks as well, so none takes less time than that.

Layers of attention are chosen by the rule for whole products. A pass may have both kinds. The one
that is chosen first takes the most, and the other one what is still missing. Both orders are tried:
a layer of attention saves more bytes by one task, but a product may take less time for a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ds_finepage.graph.attention import Attention, attentions
from ds_finepage.graph.host_work import host_work
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.routes import GROUPED_PRODUCTS, Route, routes
from ds_finepage.graph.taskgraph import ITEMSIZE, BufferKind, Ref, Task, TaskGraph
from ds_finepage.planning.bounds import lower_bound
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_attention import host_task, with_host_attention
from ds_finepage.planning.rewrite.host_products import with_host_rows
from ds_finepage.planning.rewrite.split import Divisible, divisible_weights, quantum
from ds_finepage.planning.simulator import Costs

LEAST_GAIN = 0.98
"""Cut products have more tasks, which cost more than a smaller gain."""

_Unit = TypeVar("_Unit", Divisible, Attention)


def can_multiply(graph: TaskGraph) -> list[Divisible]:
    """List the weights that the host can multiply by; none where ranks share the weights.

    Matrices of experts that lie transposed (gpt-oss) are among them. They cannot be cut, and
    experts are not.
    """
    if graph.num_ranks > 1:
        return []
    found = {unit.task: unit for unit in divisible_weights(graph)}
    for task in graph.tasks:
        whole = None if task.index in found else _transposed(graph, task)
        if whole is not None:
            found[task.index] = whole
    return [found[task] for task in sorted(found)]


def _transposed(graph: TaskGraph, task: Task) -> Divisible | None:
    """Return the matrices of experts, (experts, in, out), by which a task multiplies."""
    weight = task.args[1] if task.op in GROUPED_PRODUCTS and len(task.args) > 1 else None
    if not isinstance(weight, Ref) or len(graph.tensors[weight.tensor].shape) != 3:
        return None
    view = graph.tensors[weight.tensor]
    buffer, itemsize = graph.buffers[view.buffer], ITEMSIZE.get(view.dtype, 0)
    num, depth, rows = view.shape
    is_whole = view.offset == 0 and view.stride == (depth * rows, rows, 1)
    if not is_whole or buffer.nbytes != num * depth * rows * itemsize:
        return None
    if buffer.kind is not BufferKind.WEIGHT or graph.uses[buffer.id] != (task.index,):
        return None
    return Divisible(buffer.id, rows, num * depth * itemsize, task.index, num)


def can_attend(graph: TaskGraph) -> list[Attention]:
    """List the attention that the host can compute; none where ranks share the weights."""
    return [] if graph.num_ranks > 1 else attentions(graph)


def with_host_lane(problem: Problem) -> Iterator[TaskGraph]:
    """Let the host compute as much as may make the pass fast; yield each way to do so.

    Args:
        problem: The pass, its arena, and a profile that knows the host.
    """
    for first, second in ((_with_products, _with_attention), (_with_attention, _with_products)):
        for graph in first(problem):
            yield from list(second(problem.of(graph))) or [graph]


def _with_attention(problem: Problem) -> Iterator[TaskGraph]:
    """Let the host attend in as many layers as may make the pass fast, if that are any."""
    units = can_attend(problem.graph)
    if not units:
        return
    lanes = _lanes(problem, units, [host_task(problem.graph, unit) for unit in units])
    chosen = _evenly(units, lanes.whole_share)
    if chosen:
        yield with_host_attention(problem.graph, chosen)


def _with_products(problem: Problem) -> Iterator[TaskGraph]:
    """Let the host compute products, as many as may make the pass fast; yield each way to do so."""
    graph, known = problem.graph, routes(problem.graph)
    units = can_multiply(graph)
    routed = [unit for unit in units if unit.buffer in known]
    if routed:
        ways = _missing_experts(problem, routed, known)
    else:
        mean_bytes = sum(unit.nbytes for unit in units) / max(1, len(units))
        large = [unit for unit in units if unit.nbytes >= mean_bytes]
        chosen = (units, large) if len(large) < len(units) else (units,)
        ways = (_balanced(problem, some) for some in chosen if some)
    for rows in ways:
        if any(rows.values()):
            yield with_host_rows(graph, units, rows)


def _missing_experts(
    problem: Problem, units: Sequence[Divisible], known: Mapping[int, Route]
) -> Iterator[dict[int, int]]:
    """Choose the layers whose experts have no room on the device, all of each or all but the last.

    The copies of a layer's experts wait for its router, as the host does. So the link can bring the
    last ones while the host multiplies by the others, and other layers cannot help. A device that
    unpacks its weights into memory may take longer than the host: then all layers are a third way.
    """
    graph = problem.graph
    missing = max(0, needed_arena_bytes(graph, problem.alignment) - problem.arena_bytes)
    layers: dict[int, list[Divisible]] = {}
    for unit in units:
        layers.setdefault(known[unit.buffer].source, []).append(unit)
    firsts = [layer[0] for layer in layers.values()]
    chosen = _evenly(firsts, missing / sum(unit.nbytes for unit in units))
    groups = [layers[known[unit.buffer].source] for unit in chosen]
    for end in (None, -1):
        yield {unit.buffer: unit.num_rows for layer in groups for unit in layer[:end]}
    lanes = _lanes(problem, units, [graph.tasks[unit.task] for unit in units])
    if lanes.is_device_slow and len(groups) < len(layers):
        yield {unit.buffer: unit.num_rows for unit in units}


def _balanced(problem: Problem, units: Sequence[Divisible]) -> dict[int, int]:
    """Choose as many rows as let the host, the link and the device end together."""
    lanes = _lanes(problem, units, [problem.graph.tasks[unit.task] for unit in units])
    products_ns, chosen = lanes.device_ns, _evenly(units, lanes.whole_share)
    alone_ns = max(lanes.missing_ns, lanes.others_ns + products_ns)
    whole = sum(unit.nbytes for unit in chosen) / sum(unit.nbytes for unit in units)
    end_ns = max(
        lanes.missing_ns - whole * lanes.all_ns,
        lanes.others_ns + products_ns + whole * (lanes.host_ns - products_ns),
    )
    begins_ns, more_ns = lanes.begins_ns, lanes.host_ns - lanes.begins_ns
    with_device = (products_ns - begins_ns) / (products_ns + more_ns)
    cut = max(lanes.share(lanes.others_ns + begins_ns, more_ns), with_device)
    if problem.split and cut > 0:
        both_ns = max(begins_ns + cut * more_ns, products_ns - cut * products_ns)
        cut_end_ns = max(lanes.missing_ns - cut * lanes.all_ns, lanes.others_ns + both_ns)
        if cut_end_ns < min(end_ns, LEAST_GAIN * alone_ns):
            return _rows_of_each(units, cut)
    return {unit.buffer: unit.num_rows for unit in chosen}


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The time that each lane takes, in nanoseconds.

    Attributes:
        missing_ns: The copies of all that the pass misses.
        all_ns: Those of all that the host may compute with.
        others_ns: The tasks on the device that the host cannot compute.
        device_ns: The tasks that it can, on the device.
        host_ns: All of them on the host.
        begins_ns: Their beginnings there.
    """

    missing_ns: int
    all_ns: int
    others_ns: int
    device_ns: int
    host_ns: int
    begins_ns: int

    def share(self, fixed_ns: int, more_ns: int) -> float:
        """Return the share of the host: it adds as much of ``more_ns`` to ``fixed_ns``.

        It is not positive where the copies hide.
        """
        return min(1.0, (self.missing_ns - fixed_ns) / (self.all_ns + more_ns))

    @property
    def is_device_slow(self) -> bool:
        """True if the device takes longer than the host: it may unpack weights into memory."""
        return self.host_ns < self.device_ns

    @property
    def whole_share(self) -> float:
        """The share of the host where each task is computed in one place."""
        if self.is_device_slow:
            return 1.0
        return self.share(self.others_ns + self.device_ns, self.host_ns - self.device_ns)


def _lanes(
    problem: Problem, units: Sequence[Divisible | Attention], on_host: Sequence[Task]
) -> _Lanes:
    """Return what the lanes take.

    Args:
        problem: The pass, its arena and its profile.
        units: What the host may compute with.
        on_host: Their tasks, as the host computes them.
    """
    graph, profile = problem.graph, problem.profile
    assert profile is not None
    costs, link = Costs(profile), Costs(profile).links[Lane.H2D]
    times = [max(costs.task_ns(graph, task), profile.host_op_ns) for task in graph.tasks]
    device_ns = sum(times[unit.task] for unit in units)
    missing = lower_bound(graph, problem.arena_bytes, problem.alignment, may_cut=problem.split)
    # Rows come in layer by layer, so a ring of two layers has the room in which two would be kept.
    layers = [unit.nbytes for unit in can_attend(graph)] if missing.nbytes else []
    missing_bytes = missing.nbytes + 2 * max(layers, default=0)
    issue_ns = len(units) * profile.host_op_ns
    hosts = [costs.host_product_ns(*host_work(graph, task)) for task in on_host]
    return _Lanes(
        missing_ns=link.ns(missing_bytes),
        all_ns=link.ns(sum(unit.nbytes for unit in units)),
        others_ns=sum(times) - device_ns,
        device_ns=device_ns,
        host_ns=sum(hosts) + issue_ns,
        begins_ns=len(units) * costs.host_product_ns(0, 0) + issue_ns,
    )


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


def _evenly(units: Sequence[_Unit], share: float) -> list[_Unit]:
    """Choose some of what the host may compute with, evenly over the pass."""
    found, due_bytes = list[_Unit](), 0.0
    for unit in units:
        due_bytes += share * unit.nbytes
        if due_bytes >= unit.nbytes / 2:
            found.append(unit)
            due_bytes -= unit.nbytes
    return found
