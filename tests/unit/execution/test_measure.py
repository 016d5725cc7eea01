"""What ops take for themselves, as measured on scratch tensors. Times are not looked at."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.execution import measure
from ds_finepage.execution.device import device_of
from ds_finepage.execution.measure import OpMeter, estimate_workspaces
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.ops import BoundTask
from ds_finepage.execution.trial import Trial, reach
from ds_finepage.graph.packed import FUSED_ROWS, PACKED_LINEAR, SLICE_ROWS
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, Task, TaskGraph
from ds_finepage.packing.form import WIDE_ROWS
from tests.unit.execution.graphs import ACTIVATION, INPUT, WEIGHT, Draft

CPU = torch.device("cpu")
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def measured(draft: Draft) -> tuple[Task, ...]:
    return OpMeter(CPU).with_costs(draft.graph()).tasks


def product(n: int = 64) -> Draft:
    draft = Draft()
    x, w, y = draft.tensor(INPUT, n, n), draft.tensor(WEIGHT, n, n), draft.tensor(ACTIVATION, n, n)
    draft.task("aten.mm.default", x, w, out=(y,))
    return draft


def attention() -> Draft:
    draft = Draft()
    q = draft.tensor(INPUT, 1, 2, 16, 32)
    out, sums = draft.tensor(ACTIVATION, 1, 2, 16, 32), draft.tensor(ACTIVATION, 1, 2, 16)
    draft.task(SDPA, q, q, q, out=(out, sums))
    return draft


# --- workspace -------------------------------------------------------------------------------


def test_each_op_is_charged_with_its_own_bytes() -> None:
    draft = product()
    made = draft.tensor(ACTIVATION, 500, dtype="int64")
    draft.task("aten.arange.start", 0, 500, out=(made,))
    x = draft.tensor(ACTIVATION, 8)
    draft.task("aten.neg_.default", x, out=(x,), changes=(x,))
    draft.task(TO_HOST, x, out=(draft.tensor(BufferKind.HOST, 8),))
    empty = draft.tensor(ACTIVATION, 0, 8)
    draft.task("aten.neg.default", empty, out=(draft.tensor(ACTIVATION, 0, 8),))
    draft.join(x)
    found = measured(draft)
    assert [t.workspace_bytes for t in found] == [0, 4000, 0, 0, 0, 0]
    assert all(t.time_ns is not None for t in found)


# --- what is measured ------------------------------------------------------------------------


def test_costs_are_written_into_the_tasks_and_nothing_else_changes() -> None:
    graph = product().graph()
    found = OpMeter(CPU).with_costs(graph)
    (before,), (task,) = graph.tasks, found.tasks
    assert task.time_ns is not None and task.time_ns > 0
    assert replace(task, time_ns=None, workspace_bytes=0) == before
    assert replace(found, tasks=graph.tasks) == graph


def test_the_same_op_on_other_buffers_is_known() -> None:
    meter = OpMeter(CPU)
    meter.with_costs(product().graph())
    draft = Draft()
    draft.tensor(WEIGHT, 5)
    w, y = draft.tensor(WEIGHT, 64, 64), draft.tensor(ACTIVATION, 64, 64)
    draft.task("aten.mm.default", draft.tensor(INPUT, 64, 64), w, out=(y,))
    meter.with_costs(draft.graph(), make_room=lambda: pytest.fail("it is measured again"))


def test_ops_are_measured_while_another_meter_runs() -> None:
    with DeviceMeter(CPU):
        (task,) = OpMeter(CPU).with_costs(product().graph()).tasks
    assert task.time_ns is not None


def changed(**what: object) -> Draft:
    """Make a sum that differs in one thing from the plain one."""
    draft = Draft()
    shape = what.get("shape", (4, 6))
    dtype = str(what.get("dtype", "float32"))
    x = draft.tensor(INPUT, *shape, dtype=dtype)  # type: ignore[misc]
    if "stride" in what:
        x = draft.view(x, (4, 6), (1, 4))
    y = draft.tensor(ACTIVATION, *shape, dtype=dtype)  # type: ignore[misc]
    draft.task(str(what.get("op", "aten.add.Tensor")), x, what.get("other", x), out=(y,))
    return draft


@pytest.mark.parametrize(
    "what",
    [
        {"shape": (6, 4)},
        {"dtype": "float64"},
        {"stride": (1, 4)},
        {"op": "aten.mul.Tensor"},
        {"other": 1},
        {"other": 1.0},
        {"other": True},
        {"other": float("nan")},
    ],
    ids=str,
)
def test_an_op_that_differs_in_one_thing_is_not_known(what: dict[str, object]) -> None:
    meter = OpMeter(CPU)
    for others in ({}, {"other": 2}, {"other": 2.0}):
        meter.with_costs(changed(**others).graph())
    times: list[int] = []
    for _ in range(2):
        meter.with_costs(changed(**what).graph(), make_room=lambda: times.append(1))
        assert times == [1]


def test_an_op_that_comes_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Task] = []

    class Counting(Trial):
        def __init__(self, graph: TaskGraph, task: Task, *others: Any) -> None:
            super().__init__(graph, task, *others)
            tried.append(task)

    monkeypatch.setattr(measure, "Trial", Counting)
    draft = product()
    draft.tasks.append(replace(draft.tasks[0], index=1, label="another"))
    first, second = measured(draft)
    assert len(tried) == 1
    assert (first.time_ns, second.label) == (second.time_ns, "another")


def test_a_fast_op_is_timed_three_times_and_a_slow_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    task = BoundTask(lambda: calls.append(1), [], {})
    trial: Any = SimpleNamespace(bind=lambda into_place: task, fault=lambda wanted: None)
    measure._attempt(trial, [], device_of(CPU), into_place=False)
    assert len(calls) == 3
    monkeypatch.setattr(measure, "REPEAT_BELOW_NS", -1)
    measure._attempt(trial, [], device_of(CPU), into_place=False)
    assert len(calls) == 4


# --- scratch tensors -------------------------------------------------------------------------


def test_zeros_are_indices_that_are_valid_anywhere() -> None:
    draft = Draft()
    table, ids = draft.tensor(WEIGHT, 10, 4), draft.tensor(INPUT, 3, dtype="int64")
    draft.task("aten.embedding.default", table, ids, out=(draft.tensor(ACTIVATION, 3, 4),))
    cache, rows = draft.tensor(INPUT, 10, 4), draft.tensor(INPUT, 3, 4)
    draft.task("aten.index_copy_.default", cache, 0, ids, rows, out=(cache,), changes=(cache,))
    assert len(measured(draft)) == 2


@pytest.mark.parametrize("ends", [(64, 64, 64), (0, 0, 64), (20, 41, 64)])
def test_products_of_groups_take_no_more_than_measured(ends: tuple[int, ...]) -> None:
    draft = Draft()
    rows = draft.tensor(INPUT, 64, 32, dtype="bfloat16")
    matrices = draft.tensor(WEIGHT, 3, 32, 128, dtype="bfloat16")
    offs = draft.tensor(INPUT, 3, dtype="int32")
    out = draft.tensor(ACTIVATION, 64, 128, dtype="bfloat16")
    draft.task("aten._grouped_mm.default", rows, matrices, offs, out=(out,))
    (task,) = measured(draft)
    kind = torch.bfloat16
    given = torch.ones(64, 32, dtype=kind), torch.ones(3, 32, 128, dtype=kind)
    with DeviceMeter(CPU) as meter:
        torch._grouped_mm(*given, torch.tensor(ends, dtype=torch.int32))
    assert meter.peak_bytes <= task.workspace_bytes + 3 * 4


@pytest.mark.parametrize("chosen", [0, 100, 640])
def test_rows_that_a_mask_chooses_take_no_more_than_measured(chosen: int) -> None:
    draft = Draft()
    x, row = draft.tensor(INPUT, 640, 8), draft.tensor(INPUT, 8)
    mask = draft.tensor(INPUT, 640, dtype="bool")
    draft.task("aten.index_put_.default", x, (mask,), row, out=(x,), changes=(x,))
    (task,) = measured(draft)
    target, value, where = torch.zeros(640, 8), torch.ones(8), torch.arange(640) < chosen
    with DeviceMeter(CPU) as meter:
        torch.ops.aten.index_put_(target, [where], value)
    assert meter.peak_bytes <= task.workspace_bytes


def test_tensors_on_a_buffer_share_as_much_scratch_as_they_reach() -> None:
    draft = Draft()
    big = draft.tensor(ACTIVATION, 1 << 40)  # four terabytes that nobody could allocate
    part = draft.view(big, (2, 3), (3, 1), offset=100)
    draft.task("aten.neg_.default", part, out=(part,), changes=(part,))
    low, high = draft.view(big, (4,), (1,)), draft.view(big, (4,), (1,), offset=4)
    draft.task("aten.copy_.default", low, high, out=(low,), changes=(low,))
    graph = draft.graph()
    assert [reach(graph, task, 0) for task in graph.tasks] == [106 * 4, 8 * 4]
    assert len(measured(draft)) == 2


def test_measuring_works_in_inference_mode() -> None:
    with torch.inference_mode():
        draft = Draft()
        x = draft.tensor(ACTIVATION, 8)
        draft.task("aten.neg_.default", x, out=(x,), changes=(x,))
        assert len(measured(draft)) == 1


def test_measuring_leaves_the_random_generator_alone() -> None:
    draft = Draft()
    x = draft.tensor(ACTIVATION, 8)
    draft.task("aten.bernoulli_.float", x, 0.5, out=(x,), changes=(x,))
    before = torch.get_rng_state()
    measured(draft)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_op_that_refuses_scratch_does_not_end_the_pass() -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 4, 4), draft.tensor(ACTIVATION, 4, 4)
    draft.task("aten.linalg_cholesky.default", x, out=(y,))  # a row is no multiple of another
    (task,) = OpMeter(CPU).with_costs(draft.graph()).tasks
    assert task.time_ns is None and task.workspace_bytes == 4 * 4 * 4


# --- estimates -------------------------------------------------------------------------------


def test_an_estimate_counts_copied_results_and_nothing_else() -> None:
    found = estimate_workspaces(product().graph()), estimate_workspaces(attention().graph())
    assert [t.workspace_bytes for g in found for t in g.tasks] == [0, (2 * 16 * 32 + 2 * 16) * 4]


def test_an_estimate_runs_nothing() -> None:
    draft = Draft()
    x = draft.tensor(ACTIVATION, 1 << 40)  # four terabytes that nobody could allocate
    draft.task("aten.neg_.default", x, out=(x,), changes=(x,))
    assert estimate_workspaces(draft.graph()).tasks == draft.graph().tasks


estimated_on_cpu = partial(estimate_workspaces, on_accelerator=False)


def packed_product(
    bits: int, dtype: str = "float32", num_rows: int = 2, fused: tuple[bool, ...] = ()
) -> Draft:
    """Make a product of rows with a packed weight of 1000 x 128."""
    draft = Draft()
    x, y = (
        draft.tensor(kind, num_rows, width, dtype=dtype)
        for kind, width in ((INPUT, 128), (ACTIVATION, 1000))
    )
    numbers = draft.tensor(WEIGHT, 1000, 16 * bits, dtype="uint8")
    scales, minima = (draft.tensor(WEIGHT, 1000, 2, dtype=dtype) for _ in range(2))
    draft.task(PACKED_LINEAR, x, numbers, scales, minima, None, bits, 64, *fused, out=(y,))
    return draft


@pytest.mark.usefixtures("unpacks")
@pytest.mark.parametrize(("bits", "halves"), [(8, 0), (4, 64)])
def test_a_product_with_a_packed_weight_takes_one_unpacked_slice(bits: int, halves: int) -> None:
    slice_bytes = SLICE_ROWS * (128 * 4 + halves)
    graph = packed_product(bits).graph()
    (estimated,), (task,) = estimated_on_cpu(graph).tasks, measured(packed_product(bits))
    assert estimated.workspace_bytes == slice_bytes
    # Constants of bit operations, and on the CPU the halves of a few rows at a time.
    few = (SLICE_ROWS - WIDE_ROWS) * halves
    assert 0 <= task.workspace_bytes - (slice_bytes - few) < 16
    # Without room for a trial it may have to be copied, or may not.
    meter = OpMeter(CPU)
    (unmeasured,) = meter.with_costs(graph, room_bytes=0).tasks
    assert unmeasured.workspace_bytes == slice_bytes + 2 * 1000 * 4
    meter.with_costs(graph)
    assert meter.in_place(graph) == {0}


def test_a_fused_product_takes_nothing_on_an_accelerator() -> None:
    for num_rows, is_fused in ((2, True), (FUSED_ROWS, True), (FUSED_ROWS + 1, False)):
        plain, fused = (
            packed_product(4, num_rows=num_rows, fused=f).graph() for f in ((), (True,))
        )
        (sliced,) = estimate_workspaces(plain).tasks
        assert sliced.workspace_bytes == 1000 * 128 * 4
        expected = 0 if is_fused else sliced.workspace_bytes
        assert estimate_workspaces(fused).tasks[0].workspace_bytes == expected
        (on_cpu,) = estimated_on_cpu(fused).tasks
        assert on_cpu.workspace_bytes == estimated_on_cpu(plain).tasks[0].workspace_bytes > 0


def test_an_op_without_out_overload_takes_its_results_at_least() -> None:
    (task,) = measured(attention())
    assert task.workspace_bytes >= (2 * 16 * 32 + 2 * 16) * 4
