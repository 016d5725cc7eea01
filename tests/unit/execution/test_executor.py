"""The executor on taskgraphs of real ops: results, arguments, outputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.errors import TaskMismatchError
from ds_finepage.execution.arena import HostPool, byte_view
from ds_finepage.execution.bound_plan import BoundPlan
from ds_finepage.execution.executor import Executor, OpHook
from ds_finepage.execution.program import lower
from ds_finepage.execution.reload_sources import ReloadSources
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import GraphOutput, Task
from ds_finepage.planning.liveness import min_arena_bytes
from tests.unit.execution.graphs import ACTIVATION, CONSTANT, INPUT, OUTPUT, STATE, WEIGHT, Draft
from tests.unit.execution.rig import (
    N,
    Rig,
    copied_to_host,
    deep,
    deep_in_eager,
    negated,
    thrice_tanh,
)
from tests.unit.planning.sketches import PAGING

every_policy = pytest.mark.parametrize("policy", PAGING)


# --- results ---------------------------------------------------------------------------------


DELAYED = [(4 * (s % 3), {"delay_seed": s, "poison": True}) for s in range(8)]


@every_policy
@pytest.mark.parametrize(("spare_units", "debug"), [(0, {}), (4, {}), (100, {}), *DELAYED])
def test_results_are_those_of_eager_pass_after_pass(
    rig: Callable[..., Rig], policy: str, spare_units: int, debug: dict[str, Any]
) -> None:
    """Delays and poison change none of them."""
    graph, weights = deep()
    arena_bytes = min_arena_bytes(graph, 64) + 64 * spare_units
    made = rig(graph, weights, arena_bytes=arena_bytes, policy=policy, **debug)
    for _ in range(3):
        x = torch.randn(N, N)
        (found,) = made(x)
        assert torch.equal(found, deep_in_eager(x, weights))


def test_the_callers_stream_follows_the_last_pass_before_rows_are_filled(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a wait for the caller's stream is enough before the host writes what a pass reads."""
    graph, weights = deep()
    made, order = rig(graph, weights), []
    monkeypatch.setattr(made.lanes, "follow", lambda: order.append("follow"))
    fill = ReloadSources.fill
    monkeypatch.setattr(ReloadSources, "fill", lambda *a: [order.append("fill"), fill(*a)].clear())
    made(torch.randn(N, N))
    assert order == ["follow", "fill"]


def test_a_pass_forgets_the_routes_of_the_last_one(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    made.executor._bound.route_values[0, 0] = [1]
    made(torch.randn(N, N))
    assert made.executor._bound.route_values == {}


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_to_host_memory_runs_beside_tasks(rig: Callable[..., Rig], inference: bool) -> None:
    graph = copied_to_host()
    for seed in range(5):
        made = rig(graph, arena_bytes=min_arena_bytes(graph, 64), delay_seed=seed)
        program = lower(made.memgraph)
        assert [step.node.task for step in program.lanes[Lane.D2H]] == [1]
        assert program.mean_transfer_bytes == 0  # without delays one thread does all of it
        with torch.inference_mode(inference):
            x = torch.randn(N, N)
            rows, out = made(x)
        assert torch.equal(rows, -x) and torch.equal(out, thrice_tanh(-x))


def test_a_weight_that_is_copied_to_the_host_leaves_its_master_alone(
    rig: Callable[..., Rig],
) -> None:
    draft = Draft()
    x = h = draft.tensor(INPUT, N, N)
    weights = {f"w{i}": torch.randn(N, N) / 3 for i in range(3)}
    tensors = {name: draft.tensor(WEIGHT, N, N, name=name) for name in weights}
    order = ["w0", "w1", "w2", "w0", "w1"]
    for name in order:
        y = draft.tensor(ACTIVATION, N, N)
        draft.task("aten.mm.default", h, tensors[name], out=(y,))
        h = y
    out = draft.tensor(OUTPUT, N, N)
    draft.task("aten.neg.default", h, out=(out,))
    graph = draft.graph((x,), (out,))
    masters = {name: byte_view(w.clone()) for name, w in weights.items()}
    arena_bytes = min_arena_bytes(graph, 64)
    made = rig(graph, masters=masters, arena_bytes=arena_bytes, policy="horizon-published")
    before = {name: master._version for name, master in masters.items()}
    given = torch.randn(N, N)
    expected = given
    for name in order:
        expected = expected @ weights[name]
    for _ in range(2):
        assert torch.equal(made(given)[0], -expected)
    assert made.executor.counters.offloaded_bytes == made.memgraph.offloaded_bytes > 0
    assert {name: master._version for name, master in masters.items()} == before


# --- arguments -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("make", [nn.Parameter, lambda t: t.requires_grad_()])
def test_an_argument_that_needs_a_gradient_gets_none(
    rig: Callable[..., Rig], make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    (found,) = rig(negated())(make(torch.ones(3)))
    assert torch.equal(found, -torch.ones(3)) and not found.requires_grad


def test_state_of_inference_mode_is_changed_outside_of_it(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    state = draft.tensor(STATE, 4)
    draft.task("aten.neg_.default", state, out=(state,), changes=(state,))
    made = rig(draft.graph((state,), ()))
    with torch.inference_mode():
        mine = torch.ones(4)
    made(mine)
    assert torch.equal(mine, -torch.ones(4))


def test_an_argument_that_is_returned_is_a_new_tensor(rig: Callable[..., Rig]) -> None:
    """The caller may give the result another form, and keep the argument."""
    draft = Draft()
    x, y = draft.tensor(INPUT, 3), draft.tensor(OUTPUT, 3)
    draft.task("aten.neg.default", x, out=(y,))
    given = torch.ones(3)
    same, _ = rig(draft.graph((x,), (x, y)))(given)
    assert same is not given and same.data_ptr() == given.data_ptr()


@pytest.mark.parametrize(
    ("arg", "found"),
    [(torch.ones(4), "(4,), strides (1,)"), (torch.ones(3, 2)[:, 0], "(3,), strides (2,)")],
    ids=["shape", "strides"],
)
def test_an_argument_of_another_form_is_refused(
    rig: Callable[..., Rig], arg: torch.Tensor, found: str
) -> None:
    made = rig(negated())
    with pytest.raises(TaskMismatchError) as caught:
        made(arg)
    message = str(caught.value)
    assert message.startswith(f"argument 0 of by hand has shape {found}")
    assert "captured were (3,), (1,)" in message
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


def test_a_returned_constant_is_a_copy(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    constant = draft.tensor(CONSTANT, 1, payload=byte_view(torch.tensor([5.0])).numpy().tobytes())
    made = rig(draft.graph((), (constant,)))
    made()[0].zero_()
    assert made()[0].item() == 5.0


def test_empty_tensors_go_through(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, w = draft.tensor(INPUT, 0, N), draft.tensor(WEIGHT, N, 0, name="w")
    h, y = draft.tensor(ACTIVATION, 0, 0), draft.tensor(OUTPUT, 0, 0)
    empty = draft.tensor(CONSTANT, 0, 0, payload=b"")
    draft.task("aten.mm.default", x, w, out=(h,))
    draft.task("aten.add.Tensor", h, empty, out=(y,))
    made = rig(draft.graph((x,), (y,)), {"w": torch.empty(N, 0)})
    assert made(torch.empty(0, N))[0].shape == (0, 0)


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


# --- several plans on one arena --------------------------------------------------------------


def test_two_passes_share_an_arena_and_its_residents(rig: Callable[..., Rig]) -> None:
    """As prefill and decode do: what one leaves in the same place the other need not reload."""
    graph, weights = deep()
    one = rig(graph, weights, poison=True)
    other = rig(graph, weights, policy="horizon", arena_bytes=one.arena.nbytes, poison=True)
    pool = HostPool(pinned=False)
    pool.reserve(other.memgraph.host_bytes)
    masters = {name: byte_view(w) for name, w in weights.items()}
    bound = BoundPlan(other.memgraph, arena=one.arena, pool=pool, masters=masters, poison=True)
    shared = Executor(bound, lanes=one.lanes)
    for _ in range(3):
        x = torch.randn(N, N)
        assert torch.equal(one(x)[0], deep_in_eager(x, weights))
        x = torch.randn(N, N)
        (found,) = shared.run((x,), (), one.residents)
        assert torch.equal(found, deep_in_eager(x, weights))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_every_mode_gives_the_same(rig: Callable[..., Rig], mode: Callable[[], Any]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    with mode():
        x = torch.randn(N, N)
        assert torch.equal(made(x)[0], deep_in_eager(x, weights))
    x = torch.randn(N, N)
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))


def test_outputs_belong_to_the_caller(rig: Callable[..., Rig]) -> None:
    """A later pass makes new ones, and what the caller does to them is its own affair."""
    made = rig(negated())
    (first,) = made(torch.ones(3))
    (second,) = made(torch.full((3,), 2.0))
    assert first.tolist() == [-1.0] * 3 and second.tolist() == [-2.0] * 3
