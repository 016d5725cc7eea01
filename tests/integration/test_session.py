"""Life of an attached model: hooks, errors, interrupts, fallbacks, callers' modes, detach."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import InvalidPlanError, PlanInfeasibleError, StoreError
from ds_finepage.execution import stores
from ds_finepage.graph.memgraph import NodeKind
from ds_finepage.graph.taskgraph import Task
from ds_finepage.session import Handle
from tests.integration.families import logits, make_model, token_ids, tokens

PROMPT = token_ids(6)
DEBUG = DebugConfig(poison_vacated=True, lane_delay_seed=7)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, Handle]]:
    """A one-layer model, its plain logits and tokens, and a handle that has captured both."""
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    plain = logits(model, PROMPT), tokens(model, PROMPT, 6)
    handle = attach(model, device_budget="16MiB", device="cpu")
    logits(model, PROMPT)
    tokens(model, PROMPT, 6)
    yield model, *plain, handle
    handle.detach()


@pytest.fixture
def attached(
    llama: tuple[Any, torch.Tensor, torch.Tensor, Handle],
) -> tuple[Any, torch.Tensor, torch.Tensor, Handle]:
    """The same, under the least budget and with debug mode on."""
    handle = llama[3]
    handle.replan(budget_bytes=handle.stats.min_budget_bytes, policy="finepage", debug=DEBUG)
    return llama


def tiny(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()


# Attaching and detaching.


def our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("finepage")}


def test_detaching_gives_the_model_back_as_it_was() -> None:
    torch._dynamo.reset()
    model = make_model("gemma", num_hidden_layers=1)
    plain, limit = logits(model, PROMPT), torch._dynamo.config.recompile_limit
    before, threads = looks(model), our_threads()
    for _ in range(2):
        handle = attach(model, device_budget="16MiB", device="cpu")
        assert handle.attached
        assert our_threads() > threads
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        assert model.generation_config.disable_compile is True
        assert torch.equal(logits(model, PROMPT), plain)
        handle.detach()
        handle.detach()
        assert not handle.attached
        assert looks(model) == before
        assert torch._dynamo.config.recompile_limit == limit
        assert our_threads() <= threads
        assert torch.equal(logits(model, PROMPT), plain)


def looks(model: nn.Module) -> list[Any]:
    """Describe everything that attaching might have left behind."""
    found: list[Any] = [model._compiled_call_impl, model.generation_config.to_dict()]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert not parameter.is_inference()
        found.append((name, id(parameter), parameter.data_ptr(), parameter.shape))
        found.append((parameter.stride(), parameter.requires_grad, hash_of(parameter)))
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in vars(module).items() if "hooks" in k and hasattr(v, "__len__")]
        found.append((name, sorted(vars(module)), hooks))
    return found


def hash_of(parameter: torch.Tensor) -> bytes:
    return parameter.detach().view(torch.uint8).numpy().tobytes()


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(StoreError, match="parameter 0.weight is on the meta device"):
        attach(model, device_budget="1MiB", device="cpu")
    assert model._compiled_call_impl is None


def test_a_model_is_attached_once_at_a_time() -> None:
    model, x = tiny(), torch.randn(3, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        with pytest.raises(StoreError, match=r"parameter 0.weight has .* no data.* detach it"):
            attach(model, device_budget="1MiB", device="cpu")
        assert torch.equal(model(x), plain)
    handle.detach()


def test_a_parameter_that_somebody_filled_is_taken_back() -> None:
    model, x = tiny(), torch.randn(3, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        assert torch.equal(model(x), plain)
        model[0].weight.data = torch.empty(0)  # what GatheredParameters leaves behind
        assert torch.equal(model(x), plain)
    assert handle.stats.passes[0].last_entry_reloaded_bytes == handle.stats.weight_bytes
    handle.detach()


class MixedTypes(nn.Module):
    """bfloat16 products with float32 norms, as models keep them, and a column-major weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.bfloat16()
        self.norm.float()
        self.down.weight.data = self.down.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.float()).to(self.up.weight.dtype)
        return self.down(nn.functional.gelu(self.up(x)))


def test_weights_of_two_types_and_odd_layouts() -> None:
    torch._dynamo.reset()
    model, x = MixedTypes().eval(), torch.randn(5, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        assert torch.equal(model(x), plain)
        for policy in ("finepage", "horizon"):
            least = handle.stats.min_budget_bytes
            handle.replan(budget_bytes=least, policy=policy, debug=DEBUG)
            assert torch.equal(model(x), plain)
    handle.detach()
    assert model.down.weight.stride() == (1, 32)
    assert torch.equal(model(x), plain)


# Budgets and policies.


def test_replanning_goes_on_under_another_policy_and_budget(attached: Any) -> None:
    model, plain, plain_tokens, handle = attached
    for policy in ("horizon", "horizon-outputs", "finepage"):
        for budget in (handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes):
            handle.replan(policy=policy, budget_bytes=budget)
            assert handle.stats.budget_bytes == budget
            assert torch.equal(logits(model, PROMPT), plain)
            assert torch.equal(tokens(model, PROMPT, 6), plain_tokens)
            plans = handle.plans()
            assert {p.policy for p, _ in plans} == {policy}
            for stats, (memgraph, timeline) in zip(handle.stats.passes, plans, strict=True):
                assert stats.arena_bytes == memgraph.arena_bytes <= budget - stats.around_bytes
                assert timeline.total_ns > 0


def test_the_last_row_of_a_batch_is_that_of_plain_transformers() -> None:
    model, ids = make_model("llama"), token_ids(100, batch=6)
    last: dict[str, Any] = {"logits_to_keep": 1}  # a slice: its product is folded, or it is not
    plain = logits(model, ids, **last)
    handle = attach(model, device_budget="64MiB", device="cpu")
    handle.register_op_hook()  # the engine does not step aside
    assert torch.equal(logits(model, ids, **last), plain)
    assert handle.stats.num_aside_runs == 0
    handle.detach()


def test_a_prefill_that_comes_again_leaves_the_decode_steps_weights_alone() -> None:
    model = make_model("llama")
    prompt, plain = token_ids(40), tokens(model, token_ids(40), 6)
    handle = attach(model, device_budget="64MiB", device="cpu")
    try:
        tokens(model, prompt, 6)
        middle = (handle.stats.min_budget_bytes + handle.stats.needed_budget_bytes) // 2
        handle.replan(budget_bytes=middle, debug=DEBUG)
        moved = []
        for _ in range(4):
            before = handle.stats.reloaded_bytes
            assert torch.equal(tokens(model, prompt, 6), plain)
            moved.append(handle.stats.reloaded_bytes - before)
        prefill = min(handle.stats.passes, key=lambda p: p.num_runs)
        assert prefill.last_entry_reloaded_bytes == 0
        assert moved[-1] == moved[-2] < moved[0]
        num_plans = handle.stats.num_plans
        tokens(model, prompt, 6)
        assert handle.stats.num_plans == num_plans  # it is settled
    finally:
        handle.detach()


def test_a_budget_below_one_op_names_the_op_and_both_numbers_and_more_works() -> None:
    model, x = tiny(), torch.randn(3, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget=1000, device="cpu")
        with pytest.raises(
            PlanInfeasibleError, match=r"task \d+ aten\.addmm\.default \(\S+\) needs"
        ) as e:
            model(x)
        assert "device_budget is 1000 bytes" in str(e.value)
        least = int(str(e.value).split("min_budget_bytes ")[1].split(";")[0])
        with pytest.raises(PlanInfeasibleError, match="device_budget is 1000 bytes"):
            model(x)
        handle.replan(budget_bytes=least)
        assert torch.equal(model(x), plain)
        assert handle.stats.min_budget_bytes == least
        handle.replan(budget_bytes=least - 1)
        with pytest.raises(PlanInfeasibleError, match=f"device_budget is {least - 1} bytes"):
            model(x)
        handle.replan(budget_bytes=least)
        assert torch.equal(model(x), plain)
    handle.detach()


class TwoShapes(nn.Module):
    """One pass needs much in the arena and little around it, the other the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(256, 256, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, long: torch.Tensor | None = None) -> Any:
        return self.large(x) if long is None else self.small(long)


def test_the_least_budget_is_enough_for_every_pass_whatever_ran_before() -> None:
    model, x, long = TwoShapes(), torch.randn(1, 256), torch.randn(8192, 16)
    with torch.no_grad():
        plain = model(x), model(x, long)
        handle = attach(model, device_budget="64MiB", device="cpu")
        model(x), model(x, long)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes, debug=DEBUG)
        for _ in range(2):
            assert torch.equal(model(x), plain[0])
            assert torch.equal(model(x, long), plain[1])
    for memgraph, _ in handle.plans():
        assert memgraph.arena_bytes < handle.stats.budget_bytes
    handle.detach()


def test_nothing_outlives_the_arena() -> None:
    """A view that somebody kept does not keep the bytes when the arena is given back."""
    model, x = tiny(), torch.randn(3, 16)
    kept: list[torch.Tensor] = []
    handle = attach(model, device_budget="1MiB", device="cpu")
    handle.register_op_hook(after=lambda task, results: kept.extend(results))
    with torch.no_grad():
        model(x)
    in_arena = [t for t in kept if t.untyped_storage().nbytes() > 1 << 18]
    assert in_arena
    handle.detach()
    assert all(t.untyped_storage().nbytes() == 0 for t in in_arena)


# Hooks, and what is raised in them.


def test_op_hooks_see_every_task_until_they_are_removed(attached: Any) -> None:
    model, plain, _, handle = attached
    logits(model, PROMPT)
    (forward,) = [p for p, _ in handle.plans() if p.graph.name == handle.stats.passes[0].name]
    seen: list[tuple[str, Task]] = []
    shapes: list[Any] = []

    def before(task: Task, operands: tuple[torch.Tensor, ...]) -> None:
        seen.append(("before", task))
        shapes.append([tuple(t.shape) for t in operands])

    def after(task: Task, results: tuple[torch.Tensor, ...]) -> None:
        seen.append(("after", task))
        assert [tuple(t.shape) for t in results] == [
            forward.graph.tensors[r].shape for r in task.results if r is not None
        ]

    remove = handle.register_op_hook(before, after)
    only_after = handle.register_op_hook(after=lambda task, results: seen.append(("2nd", task)))
    assert torch.equal(logits(model, PROMPT), plain)
    computed = [n.task for n in forward.nodes if n.kind is NodeKind.COMPUTE]
    assert computed == [t.index for t in forward.graph.tasks]
    expected = [(w, t) for t in forward.graph.tasks for w in ("before", "after", "2nd")]
    assert seen == expected
    assert (1, PROMPT.shape[1]) in shapes[0]
    remove()
    only_after()
    seen.clear()
    assert torch.equal(logits(model, PROMPT), plain)
    assert seen == []


@pytest.mark.parametrize("error", (KeyboardInterrupt, ValueError), ids=lambda e: e.__name__)
@pytest.mark.parametrize("when", ("first", "middle", "last"))
def test_after_an_error_in_the_middle_of_generate_the_next_call_is_right(
    attached: Any, error: type[BaseException], when: str
) -> None:
    model, plain, plain_tokens, handle = attached
    count = count_tasks(handle, lambda: tokens(model, PROMPT, 6))
    at = {"first": 1, "middle": count // 2, "last": count}[when]
    left = at

    def interrupt(task: Task, tensors: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("from a hook")

    remove = handle.register_op_hook(before=interrupt)
    with pytest.raises(error, match="from a hook"):
        tokens(model, PROMPT, 6)
    remove()
    assert torch.equal(tokens(model, PROMPT, 6), plain_tokens)
    assert torch.equal(logits(model, PROMPT), plain)


def count_tasks(handle: Handle, run: Callable[[], Any]) -> int:
    found = []
    remove = handle.register_op_hook(after=lambda task, results: found.append(task))
    run()
    remove()
    return len(found)


def test_an_error_leaves_nothing_that_is_taken_for_resident(attached: Any) -> None:
    model, plain, _, handle = attached
    handle.replan(budget_bytes=handle.stats.needed_budget_bytes)
    for _ in range(2):
        logits(model, PROMPT)
    assert handle.stats.passes[0].last_reloaded_bytes == 0

    def fail(task: Task, tensors: Any) -> None:
        raise ValueError

    remove = handle.register_op_hook(after=fail)
    with pytest.raises(ValueError):
        logits(model, PROMPT)
    remove()
    assert torch.equal(logits(model, PROMPT), plain)
    assert handle.stats.passes[0].last_entry_reloaded_bytes == handle.stats.weight_bytes


# Models that Dynamo does not take whole.


class Broken(nn.Module):
    """A model with something between its layers that ends a graph, or cannot be in a plan."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "graph_break":
            torch._dynamo.graph_break()
        elif self.kind == "print":
            print("between two layers")  # noqa: T201
        elif self.kind == "branch on data":
            if x.sum().item() > 1e6:
                x = x + 1
        elif self.kind == "disabled module":
            x = self.outside(x)
        elif self.kind in ("data-dependent size", "data-dependent size in the graph"):
            x = x[x[:, 0] > 0]
        return self.third(torch.nn.functional.gelu(self.second(x)))

    @torch.compiler.disable
    def outside(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(x)


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name.startswith("ds_finepage")]


@pytest.mark.parametrize(
    "kind", ("graph_break", "print", "branch on data", "data-dependent size", "disabled module")
)
def test_a_model_with_breaks_runs_in_pieces(
    kind: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model, inputs = Broken(kind).eval(), [torch.randn(n, 16) for n in (8, 8, 5)]
    with torch.no_grad():
        plain = [model(x) for x in inputs]
        handle = attach(model, device_budget="1MiB", device="cpu")
        with caplog.at_level(logging.WARNING, "ds_finepage"):
            assert all(torch.equal(model(x), y) for x, y in zip(inputs, plain, strict=True))
        handle.replan(budget_bytes=handle.stats.min_budget_bytes, debug=DEBUG)
        assert all(torch.equal(model(x), y) for x, y in zip(inputs, plain, strict=True))
    stats = handle.stats
    assert len({p.name for p in stats.passes}) >= 2  # the pieces are planned
    assert stats.num_unplanned_graphs == 0
    if kind == "disabled module":
        assert stats.num_unplanned_modules == 2 * len(inputs)
        assert stats.unplanned_reasons == ["module third is called outside any graph"]
        assert [r.message for r in ours(caplog)] == [
            "running without a plan: module third is called outside any graph"
        ]
    else:
        assert stats.num_unplanned_modules == 0
        assert not ours(caplog)
    handle.detach()
    assert torch.equal(model(inputs[0]), plain[0])


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_graph_with_a_size_that_depends_on_data_runs_without_a_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    model = Broken("data-dependent size in the graph").eval()
    inputs = [torch.randn(8, 16) for _ in range(3)]
    with torch.no_grad():
        plain = [model(x) for x in inputs]
        handle = attach(model, device_budget="1MiB", device="cpu")
        with caplog.at_level(logging.WARNING, "ds_finepage"):
            assert all(torch.equal(model(x), y) for x, y in zip(inputs, plain, strict=True))
    assert handle.stats.num_captures == 0
    assert handle.stats.num_unplanned_graphs == 3
    (reason,) = handle.stats.unplanned_reasons
    (record,) = ours(caplog)
    assert record.message == f"running without a plan: {reason}"
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    handle.detach()


class Outside(nn.Linear):
    """A module that Dynamo is told to leave alone."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class BreaksInside(nn.Linear):
    """A module that breaks while its own weights are in use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.t()
        torch._dynamo.graph_break()
        return y + self.bias * self.weight[0]


def with_module(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), module, nn.Linear(16, 16)).eval()


OUTSIDE: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "disabled forward": ("1", lambda: with_module(Outside(16, 16))),
    "break inside": ("1", lambda: with_module(BreaksInside(16, 16))),
    "disabled module": (
        "1._orig_mod",
        lambda: with_module(torch.compiler.disable(nn.Linear(16, 16))),
    ),
    "disabled root": ("at the root", lambda: Outside(16, 16)),
    "broken root": ("at the root", lambda: BreaksInside(16, 16)),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_module_outside_any_graph_gets_its_weights(kind: str) -> None:
    torch._dynamo.reset()
    name, make = OUTSIDE[kind]
    model, x = make(), torch.randn(4, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        for seed in range(3):
            handle.replan(debug=DebugConfig(poison_vacated=True, lane_delay_seed=seed))
            for _ in range(2):
                assert torch.equal(model(x), plain)
                assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    assert handle.stats.num_unplanned_modules >= 6
    reason = f"module {name} is called outside any graph"
    assert handle.stats.unplanned_reasons.count(reason) == 1
    handle.detach()
    assert torch.equal(model(x), plain)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(nn.functional.gelu(y))


class Stack(nn.Module):
    """Dynamo has one graph for all layers, and passes it the weights of one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_share_a_graph_have_weights_of_their_own() -> None:
    torch._dynamo.reset()
    model, x = Stack().eval(), torch.randn(4, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        for policy in ("finepage", "horizon"):
            handle.replan(policy=policy, debug=DEBUG)
            for _ in range(3):
                assert torch.equal(model(x), plain)
    assert handle.stats.num_captures == 8
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    handle.detach()


class Counts(nn.Module):
    """Changes a weight while it runs, itself or through a view."""

    def __init__(self, through_view: bool) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.through_view = through_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = self.calls[1] if self.through_view else self.calls
        changed.add_(1)
        return x + changed.sum() + self.calls.sum()


@pytest.mark.parametrize("through_view", (False, True))
def test_a_forward_that_changes_a_weight_is_refused(through_view: bool) -> None:
    torch._dynamo.reset()
    model, x = Counts(through_view), torch.zeros(4)
    handle = attach(model, device_budget="1MiB", device="cpu")
    for _ in range(2):
        with pytest.raises(StoreError, match="changes a weight, and host masters are read-only"):
            model(x)
    assert "writes to weight calls" in handle.stats.unplanned_reasons[0]
    handle.detach()
    assert not model.calls.any()
    assert torch.equal(model(x), x + (4 + 4 if through_view else 8 + 8))


def test_behind_the_recompile_limit_a_model_still_runs() -> None:
    torch._dynamo.reset()
    model = Broken("").eval()
    inputs = [torch.randn(n, 16) for n in (2, 3, 4, 5)]
    with torch.no_grad():
        plain = [model(x) for x in inputs]
        handle = attach(model, device_budget="1MiB", device="cpu")
        with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
            assert all(torch.equal(model(x), y) for x, y in zip(inputs, plain, strict=True))
    assert handle.stats.num_captures == 2
    assert handle.stats.num_unplanned_modules == 3 * 2
    handle.detach()


@pytest.mark.parametrize(
    "function",
    (
        lambda x: x,
        lambda x: x.view(-1),
        lambda x: (x, None, 3),
        lambda x: torch.zeros(3),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: (x + 1).t(),
        lambda x: x.split(2),
        lambda x: torch.ops.aten.sort(x),
        lambda x: x[:0] * 2,
    ),
)
def test_odd_little_graphs(function: Callable[[torch.Tensor], Any]) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    torch._dynamo.reset()
    model, x = Odd(), torch.arange(12.0).view(4, 3)
    plain = model(x)
    handle = attach(model, device_budget="1MiB", device="cpu")
    for _ in range(2):
        found = model(x)
        pairs = zip(*(p if isinstance(p, tuple) else (p,) for p in (found, plain)), strict=True)
        for a, b in pairs:
            assert type(a) is type(b)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert not isinstance(a, torch.Tensor) or a.stride() == b.stride()
    assert handle.stats.num_unplanned_graphs == 0
    handle.detach()


# Callers.


def test_two_threads_on_one_model_take_turns(attached: Any) -> None:
    model, plain, plain_tokens, handle = attached
    failed: list[Any] = []

    def run() -> None:
        try:
            torch.set_num_threads(1)
            for _ in range(4):
                assert torch.equal(logits(model, PROMPT), plain)
                assert torch.equal(tokens(model, PROMPT, 6), plain_tokens)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad, torch.enable_grad))
def test_callers_in_every_grad_mode(attached: Any, mode: Any) -> None:
    model, plain, plain_tokens, _ = attached
    with mode():
        found = model(PROMPT).logits
        assert torch.equal(found, plain)
        assert not found.requires_grad
        made = model.generate(
            PROMPT, max_new_tokens=6, do_sample=False, cache_implementation="static"
        )
    assert torch.equal(made, plain_tokens)


def test_modes_do_not_spoil_each_other(attached: Any) -> None:
    model, plain, _, handle = attached
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad) * 2:
        handle.replan()  # what one mode has made must be writable in the next
        with mode():
            assert torch.equal(model(PROMPT).logits, plain)
            assert torch.equal(model(PROMPT).logits, plain)


def test_a_caller_under_autocast_gets_what_autocast_gives() -> None:
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    plain = logits(model, PROMPT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain_cast = logits(model, PROMPT)
    assert plain_cast.dtype is torch.bfloat16
    handle = attach(model, device_budget="16MiB", device="cpu")
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(logits(model, PROMPT), plain_cast)
        assert torch.equal(logits(model, PROMPT), plain)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes, debug=DEBUG)
    handle.detach()


# Plans in a folder.


def saved(model: nn.Module, folder: Path, x: torch.Tensor, **settings: Any) -> Handle:
    torch._dynamo.reset()
    handle = attach(model, device_budget="1MiB", plan_dir=str(folder), device="cpu", **settings)
    try:
        with torch.no_grad():
            model(x)
    finally:
        handle.detach()
    return handle


def test_plans_are_saved_and_loaded_again(tmp_path: Path) -> None:
    x, folder = torch.randn(3, 16), tmp_path / "new" / "plans"
    assert saved(tiny(), folder, x).stats.num_plans == 1
    (path,) = folder.iterdir()
    text = path.read_bytes()
    model = tiny()
    plain = model(x)
    again = saved(model, folder, x)
    assert again.stats.num_plans == 0
    assert again.stats.num_captures == 1
    assert torch.equal(model(x), plain)
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == text
    assert saved(tiny(), folder, x, policy="horizon").stats.num_plans == 1
    assert len(list(folder.iterdir())) == 2


def wider(folder: Path, x: torch.Tensor) -> bytes:
    """Plan another model elsewhere and return its file."""
    other = folder.parent / "other"
    torch.manual_seed(0)
    saved(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)).eval(), other, x)
    (path,) = other.iterdir()
    return path.read_bytes()


def of_version(text: bytes, key: str, value: Any) -> bytes:
    document = json.loads(text)
    document[key] = value
    return json.dumps(document).encode()


BAD_PLANS: dict[str, tuple[Callable[[bytes, Path, torch.Tensor], bytes], str]] = {
    "another model": (
        lambda text, folder, x: wider(folder, x),
        "a plan file of another model or version",
    ),
    "another format": (lambda text, folder, x: of_version(text, "format", 99), "format version 99"),
    "corrupt": (lambda text, folder, x: text[: len(text) // 2], "corrupt JSON"),
    "empty": (lambda text, folder, x: b"", "corrupt JSON"),
    "another kind": (lambda text, folder, x: b"{}", "not a file of ds_finepage"),
}


@pytest.mark.parametrize("bad", BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused_by_name(bad: str, tmp_path: Path) -> None:
    spoil, message = BAD_PLANS[bad]
    x, folder = torch.randn(3, 16), tmp_path / "plans"
    saved(tiny(), folder, x)
    (path,) = folder.iterdir()
    path.write_bytes(spoil(path.read_bytes(), folder, x))
    model = tiny()
    plain = model(x)
    with pytest.raises(InvalidPlanError, match=message) as error:
        saved(model, folder, x)
    assert str(path) in str(error.value)
    assert torch.equal(model(x), plain)
    path.unlink()
    assert saved(model, folder, x).stats.num_plans == 1


class SharesWithABreak(nn.Module):
    """A module that breaks has its weight in common with one that is part of a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = BreaksInside(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_module_outside_any_graph_leaves_weights_to_graphs_that_run_by_themselves() -> None:
    torch._dynamo.reset()
    model, x = SharesWithABreak().eval(), torch.randn(4, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        assert all(torch.equal(model(x), plain) for _ in range(3))
    assert handle.stats.num_aside_runs and handle.stats.num_unplanned_modules
    handle.detach()


def test_weights_that_do_not_all_get_their_bytes_give_back_those_that_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    model, x = with_module(nn.Linear(16, 16)), torch.randn(4, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        fill = stores.WeightTable._fill_block

        def fails(table: stores.WeightTable) -> None:
            fill(table)
            raise RuntimeError("no memory")

        with monkeypatch.context() as patched:
            patched.setattr(stores.WeightTable, "_fill_block", fails)
            with pytest.raises(RuntimeError, match="no memory"):
                model(x)
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        assert torch.equal(model(x), plain)
    handle.detach()
