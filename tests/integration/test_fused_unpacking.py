"""``finepage.fused_unpacking``: what a run chooses, and that it gives what plain transformers give.

A product in float64 stands for the kernel, which needs an accelerator.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from ds_finepage import api
from ds_finepage.graph.packed import FUSED_ROWS, PACKED_PRODUCTS, wants_fused
from ds_finepage.packing import op
from ds_finepage.packing.form import Packed, PackedForm, unpack
from ds_finepage.packing.model import form_of, pack_model, set_fused
from tests.integration.families import make_model, token_ids
from tests.integration.test_packed_weights import results

WHY = "this card has none"
PROMPT = token_ids(FUSED_ROWS + 1)


@pytest.fixture
def fused_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU fuse products, and take down the rows of each."""
    found: list[int] = []

    def product(rows: Any, packed: Packed, bias: Any, form: Any, results: Any) -> None:
        found.append(len(rows))
        made = rows.double() @ unpack(packed, form, rows.dtype).double().t()
        results.copy_(made if bias is None else made + bias.double())

    for module in (op, api):
        monkeypatch.setattr(module, "why_not", lambda where: None)
    monkeypatch.setattr(op, "fused_product", product)
    return found


def logits(model: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    with torch.no_grad():
        return results(model, PROMPT)[1:]


def test_decode_steps_are_fused_and_the_same_in_plain_transformers(fused_rows: list[int]) -> None:
    model = make_model("llama", torch.bfloat16, num_hidden_layers=1)
    pack_model(model, PackedForm(4, 32))
    sliced = logits(copy.deepcopy(model))
    assert fused_rows == []
    plain = copy.deepcopy(model)
    set_fused(plain, True)
    expected = logits(plain)
    assert set(fused_rows) == {1}  # and not the prompt
    assert torch.equal(expected[0], sliced[0])
    fused_rows.clear()
    handle = api.attach(model, device_budget="1GiB", device="cpu", split=True, fused_unpacking=True)
    assert all(map(torch.equal, logits(model), expected))
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    assert all(map(torch.equal, logits(model), expected))
    assert handle.stats.num_unplanned_graphs == 0 and set(fused_rows) == {1}
    asked = [
        wants_fused(t.args)
        for m, _ in handle.plans()
        for t in m.graph.tasks
        if t.op in PACKED_PRODUCTS
    ]
    assert asked and all(asked)


@pytest.mark.usefixtures("fused_rows")
def test_a_plan_for_more_rows_counts_what_is_unpacked() -> None:
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    settings = {"weights": "int4", "weights_group": 32, "fused_unpacking": True}
    handle = api.attach(model, device_budget="1GiB", device="cpu", **settings)
    for num_tokens in (7, 40, 12):  # the second one is captured with a symbol for its length
        model(token_ids(num_tokens), use_cache=False)
    seen = set()
    for memgraph, _ in handle.plans():
        graph = memgraph.graph
        for task in graph.tasks:
            if task.op in PACKED_PRODUCTS:
                x, numbers = (graph.tensors[ref.tensor].shape for ref in task.args[:2])
                num_rows = x[-2]
                seen.add(int(num_rows))
                written_bytes = 4 * numbers[0] * x[-1] * 4
                assert (task.moved_bytes < written_bytes) == (num_rows <= FUSED_ROWS)
    handle.detach()
    assert seen == {7, 16, 64}


@pytest.mark.usefixtures("fused_rows")
def test_the_next_attach_chooses_anew() -> None:
    model = make_model("llama", num_hidden_layers=1)
    for is_fused in (True, False):
        settings = {"weights": "int4", "weights_group": 32, "fused_unpacking": is_fused}
        api.attach(model, device_budget="1GiB", device="cpu", **settings).detach()
        form = form_of(model)
        assert form is not None and form.fused is is_fused


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_key_without_effect_is_said(
    weights: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "why_not", lambda where: WHY)
    model = make_model("llama", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        api.attach(
            model,
            device_budget="1GiB",
            device="cpu",
            weights=weights,
            weights_group=32,
            fused_unpacking=True,
        ).detach()
    reason = WHY if weights else "no layer is packed"
    assert f"finepage.fused_unpacking has no effect: {reason}" in caplog.messages
    form = form_of(model)
    assert form is None or not form.fused
