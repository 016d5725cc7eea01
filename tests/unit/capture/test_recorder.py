"""What is written down of each op: tasks, buffers, views, constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ds_finepage.capture import recorder as recorder_module
from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.recorder import Recorder
from ds_finepage.capture.recording import record
from ds_finepage.checker.checker import check
from ds_finepage.errors import CaptureError
from ds_finepage.execution.host_ops import to_device
from ds_finepage.graph.packed import wants_fused
from ds_finepage.graph.taskgraph import BufferKind, Ref, Symbol, Task, TaskGraph
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.op import packed_linear
from tests.unit.capture.replay import captured, replay
from tests.unit.packing.products import packed_layer_of
from tests.unit.planning.sketches import plan

F = nn.functional
aten = torch.ops.aten


def ops(graph: TaskGraph) -> list[str]:
    return [t.op for t in graph.tasks]


def kinds(graph: TaskGraph) -> list[str]:
    return [b.kind.value for b in graph.buffers]


def only(graph: TaskGraph) -> Task:
    (task,) = graph.tasks
    return task


def both(pair: Any) -> tuple[Any, Any]:
    """Unpack what stands for two tensors while tracing."""
    return pair[0], pair[1]


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- views and tasks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(6, 4),
        lambda x: x.t(),
        lambda x: x[1:, ::2],
        lambda x: x.unsqueeze(0).expand(3, 4, 6),
        lambda x: x.chunk(2, 1)[1],
        lambda x: x.view(torch.int32),
        lambda x: x.as_strided((2, 2), (1, 3), 5),
        lambda x: x.detach(),
        lambda x: x.reshape(-1),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
    ],
    ids=lambda f: "",
)
def test_views_are_not_tasks(function: Callable[..., Any]) -> None:
    x = rows(4, 6)
    graph = captured(function, x)
    assert graph.tasks == () and kinds(graph) == ["input"]
    assert torch.equal(replay(graph, (x,))[0], function(x))


def test_an_op_that_computes_is_a_task() -> None:
    graph = captured(lambda x: torch.exp(x), rows(4, 6))
    task = only(graph)
    assert (task.op, task.args, task.results) == ("aten.exp.default", (Ref(0),), (1,))
    assert (task.reads, task.writes, task.touches) == ((0,), (1,), ())
    assert kinds(graph) == ["input", "output"]
    assert [b.nbytes for b in graph.buffers] == [96, 96]


def test_a_view_is_another_tensor_on_the_same_buffer() -> None:
    graph = captured(lambda x: x.t()[1:] + 1, rows(4, 6))
    (ref, _) = only(graph).args
    view = graph.tensors[ref.tensor]
    assert (view.buffer, view.shape, view.stride, view.offset) == (0, (5, 4), (1, 6), 1)


def test_the_same_view_taken_twice_is_one_tensor() -> None:
    graph = captured(lambda x: x.t() @ x.t().clone() + x.t().sum(), rows(4, 4))
    turned = [t for t in graph.tensors if t.buffer == 0 and t.stride == (1, 4)]
    assert len(turned) == 1


def test_arguments_are_written_down() -> None:
    graph = captured(
        lambda x: torch.cumsum(x, 1, dtype=torch.float64).mean((0, -1), True), rows(2, 3)
    )
    first, second = graph.tasks
    assert first.args == (Ref(0), 1)
    assert first.kwargs == (("dtype", Symbol("dtype", "float64")),)
    assert second.args == (Ref(1), (0, -1), True)


def test_symbols_of_every_sort_are_written_down() -> None:
    graph = captured(
        lambda x: torch.empty_like(
            x, layout=torch.strided, device="cpu", memory_format=torch.contiguous_format
        ).copy_(x),
        rows(2, 3),
    )
    kwargs = dict(graph.tasks[0].kwargs)
    assert kwargs["layout"] == Symbol("layout", "strided")
    assert kwargs["device"] == Symbol("device", "cpu")
    assert kwargs["memory_format"] == Symbol("memory_format", "contiguous_format")


def test_a_change_in_place_reads_the_tensor_that_it_changes() -> None:
    task = only(captured(lambda x, y: x.add_(y), rows(2), rows(2)))
    assert (task.reads, task.writes) == ((0, 1), (0,))


def test_lists_of_tensors_are_read() -> None:
    graph = captured(lambda x, y: torch.cat([x, y, x]), rows(2), rows(3))
    task = only(graph)
    assert task.args[0] == (Ref(0), Ref(1), Ref(0)) and task.reads == (0, 1)


# --- results, changes in place, dead code ----------------------------------------------------


def changes_a_list(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch._foreach_add_([x, y], 1)
    return x, y


def changes_before_a_use(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y[0].zero_()
    return y.sum()


@pytest.mark.parametrize(
    ("function", "shapes", "found_ops", "found_kinds", "writes"),
    [
        (lambda x: both(torch.topk(x, 2)), [6], "topk", "input output output", [(1, 2)]),
        (lambda x: torch.topk(x, 2)[0], [6], "topk", "input output activation", [(1, 2)]),
        (
            lambda x: both(aten.split_with_sizes_copy(x, [2, 3])),
            [5],
            "split_with_sizes_copy",
            "input output output",
            [(1, 2)],
        ),
        (lambda x: torch.exp(x).add_(1), [4], "exp add_", "input output", [(1,), (1,)]),
        (changes_a_list, [2, 3], "_foreach_add_", "state state", [(0, 1)]),
        (lambda x, y: x.add_(y), [4, 4], "add_", "state input", [(0,)]),
        (
            lambda x, y: (x[1:].copy_(y), y.neg())[1],
            [4, 3],
            "copy_ neg",
            "state input output",
            [(0,), (2,)],
        ),
        (lambda x: (x.exp(), x.neg().mul(2), x.sin())[2], [4], "sin", "input output", [(1,)]),
        (lambda x: (x.exp(), x.neg().mul(2))[1], [4], "neg mul", "input activation output", None),
        (lambda x: (x.exp().add_(1), x.neg())[1], [4], "neg", "input output", [(1,)]),
        (changes_before_a_use, [4], "exp zero_ sum", "input activation output", None),
        (lambda x, y: y.neg(), [4, 2], "neg", "input input output", [(2,)]),
    ],
    ids=[
        *("several results", "an unused result", "a list of results", "in place"),
        *("a changed list", "a changed input", "state that nobody returns", "dead tasks"),
        *("dead ones before", "a dead change", "a change before a use", "an unused input"),
    ],
)
def test_what_is_needed_is_written_down(
    function: Callable[..., Any],
    shapes: list[int],
    found_ops: str,
    found_kinds: str,
    writes: list[tuple[int, ...]] | None,
) -> None:
    graph = captured(function, *map(rows, shapes))
    assert [op.split(".")[1] for op in ops(graph)] == found_ops.split()
    assert kinds(graph) == found_kinds.split()
    assert writes in (None, [t.writes for t in graph.tasks])
    for found in (graph.buffers, graph.tensors):
        assert [each.id for each in found] == list(range(len(found)))
    assert [t.index for t in graph.tasks] == list(range(len(graph.tasks)))
    assert [i.position for i in graph.inputs] == list(range(len(shapes)))


def test_a_change_through_a_view_changes_the_buffer() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        y[:2].t().mul_(2)
        return y

    x = rows(4, 3)
    graph = captured(function, x)
    assert graph.tasks[1].writes == graph.tasks[0].writes
    assert torch.equal(replay(graph, (x,))[0], function(x))


# --- weights ---------------------------------------------------------------------------------


def test_a_weight_is_recognised_and_named() -> None:
    graph = captured(lambda x, w: x @ w, rows(2, 3), rows(3, 4), weights={1: "proj.weight"})
    assert kinds(graph) == ["input", "weight", "output"]
    assert (graph.buffers[1].name, graph.buffers[1].nbytes) == ("proj.weight", 48)


@pytest.mark.parametrize(
    "function",
    [lambda w: w.add_(1), lambda w: w.t()[1:].zero_(), lambda w: w.data.copy_(w + 1)],
    ids=["itself", "a view", "its data"],
)
def test_a_weight_that_is_written_is_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"aten\.\w+\.\w+ writes to weight proj\.weight"):
        captured(function, rows(3, 3), weights={0: "proj.weight"})


# --- constants -------------------------------------------------------------------------------


def holding(constant: torch.Tensor, change: bool = False) -> GraphModule:
    """Build a graph with a tensor of its own: x + constant."""
    root = nn.Module()
    root.constant = constant
    graph = Graph()
    x = graph.placeholder("x")
    own = graph.get_attr("constant")
    op = torch.Tensor.add_ if change else torch.add
    graph.output((graph.call_function(op, (own, x) if change else (x, own)),))
    return GraphModule(root, graph)


def test_a_tensor_of_the_graph_itself_is_lifted() -> None:
    x, constant = rows(3), torch.tensor([1.0, 2.0, 3.0])
    graph = record(DynamoGraph(holding(constant), (x,), {}, "sketch"), (x,))
    assert kinds(graph) == ["input", "constant", "output"]
    assert graph.buffers[1].payload == constant.numpy().tobytes()
    assert torch.equal(replay(graph, (x,))[0], x + constant)


@pytest.mark.parametrize(
    "constant",
    [
        torch.tensor([1, 0, 1]).to(torch.bfloat16),
        torch.tensor([1, 0, 1]).to(torch.bool),
        torch.tensor([1, 0, 1]),
        torch.arange(10.0)[4:7],
        torch.ones(0),
    ],
    ids=["bfloat16", "bool", "int64", "a part", "empty"],
)
def test_a_constant_keeps_its_value_of_the_time_of_capture(constant: torch.Tensor) -> None:
    x = torch.ones(constant.shape)
    expected = x + constant
    graph = record(DynamoGraph(holding(constant), (x,), {}, "sketch"), (x,))
    constant.zero_()
    assert torch.equal(replay(graph, (x,))[0], expected)


def test_a_literal_in_the_program_is_lifted() -> None:
    x = rows(3)
    graph = captured(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), x)
    assert "constant" in kinds(graph)
    assert torch.equal(replay(graph, (x,))[0], x * torch.tensor([1.0, 2.0, 3.0]))


def test_a_constant_that_is_too_large_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_CONSTANT_BYTES", 8)
    x = rows(3)
    with pytest.raises(CaptureError) as caught:
        record(DynamoGraph(holding(torch.ones(3)), (x,), {}, "sketch"), (x,))
    assert "constant of 12 bytes; at most 8 can be lifted" in str(caught.value)
    assert "Register it as a module buffer" in str(caught.value)


def test_a_constant_that_is_changed_is_refused() -> None:
    x = rows(3)
    with pytest.raises(CaptureError, match="writes to constant"):
        record(DynamoGraph(holding(torch.ones(3), change=True), (x,), {}, "sketch"), (x,))


# --- what cannot be written down -------------------------------------------------------------


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("function", "sort"),
    [
        (lambda x: torch.add(x, 1j), "complex"),
        (lambda x: torch.bernoulli(x.sigmoid(), generator=GENERATOR), "Generator"),
    ],
)
def test_an_argument_of_another_sort_is_refused(function: Any, sort: str) -> None:
    with pytest.raises(CaptureError, match=f"argument of type {sort} cannot be written down"):
        captured(function, rows(3))


def test_a_size_that_depends_on_data_is_refused() -> None:
    with pytest.raises(CaptureError, match="a size depends on data"):
        Recorder()._encode(ShapeEnv().create_unbacked_symint())


def test_a_tensor_that_nobody_made_is_refused() -> None:
    with FakeTensorMode():
        stranger = torch.ones(2)
    with pytest.raises(CaptureError, match="a tensor whose storage no op made"):
        Recorder().tensor_id(stranger)


def test_rows_of_a_cache_are_an_argument_also_if_a_size_became_a_number() -> None:
    """A layer of experts fixes the number of sequences in the middle of a pass."""
    sizes = ShapeEnv(specialize_zero_one=False)
    batch = sizes.create_unspecified_symint_and_symbol(2, ConstantSource("n"), DimDynamic.DYNAMIC)
    recorder = Recorder()
    with FakeTensorMode(shape_env=sizes):
        given, new = torch.empty(5, batch, 1, 4), torch.empty(batch, 1, 1, 4)
        for tensor in (given, new):
            recorder.add_buffer(tensor, BufferKind.INPUT, 160)
        argument = recorder.tensor_id(given)
        assert given.shape[1] == 2
        with recorder:
            to_device(given, new, 6)
    assert recorder.buffers[-1].handed == argument


# --- costs -----------------------------------------------------------------------------------


def test_costs_are_those_of_a_roofline() -> None:
    assert only(captured(lambda x, w: x @ w, rows(2, 3), rows(3, 4))).flops == 2 * 2 * 3 * 4
    assert only(captured(lambda x: x.exp(), rows(4, 6))).moved_bytes == 2 * 96
    ids = torch.tensor([1, 2])
    lookup = only(captured(lambda t, i: F.embedding(i, t), rows(1000, 4), ids))
    assert lookup.moved_bytes < 1000  # rows, and not the table


@pytest.mark.parametrize(
    ("num_rows", "asked", "is_fused"), [(6, (), False), (16, (True,), True), (17, (True,), False)]
)
def test_a_product_with_a_packed_weight_is_one_task(
    num_rows: int, asked: tuple[bool, ...], is_fused: bool
) -> None:
    layer = packed_layer_of(nn.Linear(64, 24, bias=False), PackedForm(4, 32))
    given = (rows(num_rows, 64), layer.numbers, layer.scales, layer.minima)
    graph = captured(lambda x, n, s, m: packed_linear(x, n, s, m, None, 4, 32, *asked), *given)
    task = only(graph)
    assert task.flops == 2 * num_rows * 64 * 24
    unpacked, packed = 24 * 64 * 4, 24 * (32 + 2 * 2 * 4)
    moved_bytes = num_rows * (64 + 24) * 4 + packed
    assert task.moved_bytes == moved_bytes + (0 if is_fused else 4 * unpacked)
    assert wants_fused(task.args) is bool(asked)


# --- replayed, against eager -----------------------------------------------------------------


def caches(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, at, x)
    return cache[1:] @ x.t()


def overlapping(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    left, right = y[:, :3], y[:, 3:]
    left.add_(right)
    right.copy_(left.flip(1))
    return y, left, right.sum(0)


def order_matters(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    before = y.sum()
    y.zero_()
    return before + y.sum()


def attention(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: torch.softmax(x, -1).to(torch.bfloat16).float(), [(4, 6)]),
        (lambda x: torch.where(x > 0, x, x.new_zeros(())), [(4, 6)]),
        (lambda x: torch.stack(torch.topk(x, 3)[0].unbind(1)), [(4, 6)]),
        (lambda x: torch.sort(x, descending=True)[0][:, torch.topk(x, 2)[1][0]], [(4, 6)]),
        (lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 2), [(4, 6)]),
        (lambda x: x.new_full((2,), 3.0) + torch.arange(1, 3) + torch.linspace(0, 1, 2), [(1,)]),
        (lambda x: F.rrelu(x, training=False) + F.dropout(x, training=False), [(4, 6)]),
        (lambda x: (x.t() @ x).tril_().t_().unsqueeze_(0), [(4, 6)]),
        (lambda x, y: torch.baddbmm(y, x, x.transpose(1, 2)), [(2, 3, 4), (2, 3, 3)]),
        (overlapping, [(4, 6)]),
        (order_matters, [(4, 6)]),
        (attention, [(1, 2, 5, 8)]),
    ],
)
def test_what_is_captured_gives_what_eager_gives(
    function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    args = [rows(*shape) for shape in shapes]
    expected = function(*[a.clone() for a in args])
    graph = captured(function, *args)
    found = replay(graph, args)
    for one, other in zip(
        found, expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        assert torch.equal(one, other) and one.stride() == other.stride()
    check(plan(graph, arena_bytes=1 << 16, policy="finepage"))


def test_state_and_results_are_those_of_eager() -> None:
    args = (torch.zeros(4, 3), rows(2, 3), torch.tensor([3, 1]))
    other = tuple(a.clone() for a in args)
    graph = captured(caches, *args)
    assert torch.equal(replay(graph, args)[0], caches(*other))
    assert torch.equal(args[0], other[0])


def test_arguments_that_share_memory_are_captured_as_they_lie() -> None:
    whole, twin = torch.zeros(6), torch.zeros(6)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    graph = captured(function, whole[:4], whole[2:])
    assert torch.equal(replay(graph, (whole[:4], whole[2:]))[0], function(twin[:4], twin[2:]))


def test_strided_arguments_are_captured_as_they_lie() -> None:
    x = rows(6, 8)[::2].t()
    graph = captured(lambda x: x.exp(), x)
    found = replay(graph, (x,))[0]
    assert torch.equal(found, x.exp()) and found.stride() == x.exp().stride()
    assert graph.buffers[0].kind is BufferKind.INPUT
