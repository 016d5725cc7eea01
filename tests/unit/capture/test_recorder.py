"""What is written down of each op: tasks, buffers, views, constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ds_finepage.capture import recorder as recorder_module
from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.recorder import Recorder
from ds_finepage.capture.recording import record
from ds_finepage.checker.checker import check
from ds_finepage.errors import CaptureError
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


def test_lists_of_tensors_are_read() -> None:
    graph = captured(lambda x, y: torch.cat([x, y, x]), rows(2), rows(3))
    task = only(graph)
    assert task.args[0] == (Ref(0), Ref(1), Ref(0)) and task.reads == (0, 1)


def test_several_results_are_several_buffers() -> None:
    graph = captured(lambda x: both(torch.topk(x, 2)), rows(6))
    task = only(graph)
    assert len(task.results) == 2 and len(task.writes) == 2
    assert [t.dtype for t in graph.tensors[1:]] == ["float32", "int64"]
    assert kinds(graph) == ["input", "output", "output"]


def test_a_result_that_nobody_uses_is_still_written() -> None:
    graph = captured(lambda x: torch.topk(x, 2)[0], rows(6))
    assert kinds(graph) == ["input", "output", "activation"]
    assert only(graph).writes == (1, 2)


def test_results_in_a_list_are_written_down() -> None:
    x = rows(5)
    graph = captured(lambda x: both(aten.split_with_sizes_copy(x, [2, 3])), x)
    found = only(graph)
    assert len(found.results) == 2 and len(found.writes) == 2


# --- changes in place ------------------------------------------------------------------------


def test_an_op_in_place_reads_and_writes_its_buffer() -> None:
    graph = captured(lambda x: torch.exp(x).add_(1), rows(4))
    first, second = graph.tasks
    assert second.op == "aten.add_.Tensor"
    assert second.reads == second.writes == first.writes
    assert len(graph.buffers) == 2


def test_a_change_through_a_view_changes_the_buffer() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        y[:2].t().mul_(2)
        return y

    x = rows(4, 3)
    graph = captured(function, x)
    assert graph.tasks[1].writes == graph.tasks[0].writes
    assert torch.equal(replay(graph, (x,))[0], function(x))


def test_a_change_of_a_list_writes_each() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._foreach_add_([x, y], 1)
        return x, y

    graph = captured(function, rows(2), rows(3))
    assert only(graph).writes == (0, 1)
    assert kinds(graph) == ["state", "state"]


def test_an_input_that_is_changed_is_state() -> None:
    graph = captured(lambda x, y: x.add_(y), rows(4), rows(4))
    assert kinds(graph) == ["state", "input"]
    assert graph.outputs[0].position == 0


def test_a_change_of_state_is_kept_though_nobody_returns_it() -> None:
    graph = captured(lambda x, y: (x[1:].copy_(y), y.neg())[1], rows(4), rows(3))
    assert ops(graph) == ["aten.copy_.default", "aten.neg.default"]


# --- dead code -------------------------------------------------------------------------------


def test_tasks_that_nobody_needs_are_left_out() -> None:
    graph = captured(lambda x: (x.exp(), x.neg().mul(2), x.sin())[2], rows(4))
    assert ops(graph) == ["aten.sin.default"]
    assert len(graph.buffers) == 2


def test_numbers_of_what_is_left_are_positions() -> None:
    graph = captured(lambda x: (x.exp(), x.neg().mul(2))[1], rows(4))
    assert [t.index for t in graph.tasks] == [0, 1]
    assert [b.id for b in graph.buffers] == [0, 1, 2]
    assert [t.id for t in graph.tensors] == list(range(len(graph.tensors)))


def test_a_change_in_place_of_something_dead_is_dead() -> None:
    graph = captured(lambda x: (x.exp().add_(1), x.neg())[1], rows(4))
    assert ops(graph) == ["aten.neg.default"]


def test_a_change_before_a_use_is_alive() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y[0].zero_()
        return y.sum()

    graph = captured(function, rows(4))
    assert len(graph.tasks) == 3


def test_inputs_stay_though_nobody_reads_them() -> None:
    graph = captured(lambda x, y: y.neg(), rows(4), rows(2))
    assert kinds(graph) == ["input", "input", "output"]
    assert [i.position for i in graph.inputs] == [0, 1]


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


def test_a_number_of_another_sort_is_refused_with_its_type() -> None:
    with pytest.raises(CaptureError, match="argument of type complex cannot be written down"):
        captured(lambda x: torch.add(x, 1j), rows(3))


def test_a_generator_is_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(CaptureError, match="argument of type Generator cannot be written down"):
        captured(lambda x: torch.bernoulli(x, generator=generator), rows(3).sigmoid())


def test_a_size_that_depends_on_data_is_refused() -> None:
    env = ShapeEnv()
    with pytest.raises(CaptureError, match="a size depends on data"):
        Recorder()._encode(env.create_unbacked_symint())


def test_a_tensor_that_nobody_made_is_refused() -> None:
    with FakeTensorMode():
        stranger = torch.ones(2)
    with pytest.raises(CaptureError, match="a tensor whose storage no op made"):
        Recorder().tensor_id(stranger)


# --- costs -----------------------------------------------------------------------------------


def test_flops_of_a_product_are_counted() -> None:
    graph = captured(lambda x, w: x @ w, rows(2, 3), rows(3, 4))
    assert only(graph).flops == 2 * 2 * 3 * 4


def test_moved_bytes_are_read_and_written_ones() -> None:
    assert only(captured(lambda x: x.exp(), rows(4, 6))).moved_bytes == 2 * 96


def test_a_lookup_moves_rows_and_not_the_table() -> None:
    ids = torch.tensor([1, 2])
    graph = captured(lambda t, i: F.embedding(i, t), rows(1000, 4), ids)
    assert only(graph).moved_bytes < 1000


def test_a_product_with_a_packed_weight_is_one_task() -> None:
    layer = packed_layer_of(nn.Linear(64, 24, bias=False), PackedForm(4, 32))
    given = (rows(2, 3, 64), layer.numbers, layer.scales, layer.minima)
    graph = captured(lambda x, n, s, m: packed_linear(x, n, s, m, None, 4, 32), *given)
    task = only(graph)
    assert task.flops == 2 * 6 * 64 * 24
    unpacked, packed = 24 * 64 * 4, 24 * (32 + 2 * 2 * 4)
    assert task.moved_bytes == 6 * (64 + 24) * 4 + packed + 4 * unpacked
    assert not wants_fused(task.args)


@pytest.mark.parametrize(("num_rows", "is_fused"), [(16, True), (17, False)])
def test_a_fused_product_moves_packed_bytes(num_rows: int, is_fused: bool) -> None:
    layer = packed_layer_of(nn.Linear(64, 24, bias=False), PackedForm(4, 32))
    given = (rows(num_rows, 64), layer.numbers, layer.scales, layer.minima)
    graph = captured(lambda x, n, s, m: packed_linear(x, n, s, m, None, 4, 32, True), *given)
    task = only(graph)
    unpacked, packed = 24 * 64 * 4, 24 * (32 + 2 * 2 * 4)
    moved_bytes = num_rows * (64 + 24) * 4 + packed
    assert task.moved_bytes == moved_bytes + (0 if is_fused else 4 * unpacked)
    assert wants_fused(task.args)


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
        (lambda x: F.layer_norm(x, (6,)) + F.gelu(x) * F.silu(x), [(4, 6)]),
        (lambda x: torch.cat([x.split(2, 1)[i].sum(1, keepdim=True) for i in (2, 0)], 1), [(4, 6)]),
        (lambda x: torch.stack(torch.topk(x, 3)[0].unbind(1)), [(4, 6)]),
        (lambda x: torch.sort(x, descending=True)[0][:, torch.topk(x, 2)[1][0]], [(4, 6)]),
        (lambda x: x.masked_fill(torch.ones(4, 6).tril().bool(), -1e9), [(4, 6)]),
        (lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 2), [(4, 6)]),
        (lambda x: x.new_full((2,), 3.0) + torch.arange(1, 3) + torch.linspace(0, 1, 2), [(1,)]),
        (lambda x: x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x, [(4, 6)]),
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
