"""The simulator on memgraphs made by hand: every time below was worked out on paper.

The machine takes 1 ns a byte on either link, 1 ns a floating point operation, and nothing else.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import defaultdict

import pytest

from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import (
    Edge,
    EdgeKind,
    Extent,
    Lane,
    MemGraph,
    Node,
    NodeKind,
    Residency,
)
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TO_HOST, Buffer, BufferKind, Task, TaskGraph, TensorView
from ds_finepage.graph.timeline import Timeline
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_products import with_host_rows
from ds_finepage.planning.rewrite.split import divisible_weights
from ds_finepage.planning.simulator import Costs, measured_timeline, simulate
from tests.property.matmul_chains import matmul_chain

PLAIN = HardwareProfile(
    name="plain",
    source="made up",
    capacity_bytes=2**30,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    memory_bytes_per_s=1e12,
    flops_per_s={"default": 1e9},
)

WITH_HOST = dataclasses.replace(PLAIN, host_bytes_per_s=1e9, host_flops_per_s=1e9)


class Sketch:
    """A memgraph in the making; edges by node ids, their kind being of no matter here."""

    def __init__(self, *, weights: list[int], flops: list[int], activations: tuple[int, ...] = ()):
        kinds = [BufferKind.WEIGHT] * len(weights) + [BufferKind.ACTIVATION] * len(activations)
        self.graph = TaskGraph(
            "sketch",
            tuple(
                Buffer(i, kind, nbytes, f"w{i}" if kind is BufferKind.WEIGHT else "")
                for i, (kind, nbytes) in enumerate(
                    zip(kinds, [*weights, *activations], strict=True)
                )
            ),
            (),
            tuple(Task(i, "op", flops=f) for i, f in enumerate(flops)),
        )
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.entry: list[Residency] = []

    def _add(self, kind: NodeKind, after: tuple[int, ...], **what: int | Extent) -> int:
        node = Node(len(self.nodes), kind, **what)  # type: ignore[arg-type]
        self.nodes.append(node)
        self.edges += [Edge(before, node.id, EdgeKind.DATA) for before in after]
        return node.id

    def place(self, kind: NodeKind, buffer: int, offset: int, *after: int) -> int:
        extent = Extent(offset, self.graph.buffers[buffer].nbytes)
        if kind is NodeKind.RESIDENT:
            self.entry.append(Residency(buffer, extent))
        return self._add(kind, after, buffer=buffer, extent=extent)

    def compute(self, task: int, *after: int) -> int:
        return self._add(NodeKind.COMPUTE, after, task=task)

    def memgraph(self) -> MemGraph:
        edges = tuple(sorted(self.edges))
        entry = tuple(self.entry)
        return MemGraph(self.graph, "hand", 10**6, 1, tuple(self.nodes), edges, entry, ())


def times(timeline: Timeline) -> dict[int, tuple[int, int]]:
    return {span.node: (span.start_ns, span.end_ns) for span in timeline.spans}


def streaming(flops: list[int], nbytes: int, offsets: list[int]) -> MemGraph:
    """Each task needs a weight of its own, which takes over from the last one at its offset."""
    sketch = Sketch(weights=[nbytes] * len(flops), flops=flops)
    vacators: dict[int, int] = {}
    for task, offset in enumerate(offsets):
        before = [vacators[offset]] if offset in vacators else []
        alloc = sketch.place(NodeKind.ALLOC, task, offset, *before)
        reload = sketch.place(NodeKind.RELOAD, task, offset, alloc)
        compute = sketch.compute(task, reload)
        vacators[offset] = sketch.place(NodeKind.DROP, task, offset, compute)
    return sketch.memgraph()


def test_overlapped_transfers_hide_behind_compute() -> None:
    timeline = simulate(streaming([100, 100, 100], 60, [0, 60, 120]), PLAIN)
    # Reloads at 0..60, 60..120, 120..180; compute at 60..160, 160..260, 260..360.
    assert timeline.total_ns == 360
    assert timeline.compute_ns == 300 and timeline.transfer_ns == 180
    assert timeline.stall_ns == 60  # the first reload cannot hide
    assert timeline.peak_bytes == 180


def test_exposed_transfers_decide_the_time() -> None:
    timeline = simulate(streaming([10, 10, 10], 60, [0, 60, 120]), PLAIN)
    assert timeline.total_ns == 190  # three reloads and the last task
    assert timeline.stall_ns == 160
    assert timeline.transfer_ns == 180


def test_the_host_issues_nodes_one_after_the_other() -> None:
    profile = dataclasses.replace(PLAIN, host_op_ns=200, host_copy_ns=50)
    timeline = simulate(streaming([100, 100, 100], 60, [0, 60, 120]), profile)
    # Issued: three reloads and three tasks, in their order in the plan.
    issued = 0
    for node, start in sorted((s.node, s.start_ns) for s in timeline.spans):
        issued += 50 if node in {s.node for s in timeline.spans if s.lane is Lane.H2D} else 200
        assert start >= issued
    assert issued == 3 * 200 + 3 * 50
    assert timeline.total_ns == issued + 100  # the last task starts when it is issued


def test_a_task_of_the_host_costs_its_bytes_two_copies_and_a_wait() -> None:
    graph = matmul_chain([8, 16, 4])
    units = divisible_weights(graph)
    graph = with_host_rows(graph, units, {unit.buffer: unit.num_rows for unit in units})
    profile = dataclasses.replace(WITH_HOST, transfer_latency_ns=7)
    times = [Costs(profile).task_ns(graph, task) for task in graph.tasks[1:]]
    # 1,000 operations take longer than the few bytes.
    assert times == [3 * 7 + 1000, 3 * 7 + 1000]
    fast = Costs(dataclasses.replace(profile, host_flops_per_s=1e15))
    assert fast.task_ns(graph, graph.tasks[1]) == 3 * 7 + graph.tasks[1].moved_bytes
    with pytest.raises(ConfigError, match="no host_bytes_per_s and host_flops_per_s"):
        Costs(PLAIN).task_ns(graph, graph.tasks[1])


def test_the_host_issues_nothing_while_it_computes() -> None:
    graph = matmul_chain([8, 16, 4])
    (first, _) = units = divisible_weights(graph)
    graph = with_host_rows(graph, units, {first.buffer: 16})
    profile = dataclasses.replace(WITH_HOST, host_op_ns=5, launch_ns=1)
    plan = plan_finepage(Problem(graph, needed_arena_bytes(graph, 64), 64))
    timeline = simulate(plan, profile)
    (host,) = (s for s in timeline.spans if s.lane is Lane.HOST)
    last = timeline.spans[-1]
    assert last.lane is Lane.COMPUTE and last.start_ns == host.end_ns + 5
    assert timeline.busy_ns(Lane.HOST) == host.end_ns - host.start_ns > 0
    assert timeline.transfer_ns == 0  # it is no copy


def test_offloads_have_a_lane_of_their_own_and_outlast_compute() -> None:
    sketch = Sketch(weights=[30], activations=(50,), flops=[10, 10])
    alloc = sketch.place(NodeKind.ALLOC, 1, 30)
    first = sketch.compute(0, alloc)
    sketch.place(NodeKind.OFFLOAD, 1, 30, first)
    reload = sketch.place(NodeKind.RELOAD, 0, 0)
    sketch.compute(1, reload)
    timeline = simulate(sketch.memgraph(), PLAIN)
    assert times(timeline) == {1: (0, 10), 2: (10, 60), 3: (0, 30), 4: (30, 40)}
    assert timeline.total_ns == 60
    assert timeline.transfer_ns == 50  # the busier lane
    assert timeline.stall_ns == 20  # up to the last task, not to the end of the offload
    assert [s.lane for s in timeline.spans] == [Lane.COMPUTE, Lane.D2H, Lane.H2D, Lane.COMPUTE]
    assert [s.name for s in timeline.spans][:3] == ["task 0 op", "offload buffer 1", "reload w0"]


def test_link_rates_and_latency() -> None:
    profile = dataclasses.replace(
        PLAIN, h2d_bytes_per_s=3e9, d2h_bytes_per_s=5e8, transfer_latency_ns=8
    )
    sketch = Sketch(weights=[3, 100], activations=(100,), flops=[])
    sketch.place(NodeKind.RELOAD, 0, 0)
    sketch.place(NodeKind.RELOAD, 1, 3)
    sketch.place(NodeKind.OFFLOAD, 2, 103)
    timeline = simulate(sketch.memgraph(), profile)
    assert times(timeline) == {0: (0, 9), 1: (9, 9 + 42), 2: (0, 208)}  # 33.3 ns, rounded up


def test_entry_that_is_missing_is_loaded_first() -> None:
    sketch = Sketch(weights=[40, 20], flops=[10])
    first = sketch.place(NodeKind.RESIDENT, 0, 0)
    second = sketch.place(NodeKind.RESIDENT, 1, 40)
    sketch.compute(0, first, second)
    memgraph = sketch.memgraph()
    assert simulate(memgraph, PLAIN).total_ns == 10
    assert times(simulate(memgraph, PLAIN, entry_missing=[1])) == {1: (0, 20), 2: (20, 30)}
    timeline = simulate(memgraph, PLAIN, entry_missing=(0, 1))
    assert times(timeline) == {0: (0, 40), 1: (40, 60), 2: (60, 70)}
    assert timeline.transfer_ns == timeline.stall_ns == 60
    assert timeline.spans[0].name == "reload w0"
    assert timeline.peak_bytes == 60


def test_missing_buffers_must_be_in_the_entry() -> None:
    with pytest.raises(ConfigError, match=r"entry_missing names buffers \[3\]"):
        simulate(streaming([1], 1, [0]), PLAIN, entry_missing=[3])


def test_peak_counts_what_is_allocated_at_one_time() -> None:
    """Freed and taken again at the same moment is not twice; a life of no length still counts."""
    sketch = Sketch(weights=[], activations=(100, 100, 30), flops=[5, 0])
    a = sketch.place(NodeKind.ALLOC, 0, 0)
    first = sketch.compute(0, a)
    gone = sketch.place(NodeKind.DROP, 0, 0, first)
    b = sketch.place(NodeKind.ALLOC, 1, 0, gone)
    c = sketch.place(NodeKind.ALLOC, 2, 100, gone)
    second = sketch.compute(1, b, c)
    sketch.place(NodeKind.DROP, 1, 0, second)
    sketch.place(NodeKind.DROP, 2, 100, second)
    timeline = simulate(sketch.memgraph(), PLAIN)
    assert timeline.peak_bytes == 130


def test_empty_memgraph() -> None:
    empty = MemGraph(TaskGraph("", (), (), ()), "hand", 0, 1, (), (), (), ())
    assert simulate(empty, PLAIN) == Timeline((), 0, 0, 0, 0, 0)


def test_a_pass_begins_when_its_call_lets_it() -> None:
    plan = streaming([100, 100], 60, [0, 60])
    profile = dataclasses.replace(PLAIN, host_op_ns=3)
    early, late = simulate(plan, profile), simulate(plan, profile, begin_ns=1000)
    assert times(late) == {n: (s + 1000, e + 1000) for n, (s, e) in times(early).items()}
    assert late.stall_ns == early.stall_ns + 1000 and late.compute_ns == early.compute_ns


def test_a_measured_timeline_is_summed_up_like_a_predicted_one() -> None:
    plan = streaming([100, 100, 100], 60, [0, 60, 0])
    predicted = simulate(plan, PLAIN)
    bare = [dataclasses.replace(span, name="") for span in predicted.spans]
    measured = measured_timeline(plan, bare)
    assert measured == predicted
    late = measured_timeline(plan, bare, begin_ns=5)
    assert late.total_ns == measured.total_ns + 5 and late.spans[0].start_ns == 5


# --- times of tasks --------------------------------------------------------------------------

ROOFLINE = dataclasses.replace(
    PLAIN, memory_bytes_per_s=2e9, flops_per_s={"default": 1e9, "float16": 4e9}, launch_ns=50
)


def graph_with(dtype: str) -> TaskGraph:
    buffers = (Buffer(0, BufferKind.ACTIVATION, 8),)
    return TaskGraph("roof", buffers, (TensorView(0, 0, dtype, (4,), (1,)),), ())


@pytest.mark.parametrize(
    ("task", "dtype", "expected"),
    [
        (Task(0, "op", flops=1000, results=(0,)), "float32", 1000),
        (Task(0, "op", flops=1000, results=(0,)), "float16", 250),
        (Task(0, "op", flops=1001, results=(0,)), "float16", 251),
        (Task(0, "op", flops=1000, results=(None, 0)), "float16", 250),
        (Task(0, "op", flops=1000), "float16", 1000),
        (Task(0, "op", flops=1000, results=(None,)), "float16", 1000),
        (Task(0, "op", flops=1000, moved_bytes=800, results=(0,)), "float16", 400),
        (Task(0, "op", results=(0,)), "float16", 50),
        (Task(0, "op", flops=1000, moved_bytes=800, results=(0,), time_ns=3), "float16", 3),
        (Task(0, "op", flops=1000, time_ns=0), "float16", 0),
    ],
)
def test_task_time(task: Task, dtype: str, expected: int) -> None:
    assert Costs(ROOFLINE).task_ns(graph_with(dtype), task) == expected


def test_a_task_that_writes_to_host_memory_takes_as_long_as_the_copy() -> None:
    buffers = (Buffer(0, BufferKind.ACTIVATION, 600), Buffer(1, BufferKind.HOST, 600))
    task = Task(0, TO_HOST, reads=(0,), writes=(1,), moved_bytes=1200)
    graph = TaskGraph("rows", buffers, (), (task,))
    machine = dataclasses.replace(PLAIN, d2h_bytes_per_s=2e8, launch_ns=7)
    assert Costs(machine).task_ns(graph, task) == 3000


def test_unusable_profiles_are_refused() -> None:
    broken = dataclasses.replace(PLAIN, h2d_bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="h2d_bytes_per_s is 0"):
        simulate(streaming([1], 1, [0]), broken)
    with pytest.raises(ConfigError, match="no 'default'"):
        Costs(dataclasses.replace(PLAIN, flops_per_s={}))


# --- laws ------------------------------------------------------------------------------------


def random_memgraph(seed: int, num_nodes: int = 60) -> MemGraph:
    """Any nodes, any forward edges: the laws below hold for all of them."""
    draw = random.Random(seed)
    sizes = [draw.randrange(0, 300) for _ in range(8)]
    sketch = Sketch(weights=sizes, flops=[draw.randrange(0, 200) for _ in range(num_nodes)])
    kinds = [NodeKind.RELOAD, NodeKind.OFFLOAD, NodeKind.COMPUTE, NodeKind.COMPUTE, NodeKind.ALLOC]
    for position in range(num_nodes):
        after = sorted({draw.randrange(position) for _ in range(draw.randrange(3)) if position})
        kind = draw.choice(kinds)
        if kind is NodeKind.COMPUTE:
            sketch.compute(position, *after)
        else:
            sketch.place(kind, draw.randrange(8), 0, *after)
    return sketch.memgraph()


@pytest.mark.parametrize("seed", range(20))
def test_a_node_begins_as_soon_as_its_lane_and_what_it_waits_for_have_ended(seed: int) -> None:
    memgraph = random_memgraph(seed)
    ended: list[int] = []
    free: dict[NodeKind, int] = defaultdict(int)  # of the lane of these nodes
    expected = {}
    for node in memgraph.nodes:
        begin = max((ended[e.before] for e in memgraph.edges if e.after == node.id), default=0)
        length = 0
        if node.kind is NodeKind.COMPUTE:
            length = memgraph.graph.tasks[node.id].flops
        elif node.kind is not NodeKind.ALLOC and node.extent is not None:
            length = node.extent.nbytes
        if node.kind is not NodeKind.ALLOC:
            begin = max(begin, free[node.kind])
            expected[node.id] = begin, begin + length
            free[node.kind] = begin + length
        ended.append(begin + length)
    assert times(simulate(memgraph, PLAIN)) == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["plain", "t4", "h200"])
def test_laws(seed: int, name: str) -> None:
    memgraph = random_memgraph(seed)
    profile = PLAIN if name == "plain" else load_profile(name)
    timeline = simulate(memgraph, profile)
    assert timeline == simulate(memgraph, profile)

    lanes = defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append(span)
    for spans in lanes.values():
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.node < after.node and before.end_ns <= after.start_ns
    ends = {span.node: span.end_ns for span in timeline.spans}
    starts = {span.node: span.start_ns for span in timeline.spans}
    for edge in memgraph.edges:
        if edge.before in ends and edge.after in starts:
            assert ends[edge.before] <= starts[edge.after]

    def busy(lane: Lane) -> int:
        return sum(s.end_ns - s.start_ns for s in lanes[lane])

    assert timeline.compute_ns == busy(Lane.COMPUTE)
    assert timeline.transfer_ns == max(busy(Lane.H2D), busy(Lane.D2H))
    assert timeline.total_ns == max(ends.values())
    assert timeline.stall_ns == max(s.end_ns for s in lanes[Lane.COMPUTE]) - timeline.compute_ns
    assert timeline.total_ns >= max(timeline.compute_ns, timeline.transfer_ns)


def test_ten_thousand_nodes_in_no_time() -> None:
    memgraph = streaming([100] * 2500, 60, [60 * (i % 5) for i in range(2500)])
    assert len(memgraph.nodes) == 10_000
    took = []
    for _ in range(3):
        start = time.process_time()
        simulate(memgraph, PLAIN)
        took.append(time.process_time() - start)
    assert min(took) < 0.3
