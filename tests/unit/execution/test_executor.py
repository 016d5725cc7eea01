"""The executor on taskgraphs of real ops: it does what the plan says and keeps nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ds_finepage.checker.checker import check
from ds_finepage.errors import StoreError, TaskMismatchError
from ds_finepage.execution.arena import Arena, HostPool
from ds_finepage.execution.executor import Executor, OpHook, Residents, byte_view
from ds_finepage.execution.lanes import CpuLanes
from ds_finepage.execution.program import lower
from ds_finepage.graph.memgraph import Extent, Lane, NodeKind
from ds_finepage.graph.taskgraph import GraphOutput, Task, TaskGraph
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes
from ds_finepage.planning.policies import PAGING, plan_steady
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.unit.execution.graphs import (
    ACTIVATION,
    CONSTANT,
    INPUT,
    OUTPUT,
    STATE,
    WEIGHT,
    Draft,
)

CPU = torch.device("cpu")
N = 8
every_policy = pytest.mark.parametrize("policy", sorted(PAGING))


class Rig:
    """An executor with all that it needs; arena and residency last from pass to pass."""

    def __init__(
        self,
        graph: TaskGraph,
        weights: dict[str, torch.Tensor] | None = None,
        *,
        arena_bytes: int | None = None,
        policy: str = "finepage",
        delay_seed: int | None = None,
        masters: dict[str, torch.Tensor] | None = None,
        **others: Any,
    ) -> None:
        if arena_bytes is None:
            arena_bytes = ample_arena_bytes(graph, 64)
        self.memgraph = check(plan_steady(graph, arena_bytes=arena_bytes, policy=policy))
        if masters is None:
            masters = {name: byte_view(w.clone()) for name, w in (weights or {}).items()}
        self.arena = Arena(arena_bytes, CPU)
        self.arena.bytes.fill_(0xFF)
        pool = HostPool(pinned=False)
        pool.reserve(self.memgraph.host_bytes)
        self.lanes = CpuLanes(delay_seed=delay_seed, max_delay_us=50)
        self.residents: Residents = {}
        self.executor = Executor(
            self.memgraph,
            arena=self.arena,
            pool=pool,
            lanes=self.lanes,
            masters=masters,
            in_place=frozenset(range(len(self.memgraph.graph.tasks))),
            **others,
        )

    def __call__(self, *args: Any, host: Sequence[Any] = ()) -> Any:
        return self.executor.run(args, host, self.residents)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.lanes.close()


# --- graphs ----------------------------------------------------------------------------------


def deep(depth: int = 6) -> tuple[TaskGraph, dict[str, torch.Tensor]]:
    """A stack of products whose first result is needed again at the very end."""
    draft = Draft()
    x = h = draft.tensor(INPUT, N, N)
    weights = {}
    first = None
    for i in range(depth):
        name = f"w{i}"
        weights[name] = torch.randn(N, N) / 3
        w = draft.tensor(WEIGHT, N, N, name=name)
        y = draft.tensor(ACTIVATION, N, N)
        draft.task("aten.mm.default", h, w, out=(y,))
        draft.task("aten.tanh_.default", y, out=(y,), changes=(y,))
        h, first = y, first or y
    out = draft.tensor(OUTPUT, N, N)
    assert first is not None
    draft.task("aten.add.Tensor", h, first, out=(out,))
    return draft.graph((x,), (out,)), weights


def deep_in_eager(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    made = []
    for w in weights.values():
        made.append(torch.tanh((made[-1] if made else x) @ w))
    return made[-1] + made[0]


def negated() -> TaskGraph:
    draft = Draft()
    x, y = draft.tensor(INPUT, 3), draft.tensor(OUTPUT, 3)
    draft.task("aten.neg.default", x, out=(y,))
    return draft.graph((x,), (y,))


# --- results ---------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("spare_units", [0, 4, 100])
def test_results_are_those_of_eager_pass_after_pass(
    rig: Callable[..., Rig], policy: str, spare_units: int
) -> None:
    graph, weights = deep()
    made = rig(
        graph, weights, arena_bytes=min_arena_bytes(graph, 64) + 64 * spare_units, policy=policy
    )
    for _ in range(3):
        x = torch.randn(N, N)
        (found,) = made(x)
        assert torch.equal(found, deep_in_eager(x, weights))


@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_delays_and_poison_change_no_result(
    rig: Callable[..., Rig], policy: str, seed: int
) -> None:
    graph, weights = deep()
    made = rig(
        graph,
        weights,
        arena_bytes=min_arena_bytes(graph, 64) + 256 * (seed % 3),
        policy=policy,
        delay_seed=seed,
        poison=True,
    )
    for _ in range(3):
        x = torch.randn(N, N)
        (found,) = made(x)
        assert torch.equal(found, deep_in_eager(x, weights))


def test_a_tight_arena_offloads_and_brings_back() -> None:
    """The graph above really needs the pinned pool at its least arena."""
    graph, _ = deep()
    memgraph = plan_steady(graph, arena_bytes=min_arena_bytes(graph, 64), policy="finepage")
    assert memgraph.offloaded_bytes > 0 and memgraph.host_bytes > 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_every_mode_gives_the_same(rig: Callable[..., Rig], mode: Callable[[], Any]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    with mode():
        x = torch.randn(N, N)
        assert torch.equal(made(x)[0], deep_in_eager(x, weights))
    x = torch.randn(N, N)
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))


# --- arguments -------------------------------------------------------------------------------


def test_an_argument_may_be_part_of_a_larger_tensor(rig: Callable[..., Rig]) -> None:
    whole = torch.randn(10)
    assert torch.equal(rig(negated())(whole[4:7])[0], -whole[4:7])


def test_views_of_an_argument_follow_it(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 2, 3), draft.tensor(OUTPUT, 3)
    draft.task("aten.neg.default", draft.view(x, (3,), (1,), offset=3), out=(y,))
    made = rig(draft.graph((x,), (y,)))
    for whole in (torch.randn(2, 3), torch.randn(5, 2, 3)[2]):
        assert torch.equal(made(whole)[0], -whole[1])


def test_state_is_changed_where_the_caller_has_it(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    cache, x = draft.tensor(STATE, 4, 3), draft.tensor(INPUT, 1, 3)
    at = draft.tensor(INPUT, 1, dtype="int64")
    draft.task("aten.index_copy_.default", cache, 0, at, x, out=(cache,), changes=(cache,))
    made = rig(draft.graph((cache, x, at), (GraphOutput(position=0),)))
    mine = torch.zeros(4, 3)
    for i in (2, 0):
        (found,) = made(mine, torch.full((1, 3), i + 1.0), torch.tensor([i]))
        assert found is mine
    assert mine[:, 0].tolist() == [1.0, 0.0, 3.0, 0.0]


def test_numbers_among_the_arguments_are_passed_over(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    ignored, x = draft.tensor(INPUT, 1), draft.tensor(INPUT, 3)
    y = draft.tensor(OUTPUT, 3)
    draft.task("aten.neg.default", x, out=(y,))
    graph = draft.graph((ignored, x), (y,))
    graph = TaskGraph(
        graph.name, graph.buffers, graph.tensors, graph.tasks, graph.inputs[1:], graph.outputs
    )
    assert torch.equal(rig(graph)(7, torch.ones(3))[0], -torch.ones(3))


@pytest.mark.parametrize(
    ("arg", "found"),
    [(torch.ones(4), "(4,), strides (1,)"), (torch.ones(3, 2)[:, 0], "(3,), strides (2,)")],
    ids=["shape", "strides"],
)
def test_an_argument_of_another_form_is_refused(
    rig: Callable[..., Rig], arg: torch.Tensor, found: str
) -> None:
    with pytest.raises(TaskMismatchError) as caught:
        rig(negated())(arg)
    message = str(caught.value)
    assert message.startswith(f"argument 0 of by hand has shape {found}")
    assert "captured were (3,), (1,)" in message


def test_a_refused_call_leaves_the_executor_usable(rig: Callable[..., Rig]) -> None:
    made = rig(negated())
    with pytest.raises(TaskMismatchError):
        made(torch.ones(4))
    assert torch.equal(made(torch.ones(3))[0], -torch.ones(3))


# --- outputs ---------------------------------------------------------------------------------


def test_every_sort_of_output(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 2, 3), draft.tensor(OUTPUT, 2, 3)
    constant = draft.tensor(
        CONSTANT, 2, payload=byte_view(torch.tensor([5.0, 6.0])).numpy().tobytes()
    )
    draft.task("aten.neg.default", x, out=(y,))
    graph = draft.graph(
        (x,),
        (
            y,
            draft.view(y, (3, 2), (1, 3)),
            draft.view(x, (3,), (1,), offset=3),
            GraphOutput(position=0),
            GraphOutput(host=1),
            GraphOutput(),
            constant,
        ),
    )
    arg = torch.randn(2, 3)
    made, turned, part, same, number, nothing, lifted = rig(graph)(arg, host=(10, 20))
    assert torch.equal(made, -arg) and torch.equal(turned, -arg.t())
    assert turned.data_ptr() == made.data_ptr()
    assert part.data_ptr() == arg[1].data_ptr() and torch.equal(part, arg[1])
    assert same is arg and number == 20 and nothing is None
    assert lifted.tolist() == [5.0, 6.0]


def test_outputs_belong_to_the_caller(rig: Callable[..., Rig]) -> None:
    """A later pass makes new ones, and what the caller does to them is its own affair."""
    made = rig(negated())
    (first,) = made(torch.ones(3))
    (second,) = made(torch.full((3,), 2.0))
    assert first.tolist() == [-1.0] * 3 and second.tolist() == [-2.0] * 3


def test_a_returned_constant_is_a_copy(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    constant = draft.tensor(CONSTANT, 1, payload=byte_view(torch.tensor([5.0])).numpy().tobytes())
    made = rig(draft.graph((), (constant,)))
    made()[0].zero_()
    assert made()[0].item() == 5.0


def test_constants_are_operands(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 2), draft.tensor(OUTPUT, 2)
    payload = byte_view(torch.tensor([5.0, 6.0])).numpy().tobytes()
    draft.task("aten.add.Tensor", x, draft.tensor(CONSTANT, 2, payload=payload), out=(y,))
    assert rig(draft.graph((x,), (y,)))(torch.ones(2))[0].tolist() == [6.0, 7.0]


def test_empty_tensors_go_through(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, w = draft.tensor(INPUT, 0, N), draft.tensor(WEIGHT, N, 0, name="w")
    h, y = draft.tensor(ACTIVATION, 0, 0), draft.tensor(OUTPUT, 0, 0)
    empty = draft.tensor(CONSTANT, 0, 0, payload=b"")
    draft.task("aten.mm.default", x, w, out=(h,))
    draft.task("aten.add.Tensor", h, empty, out=(y,))
    made = rig(draft.graph((x,), (y,)), {"w": torch.empty(N, 0)})
    assert made(torch.empty(0, N))[0].shape == (0, 0)


# --- host masters ----------------------------------------------------------------------------


def test_a_missing_master_is_refused(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    del weights["w3"]
    with pytest.raises(StoreError, match="no host master for weight 'w3'"):
        rig(graph, weights)


def test_a_master_that_is_too_small_is_refused_with_both_numbers(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    weights["w3"] = torch.randn(N, N - 1)
    with pytest.raises(StoreError, match=r"'w3' has 224 bytes; captured were bytes up to 256"):
        rig(graph, weights)


def test_masters_are_not_changed(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    masters = {name: byte_view(w.clone()) for name, w in weights.items()}
    made = rig(graph, masters=masters, arena_bytes=min_arena_bytes(graph, 64), poison=True)
    made(torch.randn(N, N))
    assert all(torch.equal(masters[name], byte_view(w)) for name, w in weights.items())


# --- embeddings by the row -------------------------------------------------------------------


def looked_up() -> TaskGraph:
    draft = Draft()
    ids, table = draft.tensor(INPUT, 2, 3, dtype="int64"), draft.tensor(WEIGHT, 100, 4, name="t")
    rows, y = draft.tensor(ACTIVATION, 2, 3, 4), draft.tensor(OUTPUT, 2, 3, 4)
    draft.task("aten.embedding.default", table, ids, out=(rows,))
    draft.task("aten.neg.default", rows, out=(y,))
    return gather_rows(draft.graph((ids,), (y,)))


def test_rows_of_an_embedding_come_anew_in_each_pass(rig: Callable[..., Rig]) -> None:
    graph, table = looked_up(), torch.randn(100, 4)
    made = rig(graph, {"t": table})
    for ids in (torch.tensor([[5, 99, 5], [0, 1, 2]]), torch.tensor([[7, 7, 7], [98, 0, 3]])):
        assert torch.equal(made(ids)[0], -table[ids])
    assert made.executor.counters.reloaded_bytes == 6 * 16


# --- nothing is kept -------------------------------------------------------------------------


def kept_alive(made: Rig, make: Callable[[], torch.Tensor]) -> list[bool]:
    args = [make()]
    refs = [weakref.ref(a) for a in args]
    outputs = made(*args)
    refs += [weakref.ref(o) for o in outputs]
    del args, outputs
    gc.collect()
    return [r() is not None for r in refs]


def test_nothing_of_the_callers_is_kept_alive(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    assert kept_alive(made, lambda: torch.randn(N, N)) == [False, False]


def test_state_is_not_kept_alive(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    state = draft.tensor(STATE, 4)
    draft.task("aten.neg_.default", state, out=(state,), changes=(state,))
    made = rig(draft.graph((state,), ()))
    assert kept_alive(made, lambda: torch.ones(4)) == [False]


def test_nothing_is_kept_alive_after_an_error(rig: Callable[..., Rig]) -> None:
    def before(task: Task, operands: tuple[torch.Tensor, ...]) -> None:
        raise ValueError("hook failed")

    made = rig(negated(), hooks=[OpHook(before=before)])
    arg = torch.ones(3)
    ref = weakref.ref(arg)
    with pytest.raises(ValueError, match="hook failed"):
        made(arg)
    del arg
    gc.collect()
    assert ref() is None


# --- residency -------------------------------------------------------------------------------


def test_a_first_pass_reloads_what_should_be_there(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    made(torch.randn(N, N))
    counters = made.executor.counters
    assert counters.reloaded_bytes == counters.entry_reloaded_bytes == graph.weight_bytes
    made(torch.randn(N, N))
    counters = made.executor.counters
    assert counters.reloaded_bytes == counters.entry_reloaded_bytes == 0


def test_counters_of_a_steady_pass_are_those_of_the_plan(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64))
    for _ in range(2):
        made(torch.randn(N, N))
    counters = made.executor.counters
    assert counters.reloaded_bytes == made.memgraph.reloaded_bytes > 0
    assert counters.offloaded_bytes == made.memgraph.offloaded_bytes > 0
    assert counters.entry_reloaded_bytes == 0


def test_after_a_pass_the_exit_is_resident(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64) + 512)
    made(torch.randn(N, N))
    assert made.residents == {graph.buffers[r.buffer].key: r.extent for r in made.memgraph.exit}
    for residency in made.memgraph.exit:
        buffer = graph.buffers[residency.buffer]
        held = made.arena.slice(residency.extent, buffer.nbytes)
        assert torch.equal(held, byte_view(weights[buffer.name]))


def test_a_weight_in_another_place_is_reloaded(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    x = torch.randn(N, N)
    made(x)
    key = next(iter(made.residents))
    made.residents[key] = Extent(10**6, 256)
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))
    assert made.executor.counters.entry_reloaded_bytes == N * N * 4


def test_what_others_left_in_the_arena_does_not_matter(rig: Callable[..., Rig]) -> None:
    """Another pass used the arena in between, and says so by its residents."""
    graph, weights = deep()
    made = rig(graph, weights)
    x = torch.randn(N, N)
    made(x)
    made.arena.bytes.fill_(0xFF)
    made.residents.clear()
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))


def test_while_a_pass_runs_nothing_counts_as_resident(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    seen: list[Residents] = []
    made = rig(
        graph, weights, hooks=[OpHook(before=lambda t, o: seen.append(dict(made.residents)))]
    )
    made(torch.randn(N, N))
    made(torch.randn(N, N))
    assert seen and not any(seen)


def test_an_error_leaves_nothing_resident_and_the_next_pass_right(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    faults = [True]

    def after(task: Task, results: tuple[torch.Tensor, ...]) -> None:
        if task.index == 5 and faults:
            faults.pop()
            raise ValueError("hook failed")

    made = rig(
        graph, weights, arena_bytes=min_arena_bytes(graph, 64) + 256, hooks=[OpHook(after=after)]
    )
    x = torch.randn(N, N)
    with pytest.raises(ValueError, match="hook failed"):
        made(x)
    assert made.residents == {}
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))


# --- poison ----------------------------------------------------------------------------------


def test_vacated_extents_are_poisoned(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, poison=True)
    made.arena.bytes.zero_()
    made(torch.randn(N, N))
    kept = torch.zeros(made.arena.nbytes, dtype=torch.bool)
    for residency in made.memgraph.exit:
        kept[residency.extent.offset : residency.extent.end] = True
    dropped = [n.extent for n in made.memgraph.nodes if n.kind is NodeKind.DROP]
    assert dropped
    for extent in dropped:
        assert extent is not None and not kept[extent.offset : extent.end].any()
        assert (made.arena.slice(extent, extent.nbytes) == 0xFF).all()


def test_without_poison_vacated_extents_are_left_as_they_are(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    made.arena.bytes.zero_()
    made(torch.randn(N, N))
    assert not (made.arena.bytes == 0xFF).all()
    drops = [n.id for n in made.memgraph.nodes if n.kind is NodeKind.DROP]
    assert drops and not set(drops) & set(made.executor.actions)


# --- hooks -----------------------------------------------------------------------------------


def test_hooks_see_the_operands_and_the_results(rig: Callable[..., Rig]) -> None:
    graph, weights = deep(2)
    before: dict[int, list[torch.Tensor]] = {}
    after: dict[int, list[torch.Tensor]] = {}
    made = rig(
        graph,
        weights,
        hooks=[
            OpHook(
                before=lambda t, o: before.update({t.index: [x.clone() for x in o]}),
                after=lambda t, r: after.update({t.index: [x.clone() for x in r]}),
            )
        ],
    )
    x = torch.randn(N, N)
    (out,) = made(x)
    product = x @ weights["w0"]
    assert torch.equal(before[0][0], x) and torch.equal(before[0][1], weights["w0"])
    assert torch.equal(after[0][0], product)
    assert torch.equal(before[1][0], product)  # in place: before ...
    assert torch.equal(after[1][0], torch.tanh(product))  # ... and after
    assert torch.equal(after[4][0], out)
    assert [len(before[i]) for i in range(5)] == [2, 1, 2, 1, 2]


def test_hooks_see_constants_and_members_of_lists(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 1), draft.tensor(OUTPUT, 2)
    constant = draft.tensor(CONSTANT, 1, payload=byte_view(torch.tensor([5.0])).numpy().tobytes())
    draft.task("aten.cat.default", (x, constant), 0, out=(y,))
    seen: list[list[float]] = []
    made = rig(
        draft.graph((x,), (y,)),
        hooks=[OpHook(before=lambda t, o: seen.append([v.item() for v in o]))],
    )
    made(torch.tensor([4.0]))
    assert seen == [[4.0, 5.0]]


def test_hooks_come_in_order_around_the_task(rig: Callable[..., Rig]) -> None:
    log: list[str] = []

    def hook(name: str) -> OpHook:
        return OpHook(
            before=lambda t, o: log.append(f"before {name}"),
            after=lambda t, r: log.append(f"after {name}"),
        )

    made = rig(negated(), hooks=[hook("one"), OpHook(), hook("two")])
    made(torch.ones(3))
    assert log == ["before one", "before two", "after one", "after two"]


def test_hooks_may_come_and_go_between_passes(rig: Callable[..., Rig]) -> None:
    hooks: list[OpHook] = []
    log: list[int] = []
    made = rig(negated(), hooks=hooks)
    made(torch.ones(3))
    hooks.append(OpHook(before=lambda t, o: log.append(t.index)))
    made(torch.ones(3))
    hooks.clear()
    made(torch.ones(3))
    assert log == [0]


# --- spans -----------------------------------------------------------------------------------


def test_spans_are_not_recorded_unless_asked_for(rig: Callable[..., Rig]) -> None:
    made = rig(negated())
    made(torch.ones(3))
    assert made.executor.spans is None


@pytest.mark.parametrize("poison", [False, True])
def test_every_step_of_a_steady_pass_has_a_span(rig: Callable[..., Rig], poison: bool) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64), poison=poison)
    made(torch.randn(N, N))
    made.executor.spans = []
    for _ in range(2):  # a pass begins with none
        made(torch.randn(N, N))
    spans = sorted(made.executor.spans, key=lambda s: s.node)
    expected = lower(made.memgraph, poison=poison).merged
    assert [(s.node, s.lane) for s in spans] == [(s.node.id, s.lane) for s in expected]
    assert {s.lane for s in spans} == set(Lane)


def test_spans_of_a_lane_follow_each_other(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64), delay_seed=1)
    made(torch.randn(N, N))
    made.executor.spans = []
    made(torch.randn(N, N))
    for lane in Lane:
        times = [
            t
            for s in sorted(made.executor.spans, key=lambda s: s.node)
            if s.lane is lane
            for t in (s.start_ns, s.end_ns)
        ]
        assert times == sorted(times) and (not times or times[0] >= 0)


def test_spans_and_hooks_together(rig: Callable[..., Rig]) -> None:
    log: list[int] = []
    made = rig(negated(), hooks=[OpHook(after=lambda t, r: log.append(t.index))])
    made.executor.spans = []
    made(torch.ones(3))
    assert log == [0] and [s.lane for s in made.executor.spans] == [Lane.COMPUTE]


# --- several plans on one arena --------------------------------------------------------------


def test_two_passes_share_an_arena_and_its_residents(rig: Callable[..., Rig]) -> None:
    """As prefill and decode do: what one leaves in the same place the other need not reload."""
    graph, weights = deep()
    one = rig(graph, weights, poison=True)
    other = rig(graph, weights, policy="horizon", arena_bytes=one.arena.nbytes, poison=True)
    pool = HostPool(pinned=False)
    pool.reserve(other.memgraph.host_bytes)
    masters = {name: byte_view(w) for name, w in weights.items()}
    shared = Executor(
        other.memgraph,
        arena=one.arena,
        pool=pool,
        lanes=one.lanes,
        masters=masters,
        poison=True,
    )
    for _ in range(3):
        x = torch.randn(N, N)
        assert torch.equal(one(x)[0], deep_in_eager(x, weights))
        x = torch.randn(N, N)
        (found,) = shared.run((x,), (), one.residents)
        assert torch.equal(found, deep_in_eager(x, weights))
