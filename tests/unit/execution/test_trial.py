"""Which ops may write into the arena, as found out by running them on a small one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ds_finepage.errors import CaptureError, TaskMismatchError
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.ops import run_and_copy
from ds_finepage.execution.trial import Trial, reach
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.liveness import ample_arena_bytes
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, Draft
from tests.unit.execution.rig import Rig

CPU = torch.device("cpu")
N = 24
NBYTES = 4 * N

# Ops that do what no schema tells; each is a sum with one.


def resizes(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Use the result as a larger scratch tensor, as binary_cross_entropy does."""
    out.resize_(4 * N)
    out.fill_(7)
    out.resize_(N)
    return out.copy_(x + 1)


def keeps_another_shape(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x + 1)
    return out.resize_(N // 2)


def writes_behind(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.as_strided((N + 1,), (1,)).fill_(7)
    return out.copy_(x + 1)


def writes_before(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.as_strided((N,), (1,), out.storage_offset() - 1).fill_(7)
    return out.copy_(x + 1)


def gives_another_value(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x + 2)


def changes_its_argument(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x + 1)
    x.zero_()
    return out


def minds_one_storage(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    is_same = x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    return out.copy_(x + (2 if is_same else 1))


def raises(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not into that")


UNSAFE = [
    resizes,
    keeps_another_shape,
    writes_behind,
    writes_before,
    gives_another_value,
    changes_its_argument,
    minds_one_storage,
    raises,
]


def writes_into_place(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1, out=out)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def changes_what_it_reads(x: torch.Tensor) -> torch.Tensor:
    found = x + 1
    x.zero_()
    return found


def counts_from_the_storage(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((N,), (1,), 0) + 1


def gives_half(x: torch.Tensor) -> torch.Tensor:
    return x[: N // 2] + 1


def gives_doubles(x: torch.Tensor) -> torch.Tensor:
    return x.double() + 1


class Restless:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + self.num_calls


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("finepage_test", "DEF") as made:
        for function in (*UNSAFE, writes_into_place):
            name = function.__name__
            made.define(f"{name}(Tensor x) -> Tensor")
            made.define(f"{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
            made.impl(name, plus_one, "CPU")
            made.impl(f"{name}.out", function, "CPU")
        for alone in ALONE:
            made.define(f"{alone.__name__}(Tensor x) -> Tensor")
            made.impl(alone.__name__, alone, "CPU")
        made.define("restless(Tensor x) -> Tensor")
        made.impl("restless", Restless(), "CPU")
        made.define("shrinks_(Tensor(a!) x) -> Tensor(a!)")
        made.impl("shrinks_", lambda x: x.resize_(N // 2), "CPU")
        yield


ALONE = [changes_what_it_reads, counts_from_the_storage, gives_half, gives_doubles]


def one_op(name: str, num_args: int = 1, dtype: str = "float32") -> TaskGraph:
    """Make a graph of one op; one of this module has no dot in its name."""
    draft = Draft()
    xs = [draft.tensor(INPUT, N, dtype=dtype) for _ in range(num_args)]
    y = draft.tensor(ACTIVATION, N, dtype=dtype)
    draft.task(name if "." in name else f"finepage_test.{name}.default", *xs, out=(y,))
    return draft.graph()


def by_name(value: Any) -> str:
    return getattr(value, "__name__", "")


# --- the form of an op ------------------------------------------------------------------------


def test_an_op_that_writes_its_results_alone_may_write_into_place() -> None:
    meter, graph = OpMeter(CPU), one_op("writes_into_place")
    (task,) = meter.with_costs(graph).tasks
    assert meter.in_place(graph) == {0}
    assert task.workspace_bytes < NBYTES and task.time_ns is not None


@pytest.mark.parametrize("function", UNSAFE, ids=by_name)
def test_results_of_an_op_that_does_more_are_copied(function: Callable[..., Any]) -> None:
    meter, graph = OpMeter(CPU), one_op(function.__name__)
    (task,) = meter.with_costs(graph).tasks
    assert meter.in_place(graph) == frozenset()
    # The very form that will run was measured.
    assert task.workspace_bytes >= NBYTES and task.time_ns is not None


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (changes_what_it_reads, "changes what it only reads"),
        (counts_from_the_storage, "gives other results in the arena than by itself"),
        (gives_half, "returns something else than it did when it was captured"),
        (gives_doubles, "returns something else than it did when it was captured"),
    ],
    ids=by_name,
)
def test_an_op_that_has_no_safe_form_is_refused(function: Callable[..., Any], what: str) -> None:
    meter, graph = OpMeter(CPU), one_op(function.__name__)
    for _ in range(2):  # the second time it is known
        with pytest.raises(CaptureError) as caught:
            meter.with_costs(graph)
        name = f"finepage_test.{function.__name__}.default"
        assert str(caught.value) == f"task 0 {name} (layer0) {what}, so it cannot be planned"
    assert meter.in_place(graph) == frozenset()


def test_an_op_in_place_that_resizes_is_refused() -> None:
    draft = Draft()
    x = draft.tensor(ACTIVATION, N)
    draft.task("finepage_test.shrinks_.default", x, out=(x,), changes=(x,))
    with pytest.raises(CaptureError, match="resizes a tensor that it is given"):
        OpMeter(CPU).with_costs(draft.graph())


@pytest.mark.parametrize("name", ["restless", "aten.bernoulli.default"])
def test_results_of_an_op_that_never_gives_the_same_are_copied(name: str) -> None:
    meter, graph = OpMeter(CPU), one_op(name)
    (task,) = meter.with_costs(graph).tasks
    assert meter.in_place(graph) == frozenset() and task.workspace_bytes >= NBYTES


def test_without_room_for_scratch_results_are_copied() -> None:
    meter, graph = OpMeter(CPU), one_op("writes_into_place")
    room_bytes = sum(reach(graph, graph.tasks[0], b) for b in graph.tasks[0].buffers)
    (task,) = meter.with_costs(graph, room_bytes=room_bytes - 1).tasks
    assert meter.in_place(graph) == frozenset()
    assert task.workspace_bytes == NBYTES and task.time_ns is None
    meter = OpMeter(CPU)
    meter.with_costs(graph, room_bytes=room_bytes)
    assert meter.in_place(graph) == {0}


def test_a_tensor_given_as_out_is_refused_where_the_op_cannot_be_tried() -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, N), draft.tensor(ACTIVATION, N)
    draft.task("aten.add.out", x, x, out=(y,), changes=(y,))
    draft.tasks[0] = dataclasses.replace(draft.tasks[0], kwargs=(("out", y),))
    OpMeter(CPU).with_costs(draft.graph())
    with pytest.raises(CaptureError, match="given as out= and could not be tried"):
        OpMeter(CPU).with_costs(draft.graph(), room_bytes=0)


def test_both_arguments_of_a_trial_hold_other_numbers() -> None:
    graph = one_op("aten.sub.Tensor", 2)
    trial = Trial(graph, graph.tasks[0], CPU)
    (difference,) = trial.alone()
    assert int((difference == 0).sum()) < N // 4 and difference.isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64", "complex128"])
def test_every_dtype_is_tried(dtype: str) -> None:
    meter, graph = OpMeter(CPU), one_op("aten.add.Tensor", 2, dtype)
    meter.with_costs(graph)
    assert meter.in_place(graph) == {0}


# --- what is executed -------------------------------------------------------------------------


def test_a_plan_runs_an_unsafe_op_in_the_safe_form(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, p = draft.tensor(INPUT, N, N), draft.tensor(ACTIVATION, N, N)
    draft.task("aten.sigmoid.default", x, out=(p,))
    made, y = draft.tensor(ACTIVATION), draft.tensor(OUTPUT)
    draft.task("aten.binary_cross_entropy.default", p, p, out=(made,))
    draft.task("aten.neg.default", made, out=(y,))
    value, meter = torch.rand(N, N), OpMeter(CPU)
    graph = meter.with_costs(draft.graph(inputs=(x,), outputs=(y,)))
    assert meter.in_place(graph) == {0, 2}
    chance = value.sigmoid()
    expected = -torch.nn.functional.binary_cross_entropy(chance, chance)
    nbytes = ample_arena_bytes(graph, 64) + 4096
    # As found out, where nothing is known, and what would happen otherwise.
    for in_place, is_safe in ((meter.in_place(graph), True), (set(), True), ({1}, False)):
        made = rig(graph, arena_bytes=nbytes, policy="lru", in_place=frozenset(in_place))
        made.arena.bytes.zero_()
        (found,) = made(value)
        assert torch.equal(found, expected) or not is_safe
        assert (int((made.arena.bytes != 0).sum()) <= 4 * N * N + 4) is is_safe


def test_a_result_of_another_shape_or_dtype_is_not_broadcast() -> None:
    for result in (torch.ones(1), torch.ones(3, dtype=torch.float64)):
        out = torch.zeros(3)
        with pytest.raises(TaskMismatchError, match=r"returns torch.float.* captured were"):
            run_and_copy(lambda r=result: r, [], {}, [out])
        assert torch.equal(out, torch.zeros(3))


def test_an_op_that_was_never_tried_may_not_write_into_place() -> None:
    graph = one_op("writes_into_place")
    assert OpMeter(CPU).in_place(graph) == frozenset()
