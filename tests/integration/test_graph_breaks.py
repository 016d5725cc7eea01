"""Models that Dynamo does not take whole: what is planned, what is not, and that all is right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import StoreError
from ds_finepage.runtime.handle import Handle
from tests.integration.parity import shows_masters

pytestmark = pytest.mark.usefixtures("fresh")

Same = Callable[[], bool]
DEBUG = DebugConfig(poison_vacated=True, lane_delay_seed=7)


@contextmanager
def attached(model: nn.Module, *inputs: torch.Tensor) -> Iterator[tuple[Handle, Same]]:
    """Attach; return the handle, and what says whether results are still those of before."""
    with torch.no_grad():
        plain = [model(x) for x in inputs]
        handle = attach(model, device_budget="1MiB", device="cpu")
        yield handle, lambda: all(map(torch.equal, map(model, inputs), plain))
    handle.detach()


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


def test_a_model_runs_by_plan_after_others_were_compiled_up_to_the_limit() -> None:
    x = torch.randn(2, 16)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for _ in range(4):
            torch.compile(Broken(""), backend=lambda graph, _: graph.forward)(x)
        with attached(Broken("").eval(), x) as (handle, same):
            assert same()
            assert handle.stats.num_unplanned_modules == 0 and handle.stats.num_captures == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_run_without_a_plan(kind: type[nn.RNNBase]) -> None:
    """In a graph torch takes other kernels for them, with other last bits."""
    torch.manual_seed(0)
    model = kind(16, 32, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        plain, _ = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        found, _ = model(x)
    handle.detach()  # Dynamo's limits are those of before
    assert torch.equal(found, plain)
    assert handle.stats.num_unplanned_modules == 1


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name.startswith("ds_finepage")]


@pytest.mark.parametrize(
    "kind", ("graph_break", "print", "branch on data", "data-dependent size", "disabled module")
)
def test_a_model_with_breaks_runs_in_pieces(
    kind: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = Broken(kind).eval(), [torch.randn(n, 16) for n in (8, 8, 5)]
    with attached(model, *inputs) as (handle, same):
        with caplog.at_level(logging.WARNING, "ds_finepage"):
            assert same()
        handle.replan(budget_bytes=handle.stats.min_budget_bytes, debug=DEBUG)
        assert same()
        stats = handle.stats
    assert len({p.name for p in stats.passes}) >= 2  # the pieces are planned
    assert stats.num_unplanned_graphs == 0
    if kind == "disabled module":
        assert stats.num_unplanned_modules == 2 * len(inputs)
        assert stats.unplanned_reasons == ("module third is called outside any graph",)
        assert [r.message for r in ours(caplog)] == [
            "running without a plan: module third is called outside any graph"
        ]
    else:
        assert stats.num_unplanned_modules == 0
        assert not ours(caplog)
    assert same()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_graph_with_a_size_that_depends_on_data_runs_without_a_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Broken("data-dependent size in the graph").eval()
    with attached(model, *(torch.randn(8, 16) for _ in range(3))) as (handle, same):
        with caplog.at_level(logging.WARNING, "ds_finepage"):
            assert same()
        assert handle.stats.num_captures == 0
        assert handle.stats.num_unplanned_graphs == 3
        (reason,) = handle.stats.unplanned_reasons
        (record,) = ours(caplog)
        assert record.message == f"running without a plan: {reason}"
        assert shows_masters(handle)


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
    name, make = OUTSIDE[kind]
    with attached(make(), torch.randn(4, 16)) as (handle, same):
        for seed in range(3):
            handle.replan(debug=DebugConfig(poison_vacated=True, lane_delay_seed=seed))
            for _ in range(2):
                assert same()
                assert shows_masters(handle)
        assert handle.stats.num_unplanned_modules >= 6
        reason = f"module {name} is called outside any graph"
        assert handle.stats.unplanned_reasons.count(reason) == 1
    assert same()


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
    with attached(Stack().eval(), torch.randn(4, 16)) as (handle, same):
        for policy in ("finepage", "horizon"):
            handle.replan(policy=policy, debug=DEBUG)
            assert same() and same() and same()
        assert handle.stats.num_captures == 8
        assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


class FailsWhileTraced(nn.Module):
    """Makes a mask while it is traced that does not fit, and none otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if torch.compiler.is_compiling():
            x = x + torch.ones(3, 5)
        return self.second(x)


def test_a_forward_that_fails_only_while_it_is_traced_runs_eagerly() -> None:
    suppressed = torch._dynamo.config.suppress_errors
    with attached(FailsWhileTraced().eval(), torch.randn(8, 16)) as (handle, same):
        assert same() and same()
        stats = handle.stats
        assert stats.num_unplanned_modules == 2 * 2
        assert [reason.split()[1] for reason in stats.unplanned_reasons] == ["first", "second"]
        assert torch._dynamo.config.suppress_errors == suppressed


def test_an_error_of_the_forward_itself_is_that_of_plain_pytorch() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    handle = attach(model, device_budget="1MiB", device="cpu")
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        model(torch.randn(8, 3))
    x = torch.randn(8, 16)
    found = model(x)
    handle.detach()
    assert torch.equal(found, model(x))


class Scans(nn.Module):
    """Sums up in another order where it is compiled, as transformers' Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.use_associative_scan = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.use_associative_scan and torch.compiler.is_compiling():
            return x.view(4, -1, 16).sum(0).sum(0)
        total = torch.zeros(16)
        for row in x.unbind():
            total = total + row
        return total


def test_an_algorithm_for_compiled_models_is_not_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scans()).eval()
    with attached(model, torch.randn(32, 16)) as (handle, same):
        assert same()
        assert handle.stats.num_captures == 1 and not handle.stats.unplanned_reasons
    assert model[0].use_associative_scan is True


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
    inputs = [torch.randn(n, 16) for n in (2, 3, 4, 5)]
    with attached(Broken("").eval(), *inputs) as (handle, same):
        with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
            assert same()
        assert handle.stats.num_captures == 2
        assert handle.stats.num_unplanned_modules == 3 * 2


def test_any_number_of_models_of_a_class_run_by_plan_one_after_another() -> None:
    x = torch.randn(2, 16)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for _ in range(4):
            with attached(Broken("graph_break").eval(), x) as (handle, same):
                assert same()
                assert handle.stats.num_unplanned_modules == 0
        assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(Broken.forward.__code__)


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
    with attached(SharesWithABreak().eval(), torch.randn(4, 16)) as (handle, same):
        assert same() and same() and same()
        assert handle.stats.num_resident_runs and handle.stats.num_unplanned_modules
