"""What only a CUDA device shows: pinned memory, streams, workspaces, the allocator's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ds_finepage.execution.arena import HostPool
from ds_finepage.execution.lanes import StreamLanes, make_lanes
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.stores import WeightTable
from tests.unit.execution.graphs import ACTIVATION, Draft
from tests.unit.execution.lane_programs import fail, program_of
from tests.unit.execution.parameters import weights_of_module

CUDA = torch.device("cuda")
MIB = 1 << 20

pytestmark = pytest.mark.gpu


@pytest.fixture
def stream_lanes() -> Iterator[StreamLanes]:
    made = make_lanes(CUDA)
    assert isinstance(made, StreamLanes)
    yield made
    made.close()


def test_a_pinned_pool_is_pinned() -> None:
    pool = HostPool(pinned=True)
    pool.reserve(4096)
    assert pool.bytes.is_pinned()


def test_masters_for_cuda_are_pinned_and_fetched_to_the_device() -> None:
    model = nn.Linear(4, 4)
    value = model.weight.detach().clone()
    weights = weights_of_module(model, CUDA)
    assert all(w.master.is_pinned() for w in weights)
    table = WeightTable(weights, CUDA)
    table.install()
    assert model.weight.is_cuda
    assert torch.equal(table.fetch(model.weight).cpu(), value)
    table.restore()
    assert not model.weight.is_cuda and torch.equal(model.weight, value)


def test_streams_wait_for_each_other(stream_lanes: StreamLanes) -> None:
    """A value goes host -> device -> compute -> host; each leg must see the one before."""
    n = 1 << 22
    host = torch.arange(n, dtype=torch.float32).pin_memory()
    back = torch.zeros(n).pin_memory()
    device = torch.zeros(n, device="cuda")
    spin = torch.ones(2048, 2048, device="cuda")
    program = program_of("h2d r", "compute t <r", "d2h o <t")

    def compute() -> None:
        for _ in range(20):
            torch.mm(spin, spin)
        device.add_(1)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return lambda: target.copy_(source, non_blocking=True) and None

    for _ in range(3):
        back.zero_()
        stream_lanes.run(program, {0: copy(device, host), 1: compute, 2: copy(back, device)})
        torch.cuda.synchronize()
        assert torch.equal(back, torch.arange(n, dtype=torch.float32) + 1)


def test_an_error_on_cuda_leaves_nothing_under_way(stream_lanes: StreamLanes) -> None:
    program = program_of("h2d r", "compute t <r", "d2h o <t")
    x = torch.zeros(4, device="cuda")
    actions = {0: lambda: None, 1: fail(ValueError("op failed")), 2: lambda: None}
    with pytest.raises(ValueError, match="op failed"):
        stream_lanes.run(program, actions)
    stream_lanes.run(program, actions | {1: lambda: x.add_(1) and None})
    assert torch.equal(x.cpu(), torch.ones(4))


def test_workspace_on_cuda_counts_copied_results() -> None:
    draft = Draft()
    draft.task("aten.arange.start", 0, 1000, out=(draft.tensor(ACTIVATION, 1000, dtype="int64"),))
    (task,) = OpMeter(CUDA).with_costs(draft.graph()).tasks
    assert task.workspace_bytes >= 8000 and task.time_ns


def test_what_is_allocated_inside_counts_on_cuda() -> None:
    before = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    with DeviceMeter(CUDA) as meter:
        one = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        del one
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert (meter.peak_bytes, meter.live_bytes) == (2 * MIB, MIB)
    del before, kept
