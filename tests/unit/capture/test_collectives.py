"""Collectives in Dynamo's graphs become tasks that begin and wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

from ds_finepage.capture.recording import record
from ds_finepage.checker.checker import check
from ds_finepage.errors import CaptureError
from ds_finepage.execution import collectives as ops
from ds_finepage.graph.collectives import ALL_GATHER, ALL_REDUCE
from ds_finepage.graph.taskgraph import TaskGraph
from tests.unit.capture.process_group import one_rank
from tests.unit.capture.replay import by_dynamo, replay
from tests.unit.planning.sketches import plan

assert ops  # defines them


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[str]:
    with one_rank() as name:
        yield name


def run(function: Callable[..., Any], x: torch.Tensor) -> tuple[TaskGraph, Any]:
    """Capture a function, compare the replay with the function, and return the taskgraph."""
    ((graph, args),) = by_dynamo(function, (x,))
    found = record(graph, args)
    (expected,) = graph.module(*args)
    (result,) = replay(found, args)
    assert torch.equal(result, expected)
    assert torch.equal(result, function(x))
    check(plan(found, policy="lru", arena_bytes=1 << 16, alignment=64))
    return found, result


def names(graph: TaskGraph) -> list[str]:
    return [t.op.removeprefix("aten.").removesuffix(".default") for t in graph.tasks]


def reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    distributed.all_reduce(y)
    return y + 1


def reduced_apart(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return functional.all_reduce(y, "max", distributed.group.WORLD) + y


def reduced_into_a_part(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).t()
    distributed.all_reduce(y)
    return y + 1


def gathered(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    distributed.all_gather_into_tensor(y, x * 2)
    return y + 1


def gathered_apart(x: torch.Tensor) -> torch.Tensor:
    name = distributed.group.WORLD.group_name
    found = torch.ops._c10d_functional.all_gather_into_tensor(x * 2, 1, name)
    return torch.ops._c10d_functional.wait_tensor(found) + 1


class Reduced(torch.autograd.Function):
    """As AutoTP's layers call a collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def reduced_with_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_() * 2
        return Reduced.apply(y).detach() + 1  # type: ignore[no-untyped-call]


REDUCE, GATHER = ALL_REDUCE.removesuffix(".default"), ALL_GATHER.removesuffix(".default")
EXPECTED: dict[Callable[..., Any], list[str]] = {
    reduced_in_place: ["mul.Tensor", REDUCE, "add.Tensor"],
    reduced_apart: ["mul.Tensor", "clone", REDUCE, "add.Tensor"],
    reduced_into_a_part: ["mul.Tensor", "clone", REDUCE, "copy_", "add.Tensor"],
    reduced_with_gradients: ["mul.Tensor", REDUCE, "add.Tensor"],
    gathered: ["new_empty", "mul.Tensor", GATHER, "add.Tensor"],
    gathered_apart: ["mul.Tensor", "new_empty", GATHER, "add.Tensor"],
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor. is deprecated:FutureWarning")
@pytest.mark.parametrize("function", EXPECTED, ids=lambda f: f.__name__)
def test_a_collective_is_one_task(function: Callable[..., Any]) -> None:
    graph, _ = run(function, torch.randn(4, 6))
    assert names(graph) == EXPECTED[function]


def test_a_task_knows_its_group(group: str) -> None:
    graph, _ = run(reduced_in_place, torch.randn(4, 6))
    assert graph.tasks[1].args[1:] == ("sum", group, 1)
    graph, _ = run(gathered, torch.randn(4, 6))
    assert graph.tasks[2].args[2:] == (group, 1)


def scattered(x: torch.Tensor) -> torch.Tensor:
    return functional.reduce_scatter_tensor(x * 2, "sum", 0, distributed.group.WORLD)


def averaged(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x * 2, "avg", distributed.group.WORLD)


@pytest.mark.parametrize("function", [scattered, averaged])
def test_a_collective_without_a_task_is_refused(function: Callable[..., Any]) -> None:
    ((graph, args),) = by_dynamo_unrun(function, torch.randn(4, 6))
    with pytest.raises(CaptureError, match="_c10d_functional.* may wait for other ranks"):
        record(graph, args)


def by_dynamo_unrun(function: Callable[..., Any], x: torch.Tensor) -> list[tuple[Any, Any]]:
    """Return a graph without running it: gloo has no averages."""
    runs: list[tuple[Any, Any]] = []

    class _Seen(Exception):
        pass

    def backend(module: Any, example: Any) -> Callable[..., Any]:
        from ds_finepage.capture.dynamo_graph import DynamoGraph

        def run(*args: Any) -> Any:
            runs.append((DynamoGraph(module, example, {}, "graph"), args))
            raise _Seen

        return run

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(_Seen):
        torch.compile(function, backend=backend)(x)
    return runs
