"""Products with packed weights on an accelerator: few kernels, few waits, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ds_finepage.execution.bound_plan import BoundPlan
from ds_finepage.execution.executor import Executor
from ds_finepage.execution.measure import OpMeter, estimate_workspaces
from ds_finepage.graph.packed import CUT_ROWS, PACKED_GROUPED
from ds_finepage.packing import native, op
from ds_finepage.packing.form import Packed, PackedForm, pack, unpack
from ds_finepage.packing.fused import why_not
from ds_finepage.packing.model import pack_model
from tests.accelerator.subjects import AMPLE, Subject
from tests.accelerator.test_passes import Steps, waits_of
from tests.integration.families import make_model, token_ids
from tests.unit.planning.finepage.test_packed_weights import layers
from tests.unit.planning.rewrite.test_packed_experts import layer

MOST_KERNELS = 12
NUM_EXPERTS = 8
FORMS = {"int4": PackedForm(4), "int8": PackedForm(8)}


def packed_on(device: torch.device, form: PackedForm, *shape: int) -> Packed:
    """Return a packed matrix, or several, in bfloat16."""
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.bfloat16)
    made = pack(weight, form)
    return Packed(*(part.to(device) for part in made))


def rows_on(device: torch.device, *shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=torch.bfloat16).to(device)


def kernels_of(card: Any, run: Any) -> int:
    """Count what a call starts on the device, copies within it included."""
    run()
    card.synchronize()
    card.reset_counters()
    run()
    found = card.counters()
    return int(found["kernel"] + found["d2d"])


@pytest.mark.parametrize("form", FORMS)
def test_a_product_starts_few_kernels(device: torch.device, card: Any, form: str) -> None:
    chosen = FORMS[form]
    packed, x = packed_on(device, chosen, 4096, 4096), rows_on(device, 1, 4096)

    def product() -> torch.Tensor:
        found = op.packed_linear(x, *packed, None, chosen.bits, chosen.group)
        assert isinstance(found, torch.Tensor)
        return found

    assert kernels_of(card, product) <= MOST_KERNELS
    whole = unpack(packed, chosen, x.dtype)
    pieces = [x @ rows.t() for rows in whole.split(CUT_ROWS)]
    assert torch.equal(product(), torch.cat(pieces, dim=1))


@pytest.fixture
def little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a product of 128 columns unpack two runs of rows at a time, for one row."""
    monkeypatch.setattr(op, "SCRATCH_BYTES", 2 * CUT_ROWS * 128 * 2)


@pytest.mark.usefixtures("little_scratch")
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_slices_are_products_of_their_own(device: torch.device, num_rows: int) -> None:
    form, num_out = PackedForm(4), 5 * CUT_ROWS + 100
    packed, x = packed_on(device, form, num_out, 128), rows_on(device, num_rows, 128)
    bias = rows_on(device, num_out)
    whole = op.packed_linear(x, *packed, bias, 4, form.group)
    for begin, end in ((0, CUT_ROWS), (CUT_ROWS, 4 * CUT_ROWS), (4 * CUT_ROWS, num_out)):
        cut = [part[begin:end].contiguous() for part in packed]
        found = op.packed_linear(x, *cut, bias[begin:end], 4, form.group)
        assert torch.equal(found, whole[:, begin:end])


ENDS = ([0, 1, 1, 1, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_few_rows_take_their_experts_by_index(
    device: torch.device, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    form, num_out = PackedForm(4), 3 * CUT_ROWS + 100
    packed, x = packed_on(device, form, NUM_EXPERTS, num_out, 128), rows_on(device, 2, 128)
    of_experts = torch.tensor(ends, dtype=torch.int32).to(device)
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # which the host would wait for
    monkeypatch.setattr(op, "SCRATCH_BYTES", 2 * 2 * CUT_ROWS * 128 * 2)
    found = op.packed_grouped_linear(x, *packed, of_experts, 4, form.group)
    for row in range(2):
        expert = next((e for e, end in enumerate(ends) if row < end), None)
        if expert is None:
            assert not found[row].any()  # behind the last end
            continue
        matrix = Packed(*(part[expert] for part in packed))
        alone = op.packed_linear(x[row : row + 1], *matrix, None, 4, form.group)
        torch.testing.assert_close(found[row : row + 1], alone)
    for begin, end in ((0, 2 * CUT_ROWS), (2 * CUT_ROWS, num_out)):
        cut = [part[:, begin:end].contiguous() for part in packed]
        again = op.packed_grouped_linear(x, *cut, of_experts, 4, form.group)
        assert torch.equal(again, found[:, begin:end])


@pytest.mark.parametrize("num_rows", [2, 4, 20])
def test_the_estimate_is_what_a_product_takes(
    device: torch.device, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for graph in (layers(num_rows=num_rows), layer(num_rows, num_rows=1200)):
        for scratch_bytes in (1, 4 * CUT_ROWS * 64 * 4, op.SCRATCH_BYTES):
            monkeypatch.setattr(op, "SCRATCH_BYTES", scratch_bytes)
            measured = OpMeter(device).with_costs(graph).tasks[-1]
            known = estimate_workspaces(graph).tasks[-1]
            assert 0 <= measured.workspace_bytes - known.workspace_bytes <= 8192
            unmeasured = OpMeter(device).with_costs(graph, room_bytes=0).tasks[-1]
            results = [graph.tensors[r] for r in unmeasured.results if r is not None]
            result_bytes = sum(graph.buffers[view.buffer].nbytes for view in results)
            assert unmeasured.workspace_bytes == known.workspace_bytes + result_bytes


def test_a_device_without_triton_unpacks_slices(device: torch.device) -> None:
    if why_not(device) is None:
        pytest.skip("Triton compiles for this device")
    form = PackedForm(4)
    packed, x = packed_on(device, form, CUT_ROWS + 100, 128), rows_on(device, 2, 128)
    sliced = op.packed_linear(x, *packed, None, 4, form.group)
    assert torch.equal(op.packed_linear(x, *packed, None, 4, form.group, True), sliced)


# --- models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixtral(device: torch.device) -> Iterator[Subject]:
    model = make_model("mixtral", torch.bfloat16, num_local_experts=NUM_EXPERTS)
    assert "model.layers.0.mlp.experts" in pack_model(model, PackedForm(4, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "takes", lambda *_: False)  # plain on the CPU unpacks as devices do
        found = Subject(device, model, token_ids(7))
    yield found
    found.detach()


def test_packed_experts_are_those_of_plain_transformers(mixtral: Subject) -> None:
    for seed, budget in enumerate(mixtral.budgets):
        mixtral.check_at(budget, seed=seed)


def test_a_step_with_packed_experts_waits_for_routers_alone(mixtral: Subject, card: Any) -> None:
    mixtral.at(AMPLE)
    assert waits_of(card, Steps(mixtral, 1).run) == {}
    mixtral.at(mixtral.budgets[0])
    steps = Steps(mixtral, 1)
    assert waits_of(card, steps.run) == {"gather_rows": 1, "routed": 2}


def test_a_prompt_reads_the_rows_of_experts_once_a_layer(mixtral: Subject, card: Any) -> None:
    mixtral.at(mixtral.budgets[0])

    def prompt() -> None:
        with torch.no_grad():
            mixtral.model(mixtral.ids, use_cache=False)

    prompt()
    prompt()
    assert waits_of(card, prompt) == {"gather_rows": 1, "routed": 2}
    with mock.patch.object(Executor, "run", autospec=True, side_effect=Executor.run) as run:
        prompt()
    assert_nothing_recorded_waits(run.call_args.args[0])


def assert_nothing_recorded_waits(executor: Executor) -> None:
    """Check that products that wait for rows are in no graph, even if they need no scratch."""
    memgraph, bound = executor.memgraph, executor._bound
    tasks = tuple(replace(task, workspace_bytes=0) for task in memgraph.graph.tasks)
    again = BoundPlan(
        replace(memgraph, graph=replace(memgraph.graph, tasks=tasks)),
        arena=bound.arena,
        pool=bound._pool,
        masters=bound.sources._masters,
        in_place=bound._in_place,
    )
    of_tasks = {n.id: tasks[n.task].op for n in memgraph.nodes if n.task is not None}
    waiting = {node for node, name in of_tasks.items() if name == PACKED_GROUPED}
    assert waiting and again.recordable and waiting.isdisjoint(again.recordable)
