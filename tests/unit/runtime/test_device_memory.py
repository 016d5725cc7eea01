"""The states of the device memory, and what each leaves behind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.config import DebugConfig
from ds_finepage.execution.masters import weights_of
from ds_finepage.execution.stores import WeightTable
from ds_finepage.graph.memgraph import Extent
from ds_finepage.runtime import device_memory
from ds_finepage.runtime.device_memory import DeviceMemory, DeviceState
from ds_finepage.runtime.passes import Pass
from tests.unit.runtime.settings import planned_pass, run_settings

CPU = torch.device("cpu")
NBYTES = 1024


@pytest.fixture(autouse=True)
def _unreal_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind passes to objects that note their arguments; the graphs have no real ops."""
    monkeypatch.setattr(device_memory, "BoundPlan", lambda memgraph, **kw: SimpleNamespace(**kw))
    monkeypatch.setattr(
        device_memory, "Executor", lambda bound, **kw: SimpleNamespace(**vars(bound), **kw)
    )


@pytest.fixture
def weights() -> Any:
    module = nn.Linear(8, 8)
    table = WeightTable(weights_of(dict(module.named_parameters()), CPU), CPU)
    table.install()
    yield table
    table.restore()


@pytest.fixture
def memory(weights: WeightTable) -> Any:
    made = DeviceMemory(weights, run_settings())
    yield made
    made.close()


def bound(memory: DeviceMemory, found: Pass) -> Any:
    assert found.memgraph is not None
    return memory.bind(found, found.memgraph.arena_bytes, frozenset(), [])


def test_binding_a_pass_makes_an_arena_for_all(memory: DeviceMemory) -> None:
    assert (memory.state, memory.held_bytes) == (DeviceState.RELEASED, 0)
    found, other = planned_pass(), planned_pass()
    executor = bound(memory, found)
    assert (memory.state, memory.held_bytes) == (DeviceState.PAGED, 7 * NBYTES)
    assert found.executor is executor
    assert executor.arena.nbytes == 7 * NBYTES
    assert bound(memory, other).arena is executor.arena and found.executor is executor


def test_an_arena_of_another_size_unbinds_and_frees_the_first(memory: DeviceMemory) -> None:
    first, second = planned_pass(), planned_pass(6 * NBYTES)
    arena = bound(memory, first).arena
    memory.residents["w"] = Extent(0, 64)
    bound(memory, second)
    assert first.executor is None and second.executor is not None
    assert arena.bytes.untyped_storage().nbytes() == 0
    assert memory.residents == {}


def test_released_memory_holds_no_arena_and_no_weights(
    memory: DeviceMemory, weights: WeightTable
) -> None:
    found = planned_pass()
    arena = bound(memory, found).arena
    memory.to_released()
    assert memory.state is DeviceState.RELEASED
    assert found.executor is None and arena.bytes.untyped_storage().nbytes() == 0
    memory.to_resident()
    memory.to_released()
    assert memory.state is DeviceState.RELEASED and weights.on_device == {}


def test_resident_memory_holds_every_weight_and_no_arena(
    memory: DeviceMemory, weights: WeightTable
) -> None:
    found = planned_pass()
    bound(memory, found)
    assert memory.to_resident() == weights.nbytes
    assert memory.held_bytes == weights.block_bytes > 0
    assert memory.state is DeviceState.RESIDENT and found.executor is None
    assert sorted(weights.on_device) == ["bias", "weight"]
    assert memory.to_resident() == 0  # they are there already
    bound(memory, found)
    assert memory.state is DeviceState.PAGED and weights.on_device == {}


def test_a_pool_that_grows_unbinds_the_passes_that_point_into_it(memory: DeviceMemory) -> None:
    first, second = planned_pass(), planned_pass()
    bound(memory, first)
    assert second.memgraph is not None
    second.memgraph = replace(second.memgraph, host_bytes=4096)
    bound(memory, second)
    assert first.executor is None and second.executor is not None
    third = planned_pass()
    third.memgraph = replace(second.memgraph, host_bytes=4095)
    bound(memory, third)
    assert second.executor is not None


def test_changed_weights_are_no_longer_resident(memory: DeviceMemory, weights: WeightTable) -> None:
    memory.residents.update({"weight[0:64]": Extent(0, 64), "bias[0:32]": Extent(64, 64)})
    memory.reload(["weight"])
    assert sorted(memory.residents) == ["bias[0:32]"]


def test_changed_weights_are_copied_again_where_all_are_resident(
    memory: DeviceMemory, weights: WeightTable
) -> None:
    memory.to_resident()
    weights.masters["bias"].zero_()
    memory.reload(["weight"])
    assert weights.on_device["bias"].any()
    memory.reload(["bias"])
    assert not weights.on_device["bias"].any()


def test_new_checks_make_new_lanes(memory: DeviceMemory) -> None:
    found = planned_pass()
    lanes = bound(memory, found).lanes
    memory.use(run_settings(debug=memory._debug))
    assert found.executor is None
    assert bound(memory, found).lanes is lanes
    memory.use(run_settings(debug=DebugConfig(poison_vacated=True)))
    executor = bound(memory, found)
    assert executor.lanes is not lanes and executor.poison
