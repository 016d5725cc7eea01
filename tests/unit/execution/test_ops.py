"""Binding: each way in which an op gets its results into place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ds_finepage.errors import TaskMismatchError
from ds_finepage.execution.ops import BoundTask, Patch, bind, out_overload, resolve_op, run_and_copy
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


def test_binding_an_unknown_op_is_refused() -> None:
    with pytest.raises(TaskMismatchError, match=r"aten\.no_such_op\.default"):
        Bench().bind("aten.no_such_op.default", (), ())


# --- finding out= overloads ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, "out"),
        (aten.addmm.default, "out"),
        (aten.bmm.default, "out"),
        (aten.add.Tensor, "out"),
        (aten.mul.Tensor, "out"),
        (aten.pow.Tensor_Scalar, "Tensor_Scalar_out"),
        (aten.mean.dim, "out"),
        (aten.sum.dim_IntList, "IntList_out"),
        (aten._softmax.default, "out"),
        (aten.native_layer_norm.default, "out"),
        (aten.embedding.default, "out"),
        (aten.cat.default, "out"),
        (aten.silu.default, "out"),
        (aten.gelu.default, "out"),
        (aten.where.self, "self_out"),
        (aten.index.Tensor, "Tensor_out"),
        (aten.rsqrt.default, "out"),
        (aten.full.default, "out"),
        (aten.arange.start_step, "start_out"),
        (aten.topk.default, "values"),
        (aten.sort.default, "values"),
        (aten.max.dim, "dim_max"),
        (aten.norm.ScalarOpt_dim, "out"),  # and not "dtype_out", which asks for a dtype
        (aten.norm.ScalarOpt_dim_dtype, "dtype_out"),
        (aten.norm.Scalar, "Scalar_out"),
    ],
    ids=str,
)
def test_common_ops_have_an_out_overload(op: Any, expected: str) -> None:
    found = out_overload(op)
    assert found is not None and found._overloadname == expected


@pytest.mark.parametrize(
    "op",
    [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.split_with_sizes_copy.default,  # has one, but it takes a list
        aten.arange.start,  # "start_out" wants a step
    ],
    ids=str,
)
def test_ops_without_a_fitting_out_overload_are_told_apart(op: Any) -> None:
    assert out_overload(op) is None


# --- results that go straight into place -----------------------------------------------------


def test_an_out_overload_writes_into_place() -> None:
    x, y, out = rand(3, 4), rand(4, 5), nan(3, 5)
    bench = Bench(x, y, out)
    bound = bench.bind("aten.mm.default", (Ref(0), Ref(1)), (2,))
    assert bound.call is aten.mm.out and bound.kwargs["out"] is out
    bench.run(bound)
    assert torch.equal(out, x @ y)


def test_each_of_several_results_goes_into_place() -> None:
    x, values, indices = rand(6), nan(2), torch.zeros(2, dtype=torch.int64)
    bench = Bench(x, values, indices)
    bound = bench.bind("aten.topk.default", (Ref(0), 2), (1, 2))
    assert bound.call is aten.topk.values
    bench.run(bound)
    expected = x.topk(2)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


def test_a_result_may_be_a_strided_view() -> None:
    base = torch.zeros(5, 3)
    x, y = rand(3, 4), rand(4, 5)
    bench = Bench(x, y, base.t())
    bench.run(bench.bind("aten.mm.default", (Ref(0), Ref(1)), (2,)))
    assert torch.equal(base.t(), x @ y)


def test_keyword_arguments_are_handed_on() -> None:
    x, y, out = rand(3), rand(3), nan(3)
    bench = Bench(x, y, out)
    bench.run(bench.bind("aten.add.Tensor", (Ref(0), Ref(1)), (2,), alpha=2))
    assert torch.equal(out, x + 2 * y)


def test_lists_of_tensors_are_decoded() -> None:
    x, y, out = rand(2, 2), rand(3, 2), nan(5, 2)
    bench = Bench(x, y, out)
    bench.run(bench.bind("aten.cat.default", ((Ref(0), Ref(1)), 0), (2,)))
    assert torch.equal(out, torch.cat([x, y]))


def test_lists_with_gaps_are_decoded() -> None:
    x, rows, out = rand(4, 3), torch.tensor([2, 0]), nan(4, 2)
    bench = Bench(x, rows, out)
    bench.run(bench.bind("aten.index.Tensor", (Ref(0), (None, Ref(1))), (2,)))
    assert torch.equal(out, x[:, rows])


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
    x, out = torch.tensor([[1, 2], [3, 4]]), nan(2, dtype=torch.float64)
    bench = Bench(x, out)
    bound = bench.bind(
        "aten.sum.dim_IntList", (Ref(0), (1,)), (1,), dtype=Symbol("dtype", "float64")
    )
    assert bound.kwargs["dtype"] is torch.float64
    bench.run(bound)
    assert out.tolist() == [3.0, 7.0]


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


def test_an_in_place_op_runs_as_it_is() -> None:
    x, y = rand(3), rand(3)
    expected = x + y
    bench = Bench(x, y)
    bound = bench.bind("aten.add_.Tensor", (Ref(0), Ref(1)), (0,))
    assert bound.call is aten.add_.Tensor
    bench.run(bound)
    assert torch.equal(x, expected)


def test_an_op_on_a_list_in_place_runs_as_it_is() -> None:
    x, y = torch.ones(2), torch.ones(3)
    bench = Bench(x, y)
    bench.run(bench.bind("aten._foreach_add_.Scalar", ((Ref(0), Ref(1)), 4), ()))
    assert x.tolist() == [5.0] * 2 and y.tolist() == [5.0] * 3


def test_an_op_that_changes_an_argument_and_makes_tensors_does_both() -> None:
    """Its results are copied into place, as there is nobody else to put them there."""
    x, noise, out = -rand(6), torch.zeros(6), nan(6)
    bench = Bench(x, noise, out)
    args = (Ref(0), Ref(1), 0.25, 0.25, True)
    bench.run(bench.bind("aten.rrelu_with_noise.default", args, (2,)))
    assert torch.equal(out, x * 0.25)
    assert noise.tolist() == [0.25] * 6


# --- copies, fills, nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["aten.clone.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default"]
)
def test_a_copy_is_one_copy_into_place(op: str) -> None:
    x, out = rand(2, 3), nan(2, 3)
    bench = Bench(x, out)
    bench.run(bench.bind(op, (Ref(0),), (1,)))
    assert torch.equal(out, x)


def test_a_copy_may_change_the_dtype() -> None:
    x, out = rand(4), nan(4, dtype=torch.bfloat16)
    bench = Bench(x, out)
    bench.run(
        bench.bind("aten._to_copy.default", (Ref(0),), (1,), dtype=Symbol("dtype", "bfloat16"))
    )
    assert torch.equal(out, x.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("op", "args", "value"),
    [
        ("aten.zeros.default", ((3,),), 0),
        ("aten.new_zeros.default", (Ref(1), (3,)), 0),
        ("aten.zeros_like.default", (Ref(1),), 0),
        ("aten.ones.default", ((3,),), 1),
    ],
)
def test_a_fill_fills_in_place(op: str, args: tuple[Any, ...], value: int) -> None:
    out = nan(3)
    bench = Bench(out, rand(3))
    bench.run(bench.bind(op, args, (0,), dtype=Symbol("dtype", "float32")))
    assert out.tolist() == [value] * 3


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.empty.memory_format", ((3,),)),
        ("aten.new_empty.default", (Ref(1), (3,))),
        ("aten.empty_like.default", (Ref(1),)),
        ("aten.empty_strided.default", ((3,), (1,))),
    ],
)
def test_an_empty_tensor_costs_nothing(op: str, args: tuple[Any, ...]) -> None:
    out = torch.full((3,), 7.0)
    bench = Bench(out, rand(3))
    bench.run(bench.bind(op, args, (0,)))
    assert out.tolist() == [7.0] * 3


def test_a_join_does_nothing() -> None:
    bound = Bench().bind(JOIN, (), ())
    assert bound.call(*bound.args, **bound.kwargs) is None


# --- ops without an out= overload ------------------------------------------------------------


def test_a_result_is_copied_where_there_is_no_out_overload() -> None:
    out = torch.zeros(3, dtype=torch.int64)
    bench = Bench(out)
    bound = bench.bind("aten.arange.start", (2, 5), (0,))
    assert bound.call is run_and_copy
    bench.run(bound)
    assert out.tolist() == [2, 3, 4]


def test_each_of_several_results_is_copied() -> None:
    q, out, sums = rand(1, 2, 4, 8), nan(1, 2, 4, 8), nan(1, 2, 4)
    bench = Bench(q, out, sums)
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    bound = bench.bind(op, (Ref(0), Ref(0), Ref(0)), (1, 2))
    assert bound.call is run_and_copy
    bench.run(bound)
    expected = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert torch.equal(out, expected[0]) and torch.equal(sums, expected[1])


def test_a_list_of_results_is_copied() -> None:
    x, first, second = rand(5), nan(2), nan(3)
    bench = Bench(x, first, second)
    bench.run(bench.bind("aten.split_with_sizes_copy.default", (Ref(0), (2, 3)), (1, 2)))
    assert torch.equal(torch.cat([first, second]), x)


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


def both_times(bench: Bench, bound: BoundTask, check: Callable[[], None]) -> None:
    """Run with the tensors as they are, then with others in the places of the late ones."""
    for _ in range(2):
        bench.run(bound)
        check()
        for i in bench.late:
            bench.tensors[i] = torch.randn_like(bench.tensors[i])


@pytest.mark.parametrize("late", [(0,), (1,), (2,), (0, 1, 2)])
def test_operands_and_results_may_come_with_the_call(late: tuple[int, ...]) -> None:
    bench = Bench(rand(3, 4), rand(4, 5), nan(3, 5), late=late)
    bound = bench.bind("aten.mm.default", (Ref(0), Ref(1)), (2,))
    assert len(bench.patches) == len(late)

    def check() -> None:
        assert torch.equal(bench.tensors[2], bench.tensors[0] @ bench.tensors[1])

    both_times(bench, bound, check)


def test_members_of_lists_may_come_with_the_call() -> None:
    bench = Bench(rand(2, 2), rand(3, 2), nan(5, 2), late=(1,))
    bound = bench.bind("aten.cat.default", ((Ref(0), Ref(1)), 0), (2,))

    def check() -> None:
        assert torch.equal(bench.tensors[2], torch.cat(bench.tensors[:2]))

    both_times(bench, bound, check)


def test_keyword_arguments_may_come_with_the_call() -> None:
    """They move to the arguments of the ``out=`` overload, and their patches with them."""
    bench = Bench(rand(3), rand(3), nan(3), late=(1,))
    bound = bench.bind("aten.add.Tensor", (Ref(0),), (2,), other=Ref(1))

    def check() -> None:
        assert torch.equal(bench.tensors[2], bench.tensors[0] + bench.tensors[1])

    both_times(bench, bound, check)


def test_keyword_arguments_of_a_copied_op_may_come_with_the_call() -> None:
    q = rand(1, 1, 4, 8)
    bench = Bench(q, rand(4, 4), nan(1, 1, 4, 8), late=(1,))
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    bound = bench.bind(op, (Ref(0), Ref(0), Ref(0)), (2, None), attn_mask=Ref(1))

    def check() -> None:
        expected = aten._scaled_dot_product_flash_attention_for_cpu(
            q, q, q, attn_mask=bench.tensors[1]
        )
        assert torch.equal(bench.tensors[2], expected[0])

    both_times(bench, bound, check)


def test_each_of_several_results_may_come_with_the_call() -> None:
    bench = Bench(rand(6), nan(2), torch.zeros(2, dtype=torch.int64), late=(1,))
    bench.run(bench.bind("aten.topk.default", (Ref(0), 2), (1, 2)))
    assert torch.equal(bench.tensors[1], bench.tensors[0].topk(2).values)


@pytest.mark.parametrize(
    ("op", "args"), [("aten.clone.default", (Ref(0),)), ("aten.zeros_like.default", (Ref(0),))]
)
def test_the_result_of_a_copy_or_a_fill_may_come_with_the_call(
    op: str, args: tuple[Any, ...]
) -> None:
    bench = Bench(rand(3), nan(3), late=(0, 1))
    bench.run(bench.bind(op, args, (1,)))
    assert not bench.tensors[1].isnan().any()


def test_what_an_in_place_op_changes_may_come_with_the_call() -> None:
    bench = Bench(torch.zeros(3), late=(0,))
    bound = bench.bind("aten.add_.Tensor", (Ref(0), 1), (0,))
    for _ in range(2):
        bench.run(bound)
    assert bench.tensors[0].tolist() == [2.0] * 3


def test_nothing_of_a_call_is_kept_after_it() -> None:
    bench = Bench(rand(2, 2), rand(3, 2), nan(5, 2), late=(0, 1, 2))
    bound = bench.bind("aten.cat.default", ((Ref(0), Ref(1)), 0), (2,))
    bench.run(bound)
    assert bound.args[0] == [None, None] and bound.kwargs == {"out": None}


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
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    task = Task(0, op, args=(Ref(0), Ref(0), Ref(0)), results=(1, 2))
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
