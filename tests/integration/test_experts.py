"""Models with experts: what the router does not choose is not brought in."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.stats import PassStats
from tests.integration.families import SLOW_LINK, SLOWER_LINK, make_model, token_ids, tokens

NUM_TOKENS = 6
EXPERTS = {"mixtral": {"num_local_experts": 8}, "qwen3_moe": {"num_experts": 8}}


pytestmark = [
    # Dynamo would remember the batches of other tests, and leave the batch open.
    pytest.mark.usefixtures("fresh"),
    # transformers asks for torch's version inside the experts' forward.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def expert_bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.dim() == 3)


@pytest.mark.parametrize(
    ("family", "way", "dtype"),
    [
        ("mixtral", "grouped_mm", torch.float32),
        ("mixtral", "batched_mm", torch.bfloat16),
        ("qwen3_moe", "grouped_mm", torch.bfloat16),
    ],
    ids=str,
)
def test_a_step_reloads_the_experts_that_it_uses(family: str, way: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype, **EXPERTS[family], num_hidden_layers=1)
    model.set_experts_implementation(way)
    expected = tokens(model, token_ids(5), NUM_TOKENS, cache=None)
    handle = attach(model, device_budget="1GiB", device="cpu", profile=SLOWER_LINK)
    tokens(model, token_ids(5), NUM_TOKENS, cache=None)
    budget = handle.stats.min_budget_bytes
    for seed in range(3):
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed)
        handle.replan(budget_bytes=budget, debug=debug)
        with DeviceMeter(torch.device("cpu")) as meter:
            found = tokens(model, token_ids(5), NUM_TOKENS, cache=None)
        assert torch.equal(found, expected)
        assert meter.peak_bytes <= budget
    step: PassStats = max(handle.stats.passes, key=lambda p: p.num_runs)
    # Two of eight in each layer; whatever else there is, once.
    others = handle.stats.weight_bytes - expert_bytes(model)
    assert step.last_reloaded_bytes <= expert_bytes(model) // 4 + others
    assert step.last_reloaded_bytes >= step.lower_bound_bytes


def test_tokens_that_agree_on_experts_move_less_than_was_planned() -> None:
    model = make_model("mixtral", torch.float32, num_local_experts=8, num_hidden_layers=2)
    alike = token_ids(4)[:, :1].expand(3, 1)  # three sequences of the same token
    with torch.no_grad():
        expected = model(alike, use_cache=False).logits
    handle = attach(model, device_budget="1GiB", device="cpu", profile=SLOW_LINK)
    with torch.no_grad():
        model(alike, use_cache=False)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        assert torch.equal(model(alike, use_cache=False).logits, expected)
    (memgraph, _) = handle.plans()[0]
    (stats,) = handle.stats.passes
    assert memgraph.routed
    at_most = sum(
        memgraph.bytes_at(memgraph.nodes[n]) - memgraph.graph.buffers[r.buffer].nbytes // 4
        for n, r in memgraph.routed_reloads.items()
    )
    moved = stats.last_reloaded_bytes - stats.last_entry_reloaded_bytes
    assert moved == memgraph.reloaded_bytes - at_most  # six of eight planned, two used
