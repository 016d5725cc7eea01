"""Binding: each way in which an op gets its results into place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ds_finepage.errors import TaskMismatchError
from ds_finepage.execution.ops import (
    BoundTask,
    Patch,
    bind,
    flat_results,
    out_overload,
    resolve_op,
    run_and_copy,
    run_on_host,
)
from ds_finepage.graph.taskgraph import JOIN, Ref, Symbol, Task

aten = torch.ops.aten


class Bench:
    """Tensors by id, and a task bound to them. Tensors in ``late`` come with the call."""

    def __init__(self, *tensors: torch.Tensor, late: Sequence[int] = ()) -> None:
        self.tensors = list(tensors)
        self.late = set(late)
        self.patches: list[Patch] = []

    def bind(
        self,
        op: str,
        args: tuple[Any, ...],
        results: tuple[int | None, ...],
        **kwargs: Any,
    ) -> BoundTask:
        task = Task(0, op, args=args, kwargs=tuple(kwargs.items()), results=results)
        return bind(
            task,
            lambda t: None if t in self.late else self.tensors[t],
            self.patches,
            into_place=True,
        )

    def run(self, bound: BoundTask) -> None:
        for patch in self.patches:
            patch.container[patch.key] = self.tensors[patch.tensor]
        bound.call(*bound.args, **bound.kwargs)
        for patch in self.patches:
            patch.container[patch.key] = None


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


# --- names -----------------------------------------------------------------------------------


def test_an_op_is_found_by_the_name_that_capture_wrote() -> None:
    assert resolve_op("aten.mm.default") is aten.mm.default
    assert resolve_op(str(aten.sum.dim_IntList)) is aten.sum.dim_IntList


@pytest.mark.parametrize(
    "name", ["aten.no_such_op.default", "aten.mm.no_such_overload", "no_such_library.mm.default"]
)
def test_an_unknown_op_is_refused_with_its_name_and_the_version(name: str) -> None:
    with pytest.raises(TaskMismatchError) as caught:
        resolve_op(name)
    assert str(caught.value) == (
        f"this torch {torch.__version__} has no op {name}; capture the model again"
    )


# --- finding out= overloads ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, "out"),
        (aten.pow.Tensor_Scalar, "Tensor_Scalar_out"),
        (aten.sum.dim_IntList, "IntList_out"),
        (aten.where.self, "self_out"),
        (aten.arange.start_step, "start_out"),
        (aten.topk.default, "values"),
        (aten.max.dim, "dim_max"),
        (aten.norm.ScalarOpt_dim, "out"),  # and not "dtype_out", which asks for a dtype
        (aten.norm.ScalarOpt_dim_dtype, "dtype_out"),
        (aten.norm.Scalar, "Scalar_out"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, None),
        (aten.split_with_sizes_copy.default, None),  # has one, but it takes a list
        (aten.arange.start, None),  # "start_out" wants a step
    ],
    ids=str,
)
def test_out_overloads_that_fit_are_found(op: Any, expected: str | None) -> None:
    assert getattr(out_overload(op), "_overloadname", None) == expected


# --- where results go ------------------------------------------------------------------------


@dataclass
class Case:
    """An op; the tensors that it is bound to, by id; what its results must be."""

    op: str
    args: tuple[Any, ...]
    given: list[torch.Tensor]
    made: list[torch.Tensor]  # they have the next ids
    expected: Callable[..., Any]  # of what is given
    call: Any = None  # what is called, as far as that counts
    options: dict[str, Any] = field(default_factory=dict)


SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"
X, Y = Ref(0), Ref(1)


def case(op: str, args: tuple[Any, ...], *others: Any, call: Any = None, **options: Any) -> Case:
    return Case(f"aten.{op}", args, *others, call=call, options=options)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def halves(*shape: int) -> torch.Tensor:
    return nan(*shape, dtype=torch.bfloat16)


BF16 = Symbol("dtype", "bfloat16")
CASES = [
    case("mm.default", (X, Y), [rand(3, 4), rand(4, 5)], [nan(3, 5)], torch.mm, call=aten.mm.out),
    case("mm.default", (X, Y), [rand(3, 4), rand(4, 5)], [nan(5, 3).t()], torch.mm),
    case("topk.default", (X, 2), [rand(6)], [nan(2), ints(0, 0)], lambda x: x.topk(2)),
    case("add.Tensor", (X, Y), [rand(3), rand(3)], [nan(3)], lambda x, y: x + 2 * y, alpha=2),
    case("cat.default", ((X, Y), 0), [rand(2), rand(3)], [nan(5)], lambda *x: torch.cat(x)),
    case("index.Tensor", (X, (None, Y)), [rand(4, 3), ints(2)], [nan(4, 1)], lambda x, i: x[:, i]),
    case("sum.dim_IntList", (X, (0,)), [ints(1, 2)], [halves()], torch.Tensor.sum, dtype=BF16),
    case("clone.default", (X,), [rand(2, 3)], [nan(2, 3)], torch.clone),
    case("lift_fresh.default", (X,), [rand(2, 3)], [nan(2, 3)], torch.clone),
    case("lift_fresh_copy.default", (X,), [rand(2, 3)], [nan(2, 3)], torch.clone),
    case("_to_copy.default", (X,), [rand(4)], [halves(4)], torch.Tensor.bfloat16, dtype=BF16),
    # Ops without an out= overload.
    case("arange.start", (2, 5), [], [ints(0, 0, 0)], lambda: ints(2, 3, 4), call=run_and_copy),
    case(
        SDPA.removeprefix("aten."),
        (X, X, X),
        [rand(1, 2, 4, 8)],
        [nan(1, 2, 4, 8), nan(1, 2, 4)],
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q),
        call=run_and_copy,
    ),
    case(
        "split_with_sizes_copy.default",
        (X, (2, 3)),
        [rand(5)],
        [nan(2), nan(3)],
        lambda x: x.split((2, 3)),
    ),
    case(  # it changes an argument and makes a tensor, which nobody else would put into place
        "rrelu_with_noise.default",
        (X, Y, 0.25, 0.25, True),
        [-rand(6), torch.zeros(6)],
        [nan(6)],
        lambda x, noise: x * noise.fill_(0.25),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_results_go_into_place(case: Case) -> None:
    bench = Bench(*case.given, *case.made)
    results = tuple(range(len(case.given), len(bench.tensors)))
    bound = bench.bind(case.op, case.args, results, **case.options)
    assert case.call in (None, bound.call)
    bench.run(bound)
    after = [t.clone() for t in case.given]
    wanted = flat_results(case.expected(*case.given))
    for made, expected in zip(case.made, wanted, strict=True):
        assert torch.equal(made, expected.to(made.dtype))
    assert all(map(torch.equal, case.given, after))  # also what the op has changed


def test_options_that_the_out_overload_does_not_take_are_left_out() -> None:
    """Dtype, layout and device of a factory are those of the tensor that it writes into."""
    out = nan(4)
    bench = Bench(out)
    bound = bench.bind(
        "aten.full.default",
        ((4,), 2.5),
        (0,),
        dtype=Symbol("dtype", "float32"),
        layout=Symbol("layout", "strided"),
        device=Symbol("device", "cpu"),
        pin_memory=False,
    )
    assert set(bound.kwargs) == {"out"}
    bench.run(bound)
    assert out.tolist() == [2.5] * 4


def test_options_that_the_out_overload_takes_are_kept() -> None:
    bound = Bench(ints(1, 2), halves()).bind("aten.sum.dim_IntList", (X, (0,)), (1,), dtype=BF16)
    assert bound.kwargs["dtype"] is torch.bfloat16


# --- symbols ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (Symbol("dtype", "bfloat16"), torch.bfloat16),
        (Symbol("layout", "strided"), torch.strided),
        (Symbol("memory_format", "contiguous_format"), torch.contiguous_format),
        (Symbol("device", "cpu"), torch.device("cpu")),
        (Symbol("device", "cuda:1"), torch.device("cuda", 1)),
    ],
    ids=str,
)
def test_symbols_are_decoded(symbol: Symbol, expected: Any) -> None:
    bench = Bench(rand(2))
    assert bench.bind("aten.mul_.Tensor", (Ref(0), symbol), (0,)).args[1] == expected


# --- ops that change their arguments ---------------------------------------------------------


def test_an_op_on_a_list_in_place_runs_as_it_is() -> None:
    x, y = torch.ones(2), torch.ones(3)
    bench = Bench(x, y)
    bench.run(bench.bind("aten._foreach_add_.Scalar", ((Ref(0), Ref(1)), 4), ()))
    assert x.tolist() == [5.0] * 2 and y.tolist() == [5.0] * 3


# --- fills, nothing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "value"),
    [
        ("aten.zeros.default", ((3,),), 0),
        ("aten.new_zeros.default", (Ref(1), (3,)), 0),
        ("aten.zeros_like.default", (Ref(1),), 0),
        ("aten.ones.default", ((3,),), 1),
        ("aten.empty.memory_format", ((3,),), 7),
        ("aten.new_empty.default", (Ref(1), (3,)), 7),
        ("aten.empty_like.default", (Ref(1),), 7),
        ("aten.empty_strided.default", ((3,), (1,)), 7),
    ],
)
def test_a_fill_fills_in_place_and_an_empty_tensor_costs_nothing(
    op: str, args: tuple[Any, ...], value: int
) -> None:
    out = torch.full((3,), 7.0)
    bench = Bench(out, rand(3))
    bench.run(bench.bind(op, args, (0,), dtype=Symbol("dtype", "float32")))
    assert out.tolist() == [value] * 3


def test_a_join_does_nothing() -> None:
    bound = Bench().bind(JOIN, (), ())
    assert bound.call(*bound.args, **bound.kwargs) is None


# --- copied results --------------------------------------------------------------------------


def test_results_that_capture_did_not_want_are_left_out() -> None:
    calls: list[Any] = []

    def op(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        calls.append((args, kwargs))
        return torch.ones(2), 17, None

    out = nan(2)
    run_and_copy(op, [1], {"a": 2}, [out, None, None])
    assert out.tolist() == [1.0, 1.0] and calls == [((1,), {"a": 2})]


def test_another_number_of_results_than_captured_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        run_and_copy(lambda: (torch.ones(1), torch.ones(1)), [], {}, [nan(1)])


# --- tensors that each call brings -----------------------------------------------------------


def attended(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)[0]


@pytest.mark.parametrize("late", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("op", "args", "keywords", "expected"),
    [
        ("aten.maximum.default", (Ref(0), Ref(1)), {}, torch.maximum),
        ("aten.cat.default", ((Ref(0), Ref(1)), 0), {}, lambda x, y: torch.cat([x, y])),
        # It moves to the arguments of the ``out=`` overload, and its patch with it.
        ("aten.add.Tensor", (Ref(0),), {"other": Ref(1)}, torch.add),
        (SDPA, (Ref(0), Ref(0), Ref(0)), {"attn_mask": Ref(1)}, attended),
        ("aten.clone.default", (Ref(0),), {}, lambda x, y: x.clone()),
        ("aten.zeros_like.default", (Ref(0),), {}, lambda x, y: torch.zeros_like(x)),
    ],
    ids=["operands", "lists", "keywords", "copied", "copies", "fills"],
)
def test_tensors_may_come_with_the_call(
    late: tuple[int, ...],
    op: str,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    expected: Callable[..., torch.Tensor],
) -> None:
    """Run with the tensors as they are, then with others in the places of the late ones."""
    shape = (1, 1, 4, 4)
    bench = Bench(rand(*shape), rand(*shape), late=late)
    bench.tensors.append(expected(*bench.tensors).fill_(0))
    bound = bench.bind(op, args, (2, None) if op == SDPA else (2,), **keywords)
    for _ in range(2):
        bench.run(bound)
        assert torch.equal(bench.tensors[2], expected(*bench.tensors[:2]))
        for i in bench.late:
            bench.tensors[i] = torch.randn_like(bench.tensors[i])


def test_each_of_several_results_may_come_with_the_call() -> None:
    bench = Bench(rand(6), nan(2), torch.zeros(2, dtype=torch.int64), late=(1,))
    bench.run(bench.bind("aten.topk.default", (Ref(0), 2), (1, 2)))
    assert torch.equal(bench.tensors[1], bench.tensors[0].topk(2).values)


def test_what_an_in_place_op_changes_may_come_with_the_call() -> None:
    bench = Bench(torch.zeros(3), late=(0,))
    bound = bench.bind("aten.add_.Tensor", (Ref(0), 1), (0,))
    assert bound.call is aten.add_.Tensor
    for _ in range(2):
        bench.run(bound)
    assert bench.tensors[0].tolist() == [2.0] * 3


def test_patches_of_other_tasks_are_left_alone() -> None:
    bench = Bench(rand(3), rand(3), nan(3), nan(3), late=(1,))
    first = bench.bind("aten.add.Tensor", (Ref(0),), (2,), other=Ref(1))
    second = bench.bind("aten.mul.Tensor", (Ref(0),), (3,), other=Ref(1))
    assert [p.container is b.kwargs for p, b in zip(bench.patches, (first, second), strict=True)]
    bench.run(first)
    for patch in bench.patches:
        patch.container[patch.key] = bench.tensors[1]
    second.call(*second.args, **second.kwargs)
    assert torch.equal(bench.tensors[3], bench.tensors[0] * bench.tensors[1])


@pytest.mark.parametrize("comes_late", (False, True))
def test_a_result_that_nobody_reads_is_not_copied(comes_late: bool) -> None:
    """Its bytes may be those of a neighbour by then, or lie in another memory."""
    q, out, sums = rand(1, 2, 4, 8), nan(1, 2, 4, 8), nan(1, 2, 4)
    bench = Bench(q, out, sums, late=(1, 2) if comes_late else ())
    task = Task(0, SDPA, args=(Ref(0), Ref(0), Ref(0)), results=(1, 2))
    bound = bind(
        task,
        lambda t: None if t in bench.late else bench.tensors[t],
        bench.patches,
        unused=frozenset({2}),
        into_place=False,
    )
    assert [p.tensor for p in bench.patches] == ([1] if comes_late else [])
    bench.run(bound)
    expected, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert torch.equal(out, expected)
    assert sums.isnan().all()


def test_a_task_of_the_host_gets_its_arguments_there() -> None:
    out, given = torch.zeros(2, 2), torch.ones(2, 2)
    run_on_host(aten.mm.default, [given, given], {}, [out])
    assert out.tolist() == [[2, 2], [2, 2]]
    bench = Bench(given, given, out)
    task = Task(0, "aten.mm.default", args=(Ref(0), Ref(1)), results=(2,))
    bound = bind(task, bench.tensors.__getitem__, [], into_place=True, is_host=True)
    assert bound.call is run_on_host and bound.waits


def test_an_op_that_no_cpu_has_is_named() -> None:
    def op(*_: Any) -> Any:
        raise NotImplementedError("no kernel for Half")

    with pytest.raises(TaskMismatchError, match="this host cannot compute .* no kernel for Half"):
        run_on_host(op, [torch.ones(1)], {}, [torch.ones(1)])
