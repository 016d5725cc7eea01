"""Running cheap tasks again: where it pays, what comes out, and where it is refused."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import (
    GraphInput,
    GraphOutput,
    ModuleCall,
    Ref,
    Symbol,
    TaskGraph,
    TensorView,
)
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.finepage import search as finepage
from ds_finepage.planning.finepage.search import min_split_arena_bytes, plan_finepage
from ds_finepage.planning.liveness import live_activation_bytes, min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite import recompute as recompute_module
from ds_finepage.planning.rewrite.recompute import MAX_CHAIN, recompute
from tests.property.value_interpreter import values_at_end
from tests.unit.planning.finepage.test_search import machine as search_machine
from tests.unit.planning.sketches import sketch

UNIT = 64


def passing(buffers: str, *tasks: str) -> TaskGraph:
    """Build a taskgraph; a task may begin with its op: ``"cos: i1 -> a1"``. Others are products."""
    ops = [t.partition(": ")[0] if ": " in t else "mm" for t in tasks]
    graph = sketch(buffers, *(t.rpartition(": ")[2] for t in tasks))
    found = (
        dataclasses.replace(t, op=f"aten.{op}.default", flops=1000 if op == "mm" else 0)
        for t, op in zip(graph.tasks, ops, strict=True)
    )
    return dataclasses.replace(graph, tasks=tuple(found))


def peak(graph: TaskGraph) -> int:
    return max(live_activation_bytes(graph, UNIT))


def texts(graph: TaskGraph) -> list[str]:
    """Write tasks down as ``op: reads -> writes``, clones of a buffer with a prime."""
    names: list[str] = []
    for buffer in graph.buffers:
        names.append(buffer.name if buffer.name not in names else f"{buffer.name}'")

    def listed(buffers: tuple[int, ...]) -> str:
        return " ".join(sorted(names[b] for b in buffers))

    return [
        " ".join(f"{t.op.split('.')[1]}: {listed(t.reads)} -> {listed(t.writes)}".split())
        for t in graph.tasks
    ]


# A mask is used at both ends, and idle where activations are largest.
SIZES = "i1:64 w1:8192 w2:8192 w3:8192 aMask:4096 aX:64 aBig:8192 aY:64 oOut:64"
FIRST = "mm: aMask i1 w1 -> aX"
MIDDLE = ("mm: aX w2 -> aBig", "mm: aBig w3 -> aY")
LAST = "mm: aMask aY -> oOut"
MASKED = passing(SIZES, "cos: i1 -> aMask", FIRST, *MIDDLE, LAST)


def machine(*, h2d: float) -> HardwareProfile:
    """A machine that takes 100 ns a task and nothing else."""
    return dataclasses.replace(
        search_machine(h2d=h2d), memory_bytes_per_s=1e15, flops_per_s={"default": 1e15}
    )


# Where it pays.


def test_an_idle_mask_is_made_again() -> None:
    found = recompute(MASKED, UNIT)
    assert texts(found) == [
        "cos: i1 -> aMask",
        "mm: aMask i1 w1 -> aX",
        "mm: aX w2 -> aBig",
        "mm: aBig w3 -> aY",
        "cos: i1 -> aMask'",
        "mm: aMask' aY -> oOut",
    ]
    assert [t.index for t in found.tasks] == list(range(6))
    assert [b.id for b in found.buffers] == list(range(len(MASKED.buffers) + 1))
    assert found.buffers[:-1] == MASKED.buffers
    assert peak(MASKED) - peak(found) == 4096
    assert values_at_end(found) == values_at_end(MASKED)


def test_a_mask_that_is_used_only_late_is_made_late() -> None:
    graph = passing(SIZES, "cos: i1 -> aMask", "mm: i1 w1 -> aX", *MIDDLE, LAST)
    assert [t.split(":")[0] for t in texts(recompute(graph, UNIT))] == [
        "mm", "mm", "mm", "cos", "mm",
    ]  # fmt: skip


def test_a_chain_of_cheap_tasks_is_run_again_together() -> None:
    graph = passing(
        SIZES + " aRows:64 aWide:128",
        *("arange: -> aRows", "cat: aRows i1 -> aWide", "lt: aRows aWide -> aMask"),
        *(FIRST, *MIDDLE, LAST),
    )
    found = recompute(graph, UNIT)
    assert texts(found)[6:] == [
        "arange: -> aRows'",
        "cat: aRows' i1 -> aWide'",
        "lt: aRows' aWide' -> aMask'",
        "mm: aMask' aY -> oOut",
    ]
    assert values_at_end(found) == values_at_end(graph)


def test_an_operand_that_is_live_anyway_is_read_as_it_is() -> None:
    graph = passing(
        SIZES + " aRows:64", "mm: i1 -> aRows", "lt: aRows -> aMask", FIRST, *MIDDLE,
        "mm: aMask aY aRows -> oOut",
    )  # fmt: skip
    found = recompute(graph, UNIT)
    assert texts(found)[5:] == ["lt: aRows -> aMask'", "mm: aMask' aRows aY -> oOut"]


def test_two_tables_give_way_for_the_same_task() -> None:
    graph = passing(
        "i1:64 aCos:1024 aSin:2048 aX:64 aBig:8192 aY:64 oOut:64",
        *("cos: i1 -> aCos", "sin: i1 -> aSin", "mm: aCos aSin -> aX"),
        *("mm: aX -> aBig", "mm: aBig -> aY", "mm: aCos aSin aY -> oOut"),
    )
    found = recompute(graph, UNIT)
    assert texts(found)[5:] == [
        "sin: i1 -> aSin'",
        "cos: i1 -> aCos'",
        "mm: aCos' aSin' aY -> oOut",
    ]
    assert peak(graph) - peak(found) == 3072


def test_every_one_of_several_equal_peaks_is_lowered() -> None:
    layers = [
        (f"mm: aMask aX{i} -> aY{i}", f"mm: aY{i} -> aBig{i}", f"mm: aBig{i} -> aX{i + 1}")
        for i in range(5)
    ]
    sizes = "".join(f" aX{i}:64 aY{i}:64 aBig{i}:8192" for i in range(5))
    graph = passing(
        "i1:64 aMask:1024 aX5:64 oOut:64" + sizes,
        *("cos: i1 -> aMask", "mm: i1 -> aX0"),
        *(task for layer in layers for task in layer),
        "mm: aMask aX5 -> oOut",
    )
    found = recompute(graph, UNIT)
    assert peak(graph) - peak(found) == 1024
    assert sum(t.op.startswith("aten.cos") for t in found.tasks) == 6
    assert values_at_end(found) == values_at_end(graph)


def test_a_norm_with_a_tiny_weight_and_small_results_is_run_again() -> None:
    graph = passing(
        SIZES + " wTiny:8 aMean:8", "native_layer_norm: i1 wTiny -> aMask aMean", FIRST, *MIDDLE,
        LAST,
    )  # fmt: skip
    found = recompute(graph, UNIT)
    assert texts(found)[4] == "native_layer_norm: i1 wTiny -> aMask' aMean'"
    assert values_at_end(found) == values_at_end(graph)


def test_a_large_table_makes_no_weight_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, last = "native_layer_norm: i1 wNorm -> aMask", "mm: aMask aY wTable -> oOut"
    graph = passing(SIZES + " wTable:80000 wNorm:64", norm, FIRST, *MIDDLE, last)
    assert recompute(graph, UNIT) is not graph
    (table,) = (b.id for b in graph.buffers if b.name == "wTable")
    monkeypatch.setattr(recompute_module, "looked_up_bytes", lambda _: {table: 64})
    assert recompute(graph, UNIT) is graph


def test_arguments_views_and_the_callers_tensors_follow() -> None:
    ids = {b.name: b.id for b in MASKED.buffers}
    views = [
        TensorView(0, ids["i1"], "float32", (16,), (1,)),
        TensorView(1, ids["aMask"], "float32", (1024,), (1,)),
        TensorView(2, ids["aMask"], "float32", (4, 4), (32, 1), 8),
        TensorView(3, ids["aY"], "float32", (16,), (1,)),
        TensorView(4, ids["oOut"], "float32", (16,), (1,)),
    ]
    tasks = list(MASKED.tasks)
    tasks[0] = dataclasses.replace(
        tasks[0], args=(Ref(0),), kwargs=(("dtype", Symbol("dtype", "float32")),), results=(1,)
    )
    tasks[4] = dataclasses.replace(
        tasks[4], args=((Ref(3), Ref(2)), 1.5), kwargs=(("mask", Ref(1)),), results=(4,)
    )
    graph = dataclasses.replace(
        MASKED,
        tensors=tuple(views),
        tasks=tuple(tasks),
        inputs=(GraphInput(0, 0),),
        outputs=(GraphOutput(tensor=4),),
        calls=(ModuleCall("", "Model", 0, 0, 5),),
    )
    found = recompute(graph, UNIT)
    new = found.buffers[-1].id
    assert found.tensors[:5] == graph.tensors
    assert found.tensors[5:] == (
        dataclasses.replace(views[1], id=5, buffer=new),
        dataclasses.replace(views[2], id=6, buffer=new),
    )
    assert found.tasks[4] == dataclasses.replace(tasks[0], index=4, writes=(new,), results=(5,))
    assert found.tasks[5].args == ((Ref(3), Ref(6)), 1.5)
    assert found.tasks[5].kwargs == (("mask", Ref(5)),)
    assert (found.inputs, found.outputs) == (graph.inputs, graph.outputs)
    assert found.calls == ()  # their tasks have other indices
    assert values_at_end(found) == values_at_end(graph)


# Where it does not.

REFUSED = {
    "a product": ("mm: i1 -> aMask", FIRST, *MIDDLE, LAST),
    "random numbers": ("bernoulli: i1 -> aMask", FIRST, *MIDDLE, LAST),
    "an unknown op": ("my_op: i1 -> aMask", FIRST, *MIDDLE, LAST),
    "a maker that changes its operand": ("cos: i1 s1 -> aMask s1", FIRST, *MIDDLE, LAST),
    "an operand that is changed in between": (
        "cos: s1 -> aMask", FIRST, *MIDDLE, "mm: s1 -> s1", LAST,
    ),
    "an operand that is touched in between": (
        "cos: s1 -> aMask", FIRST, *MIDDLE, "mm: ~ s1", "join s1 ->", LAST,
    ),
    "an activation that is changed in between": (
        "mm: i1 -> aP", "cos: aP -> aMask", FIRST, *MIDDLE, "mm: aP -> aP",
        "mm: aMask aY aP -> oOut",
    ),
    "an operand that is dead": ("mm: i1 -> aP", "cos: aP -> aMask", FIRST, *MIDDLE, LAST),
    "an operand that was made by several tasks": (
        "zeros: -> aP", "mm: i1 aP -> aP", "cos: aP -> aMask", FIRST, *MIDDLE, LAST,
    ),
    "a mask that is changed": ("cos: i1 -> aMask", "mm: aMask -> aMask", FIRST, *MIDDLE, LAST),
    "a mask that is made region by region": (
        "cos: i1 ~ aMask", "cos: i1 ~ aMask", "join aMask ->", FIRST, *MIDDLE, LAST,
    ),
    "a weight that may be streamed": ("cos: w1 -> aMask", FIRST, *MIDDLE, LAST),
    "a mask that is used at the peak": (
        "cos: i1 -> aMask", FIRST, "mm: aX aMask -> aBig", "mm: aBig aMask -> aY", LAST,
    ),
    "a peak that is elsewhere": (
        "cos: i1 -> aMask", FIRST, *MIDDLE, LAST, "mm: -> aBig", "mm: aBig -> aHuge",
    ),
    "an operand that would take as much room": (
        "cos: i1 -> aWide", "cos: aWide -> aMask", FIRST, *MIDDLE, LAST,
    ),
}  # fmt: skip
MORE = " s1:64 aP:64 aHuge:8192 aWide:12288"


@pytest.mark.parametrize("why", REFUSED)
def test_the_very_same_taskgraph_comes_back(why: str) -> None:
    graph = passing(SIZES + MORE, *REFUSED[why])
    assert recompute(graph, UNIT) is graph


def test_a_chain_that_is_too_long_is_refused() -> None:
    for length in (MAX_CHAIN, MAX_CHAIN + 1):
        steps = [f"cos: {'i1' if i == 1 else f'aC{i - 1}'} -> aC{i}" for i in range(1, length)]
        graph = passing(
            SIZES + "".join(f" aC{i}:64" for i in range(1, length)),
            *(*steps, f"cos: aC{length - 1} -> aMask", FIRST, *MIDDLE, LAST),
        )
        assert (recompute(graph, UNIT) is graph) == (length > MAX_CHAIN)


def nested(rows_bytes: int, mask_bytes: int) -> TaskGraph:
    """Build a pass in which rows and the mask made of them are idle at the peak, rows longer."""
    return passing(
        f"i1:64 aRows:{rows_bytes} aMask:{mask_bytes} aX:64 aBig:8192 aY:64 aZ:64 oOut:64",
        *("cos: i1 -> aRows", "cos: aRows -> aMask", "mm: aMask -> aX", "mm: aX -> aBig"),
        *("mm: aBig -> aY", "mm: aMask aY -> aZ", "mm: aRows aZ -> oOut"),
    )


def test_an_operand_that_a_clone_reads_gives_way_up_to_there() -> None:
    graph = nested(rows_bytes=1024, mask_bytes=4096)
    found = recompute(graph, UNIT)
    assert texts(found)[5:] == [
        "cos: i1 -> aRows'",
        "cos: aRows' -> aMask'",
        "mm: aMask' aY -> aZ",
        "mm: aRows' aZ -> oOut",
    ]
    assert peak(graph) - peak(found) == 4096 + 1024
    assert values_at_end(found) == values_at_end(graph)


def test_an_operand_that_gave_way_is_made_again_for_a_clone() -> None:
    graph = nested(rows_bytes=4096, mask_bytes=1024)
    found = recompute(graph, UNIT)
    assert sorted(b.name for b in found.buffers[len(graph.buffers) :]) == [
        "aMask",
        "aRows",
        "aRows",
    ]
    assert peak(graph) - peak(found) == 4096 + 1024
    assert values_at_end(found) == values_at_end(graph)


def test_a_pass_without_tasks_comes_back() -> None:
    graph = TaskGraph("empty", (), (), ())
    assert recompute(graph, UNIT) is graph


def gelu(x_bytes: int, *, changes: str = "") -> TaskGraph:
    """Build ``0.5x * (1 + tanh(x + x**3))``, whose half comes first and is used last."""
    return passing(
        f"i1:64 aX:{x_bytes} aHalf:4096 aCube:4096 aSum:4096 aTanh:4096 aOne:64 oOut:64",
        *("mm: i1 -> aX", "mul: aX -> aHalf", "pow: aX -> aCube", "add: aX aCube -> aSum"),
        *((changes,) if changes else ()),
        *("tanh: aSum -> aTanh", "mm: aTanh -> aOne", "mul: aHalf aOne -> oOut"),
    )


def test_a_task_is_delayed_if_its_operand_is_no_larger() -> None:
    graph = gelu(4096)
    found = recompute(graph, UNIT)
    assert texts(found) == [
        "mm: i1 -> aX",
        "pow: aX -> aCube",
        "add: aCube aX -> aSum",
        "tanh: aSum -> aTanh",
        "mm: aTanh -> aOne",
        "mul: aX -> aHalf'",
        "mul: aHalf' aOne -> oOut",
    ]
    assert peak(graph) - peak(found) == 4096
    assert values_at_end(found) == values_at_end(graph)


@pytest.mark.parametrize(
    "graph", (gelu(4096 + UNIT), gelu(4096, changes="mm: aX -> aX")), ids=("larger", "changed")
)
def test_a_task_is_not_delayed_if_its_operand_is_larger_or_changes(graph: TaskGraph) -> None:
    assert recompute(graph, UNIT) is graph


def test_an_operand_that_stays_live_takes_room() -> None:
    # Four large buffers are live before the operand's last use, and four after it.
    graph = passing(
        "i1:64 aX:4096 aHalf:4096 aCube:4096 aSum:4096 aTanh:4096 aBig:4096 aOne:64 oOut:64",
        *("mm: i1 -> aX", "mul: aX -> aHalf", "pow: aX -> aCube", "add: aX aCube -> aSum"),
        *("mm: aSum -> aTanh aBig", "mm: aTanh aBig -> aOne", "mul: aHalf aOne -> oOut"),
    )
    assert recompute(graph, UNIT) is graph


def test_a_buffer_that_lowers_no_peak_is_not_made_again_beside_one_that_does() -> None:
    # The half is the larger one, but its operand would be live at the peak in its place.
    graph = passing(
        "i1:64 aMask:64 aX:4096 aHalf:4096 aOne:64 aTwo:64 aBig:8192 aThree:64 oOut:64",
        *("cos: i1 -> aMask", "mm: i1 -> aX", "mul: aX -> aHalf", "mm: aHalf -> aOne"),
        *("mm: aX aOne -> aTwo", "mm: aTwo -> aBig", "mm: aBig -> aThree"),
        "mm: aHalf aThree aMask -> oOut",
    )
    found = recompute(graph, UNIT)
    assert [b.name for b in found.buffers[len(graph.buffers) :]] == ["aMask"]


# In a plan.


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("h2d", [None, 1e9])
def test_what_is_freed_keeps_weights(
    split: bool, h2d: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = h2d and machine(h2d=h2d)
    weights = " ".join(f"wL{i}:2048" for i in range(8))
    graph = passing(
        f"i1:64 aMask:4096 aX:64 aBig:8192 aY:64 oOut:64 {weights}",
        *("cos: i1 -> aMask", "mm: aMask -> aX", "mm: aX -> aBig", "mm: aBig -> aY"),
        *(f"mm: wL{i} aY -> aY" for i in range(8)),
        "mm: aMask aY -> oOut",
    )
    arena_bytes = 20 * 1024
    problem = Problem(graph, arena_bytes, UNIT, profile=profile, split=split)
    with_it = check(plan_finepage(problem))
    monkeypatch.setattr(finepage, "recompute", lambda graph, **_: graph)
    without = check(plan_finepage(problem))
    assert len(without.graph.tasks) == len(graph.tasks)
    assert without.reloaded_bytes - with_it.reloaded_bytes == 4096
    assert lower_bound_bytes(graph, arena_bytes, UNIT) <= with_it.reloaded_bytes


def test_a_smaller_arena_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # No task needs more than 8 KiB and its weight, but mask and intermediate lie side by side.
    graph = passing(
        "i1:64 aMask:8192 aX:64 aBig:8192 aY:64 oOut:64 w1:64 w2:64",
        *("cos: i1 -> aMask", "mm: aMask -> aX", "mm: aX w1 -> aBig"),
        *("mm: aBig -> aY", "mm: aY w2 -> aX", "mm: aMask aX -> oOut"),
    )
    monkeypatch.setattr(finepage, "min_arena_bytes", lambda *_: 10**9)
    least = min_split_arena_bytes(graph, UNIT)
    assert least < 8192 + 1024
    problem = Problem(graph, least, UNIT, profile=machine(h2d=1e9), split=True)
    found = check(plan_finepage(problem))
    assert found.graph is not graph
    assert found.offloaded_bytes == 0
    assert min_arena_bytes(found.graph, UNIT) <= min_arena_bytes(graph, UNIT)
    monkeypatch.setattr(finepage, "recompute", lambda graph, *_: graph)
    assert min_split_arena_bytes(graph, UNIT) > 2 * 8192
