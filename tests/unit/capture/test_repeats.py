"""Nodes that are alike are recorded once, and the taskgraph is the same as if each had been run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import wrap

from ds_finepage.capture.dynamo_graph import SHARES_MEMORY, DynamoGraph
from ds_finepage.capture.recorder import Recorder
from ds_finepage.capture.recording import record, record_range
from ds_finepage.capture.repeats import Repeats
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from tests.unit.capture.replay import by_dynamo, captured, replay, traced

F = nn.functional
Count = Callable[[], int]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the label of each node that is not run."""
    found: list[str] = []
    repeat = Repeats._repeat

    def noting(repeats: Repeats, *given: Any) -> Any:
        found.append(repeats._recorder.label)
        return repeat(repeats, *given)

    monkeypatch.setattr(Repeats, "_repeat", noting)
    return found


def run_each(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], TaskGraph | None]
) -> TaskGraph | None:
    """Record without templates."""

    def learn(repeats: Repeats, key: Any, given: Any, call: Any, args: Any, kwargs: Any) -> Any:
        return repeats._run(call, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "_learn", learn)
        return make()


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def weight(*shape: int, requires_grad: bool = False) -> nn.Parameter:
    return nn.Parameter(rows(*shape), requires_grad=requires_grad)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Do what a layer does: a norm, a product, a residual."""
    normed = F.layer_norm(x, (8,))
    return x + F.gelu(F.linear(normed, w)).view(2, 4, 2).transpose(1, 2).reshape(2, 8)


def four_layers(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    return layer(layer(layer(layer(x, a), b), c), d)


def test_layers_are_recorded_once(repeated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched: list[Any] = []
    dispatch = Recorder.__torch_dispatch__

    def noting(recorder: Recorder, func: Any, *given: Any) -> Any:
        dispatched.append(func)
        return dispatch(recorder, func, *given)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", noting)
    args = (rows(2, 8), *(weight(8, 8) for _ in range(4)))
    names = {1: "a", 2: "b", 3: "c", 4: "d"}

    def make() -> TaskGraph:
        return captured(four_layers, *args, weights=names)

    found = make()
    num_dispatched = len(dispatched)
    assert len(repeated) >= 3 * 6
    assert found == run_each(monkeypatch, make)
    assert num_dispatched <= (len(dispatched) - num_dispatched) / 2
    assert torch.equal(replay(found, args)[0], four_layers(*args))


def split(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Use what stands for a tuple."""
    a, b = torch.split(x, 1)[:2]
    c, d = torch.split(y, 1)[:2]
    return a.exp(), b, c.exp(), d


def in_place(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x + 1, y + 1
    a.add_(2)
    b.add_(2)
    x.mul_(3)
    y.mul_(3)
    return a, b, x.sin(), y.sin()


def written_in_its_own_node(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = torch.full_like(x, 2.0), torch.full_like(y, 2.0)
    return a + x, b + y


def as_they_are(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return arguments, from functions that have nothing to do."""
    return x.contiguous(), y.contiguous(), x.contiguous().exp(), y.contiguous().exp()


def unmade_ones_are_read(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.exp().t()[1:], y.exp().t()[1:]
    return a.cos(), b.sin(), b.tan()


def unmade_ones_are_changed(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.exp(), y.exp()
    b[0].fill_(1.0)
    return a, b.view(torch.int32).view(torch.float32), b


def turned_in_place(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.exp(), y.exp()
    a.t_()
    b.t_()
    a.unsqueeze_(0)
    b.unsqueeze_(0)
    return a.cos(), b.cos(), b.sin()


def an_alias_is_turned(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.view(3, 4), y.view(3, 4)
    b.t_()
    return a.cos(), b.cos(), y.sin()


def seen_in_another_dtype(x: torch.Tensor, y: torch.Tensor) -> Any:
    """The second look at x finds its bytes known as integers; those of y are not."""
    return x.view(torch.int32) + 1, x.view(torch.int32) + 2, y.view(torch.int32).abs()


def with_two_results(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = torch.max(x, 1), torch.max(y, 1)
    return a[0], b[0], b[1]


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (split, 2),
        (in_place, 4),
        (written_in_its_own_node, 2),
        (as_they_are, 2),
        (unmade_ones_are_read, 3),
        (unmade_ones_are_changed, 1),
        (turned_in_place, 2),
        (seen_in_another_dtype, 0),
        (an_alias_is_turned, 1),
        (with_two_results, 1),
    ],
)
def test_the_taskgraph_is_that_of_running_each_node(
    function: Callable[..., Any],
    least: int,
    repeated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = rows(3, 4), rows(3, 4) + 1
    found = captured(function, *args)
    assert len(repeated) >= least
    assert found == run_each(monkeypatch, lambda: captured(function, *args))
    again = [arg.clone() for arg in args]
    assert all(
        map(torch.equal, replay(found, tuple(arg.clone() for arg in args)), function(*again))
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x + 0.0, x + -0.0),
        lambda x, y: (x * 1, x * True),
        lambda x, y: (x * 1, x * 1.0),
        lambda x, y: (x + y, x + x),
        lambda x, y: (torch.addcmul(x, y, x), torch.addcmul(x, y, y)),
        lambda x, y: (x.exp(), x.t().exp()),
        lambda x, y: (x[0:1] + 1, x[1:2] + 1),
        lambda x, y: (x.to(torch.float64), x.to(torch.float16)),
        lambda x, y: (x.exp(), x.double().exp()),
        lambda x, y: (x.sum(0), x.sum(dim=1)),
        lambda x, y: (torch.sub(x, y, alpha=2), torch.sub(x, y, alpha=3)),
        lambda x, y: (x.flatten()[:6].exp(), x.flatten()[6:].exp()),
        lambda x, y: (x[:, 1:], x[:, 2:], x[:, None], x[..., 1]),
    ],
)
def test_nodes_that_differ_are_not_alike(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rows(3, 3), rows(3, 3) + 1
    found = captured(function, *args)
    expected = run_each(monkeypatch, lambda: captured(function, *args))
    assert repr(found) == repr(expected)  # 1, 1.0 and True are equal
    assert all(map(torch.equal, replay(found, args), function(*args)))


def test_a_weight_that_asks_for_gradients_is_like_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product with it is folded to two dimensions."""
    args = rows(3, 2, 8).transpose(0, 1), weight(8, 8), weight(8, 8, requires_grad=True)

    def make() -> TaskGraph:
        graph = traced(lambda x, a, b: (x @ a, x @ b), *args, weights={1: "a", 2: "b"})
        return record(graph, args)

    found = make()
    assert found == run_each(monkeypatch, make)
    assert {t.op for t in found.tasks} >= {"aten.mm.default", "aten.bmm.default"}


def test_buffers_of_other_kinds_are_not_alike(
    repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rows(8, 8), weight(8, 8)

    def make() -> TaskGraph:
        return captured(lambda x, w: (x.t(), w.t() + x.t()), *args, weights={1: "w"})

    found = make()
    assert len(repeated) == 1  # the second look at x
    assert found == run_each(monkeypatch, make)


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> Any:
    before = x @ w
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = x @ w
    return before, within, x @ w


def test_templates_end_where_the_state_of_torch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ((graph, args),) = by_dynamo(under_autocast, (rows(4, 8), rows(8, 8)))
    found = record(graph, args)
    assert found == run_each(monkeypatch, lambda: record(graph, args))
    dtypes = [found.tensors[o.tensor].dtype for o in found.outputs if o.tensor is not None]
    assert dtypes == ["float32", "bfloat16", "float32"]


calls: list[int] = []


@wrap
def alternating(x: torch.Tensor) -> torch.Tensor:
    """Do something else in each call."""
    calls.append(0)
    return x.sin() if len(calls) % 2 else x.cos()


def test_functions_of_others_run_each_time() -> None:
    found = captured(lambda x: (alternating(x), alternating(x)), rows(3))
    assert [t.op for t in found.tasks] == ["aten.sin.default", "aten.cos.default"]


def test_constants_are_lifted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(4.0)

    def function(x: torch.Tensor) -> Any:
        first, second = (x.new_tensor([1.0, 2.0, 3.0, 4.0]) for _ in range(2))
        return x + table, x + table, x + first, x + second

    (((graph, args)),) = by_dynamo(function, (rows(4),))
    found = record(graph, args)
    assert found == run_each(monkeypatch, lambda: record(graph, args))


def test_arguments_in_blocks_come_back_as_themselves(
    repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = rows(4, 3), rows(4, 3)

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        return a.contiguous(), b.contiguous(), c.contiguous(), d.contiguous()

    halves = tuple(half for block in blocks for half in block.split(2))
    for half in halves:
        setattr(half, SHARES_MEMORY, True)
    graph = traced(function, *halves)
    found = record(graph, halves)
    assert len(repeated) == 2
    assert [output.position for output in found.outputs] == [0, 1, 2, 3]
    assert found == run_each(monkeypatch, lambda: record(graph, halves))


def test_results_that_are_parts_of_one_buffer_are_made_each_time(
    repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fake tensor like one of them would be as large as the buffer."""
    with torch.library._scoped_library("ds_finepage_test", "DEF") as library:
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: tuple(x.exp().chunk(2)), "CompositeImplicitAutograd")
        halves = torch.ops.ds_finepage_test.halves.default

        def function(x: torch.Tensor, y: torch.Tensor) -> Any:
            a, b = halves(x)[:2], halves(y)[:2]
            return a[1].sin(), b[1].cos()

        args = rows(4, 3), rows(4, 3) + 1
        found = captured(function, *args)
        assert not repeated
        assert found == run_each(monkeypatch, lambda: captured(function, *args))
        assert all(map(torch.equal, replay(found, args), function(*args)))


def test_a_range_of_sizes_has_the_guards_of_running_each_node(
    repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = x + torch.cat([x, F.linear(x, w)])[x.shape[0] :].view(-1, 2, 4).flatten(1)
        return x

    weights = [weight(8, 8) for _ in range(3)]
    runs = by_dynamo(function, *((rows(n, 8), *weights) for n in (5, 9)), dynamic=True)
    graph, args = runs[0]

    def make() -> tuple[TaskGraph, list[str]]:
        found = record_range(graph, args)
        assert found is not None
        graphs = found.at({name: 12 for name in found.sizes.positions})
        return graphs, [str(guard.expr) for guard in found.sizes.env.guards]

    made = make()
    assert len(repeated) >= 6
    assert made == run_each(monkeypatch, make)  # type: ignore[arg-type]


def unmade_buffers(graph: DynamoGraph, args: Sequence[Any]) -> int:
    recorders: list[Recorder] = []
    with pytest.MonkeyPatch.context() as patch:
        keep = Repeats.__init__

        def init(repeats: Repeats, recorder: Recorder, mode: Any) -> None:
            recorders.append(recorder)
            keep(repeats, recorder, mode)

        patch.setattr(Repeats, "__init__", init)
        record(graph, args)
    return sum(b.storage is None for b in recorders[0].buffers)


def test_results_that_no_new_node_reads_are_not_made() -> None:
    x = rows(3, 4)
    graph = traced(lambda x: x.exp().exp().exp().exp().exp().sin(), x)
    assert unmade_buffers(graph, (x,)) == 2  # the third is read by a node that is new


def test_what_is_repeated_has_the_label_of_its_own_module(repeated: list[str]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    ((graph, args),) = by_dynamo(model, (rows(2, 8),))
    found = record(graph, args)
    assert repeated == ["1.1", "2.0", "2.1"]  # the first layer reads what the caller owns
    labels = [t.label for t in found.tasks]
    assert sorted(set(labels)) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert sum(b.kind is BufferKind.WEIGHT for b in found.buffers) == 6
