"""Results of many model families are those of plain transformers, bit by bit, at any budget.

Three families run under every budget. The others run under the least one: a cache that grows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import masking_utils

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.runtime.handle import Handle
from tests.integration.families import FAMILIES, MORE_FAMILIES, make_model, token_ids, tokens
from tests.integration.parity import equal, results, same_at_every_budget

POLICIES = ("finepage", "horizon")
BUDGETS = ("min", "25%", "50%", "100%")
NUM_TOKENS = 8
SWEPT = ("gpt2", "mistral", "llama")
"""Positions that are looked up, a window, and positions that turn: under every budget."""
ONCE = [family for family in (*FAMILIES, *MORE_FAMILIES) if family not in SWEPT]
OF_TWO_KINDS = ("gemma2", "gemma3")
"""Whose layers differ; of the others that run once, one layer tells all."""


PROMPT = token_ids(7)


def steps(model: Any) -> list[torch.Tensor]:
    return results(model, PROMPT, NUM_TOKENS, cache="static")


@dataclass
class Case:
    """One model, attached, with its first captures made, and what plain transformers returned."""

    model: Any
    dtype: torch.dtype
    steps: list[torch.Tensor]
    tokens_default_cache: torch.Tensor
    handle: Handle

    def budget_bytes(self, budget: str) -> int:
        if budget == "min":
            return self.handle.stats.min_budget_bytes
        return self.handle.stats.needed_budget_bytes * int(budget.rstrip("%")) // 100


def plain_steps(model: Any) -> list[torch.Tensor]:
    """Return what plain transformers does with the masks that it makes in a trace.

    Older versions leave a prompt's causal mask out, but not in a trace. Without it a static cache
    is read as far as the prompt goes, and the sums come in another order.
    """
    if "is_torchdynamo_exporting" in masking_utils._ignore_causal_mask_sdpa.__code__.co_names:
        return steps(model)
    with mock.patch.object(masking_utils, "_ignore_causal_mask_sdpa", return_value=False):
        return steps(model)


@pytest.fixture(
    scope="module",
    params=[*((family, torch.float32) for family in SWEPT), ("llama", torch.bfloat16)],
    ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}",
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family, dtype = request.param
    torch._dynamo.reset()
    model = make_model(family, dtype, num_hidden_layers=2)
    plain = Case(
        model=model,
        dtype=dtype,
        tokens_default_cache=tokens(model, PROMPT, NUM_TOKENS, cache=None),
        steps=plain_steps(model),  # at last: a static cache is as long as the longest one so far
        handle=attach(model, device_budget="1GiB", device="cpu"),
    )
    assert equal(steps(model), plain.steps)
    gc.collect()
    gc.freeze()  # Dynamo leaves much behind, and planning would make the collector go over it
    yield plain
    plain.handle.detach()
    assert equal(plain_steps(model), plain.steps)


@pytest.mark.parametrize("budget", BUDGETS)
def test_logits_and_tokens_are_those_of_plain_transformers(case: Case, budget: str) -> None:
    handle, budget_bytes = case.handle, case.budget_bytes(budget)
    if budget_bytes < handle.stats.min_budget_bytes:
        refuses(case, budget_bytes)
        return
    at = BUDGETS.index(budget)
    debug = DebugConfig(poison_vacated=True, lane_delay_seed=at)
    handle.replan(budget_bytes=budget_bytes, policy=POLICIES[at % len(POLICIES)], debug=debug)
    found = steps(case.model)
    assert equal(found, case.steps)
    if case.dtype is torch.float32:
        assert torch.equal(found[0], case.tokens_default_cache)
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


def refuses(case: Case, budget_bytes: int) -> None:
    """Check that a budget below one op's needs is refused, by name and with both numbers."""
    case.handle.replan(budget_bytes=budget_bytes)
    with pytest.raises(PlanInfeasibleError, match=r"task \d+ aten\.\S+ \(.+\) needs") as error:
        steps(case.model)
    assert f"device_budget is {budget_bytes} bytes" in str(error.value)
    assert "which makes min_budget_bytes " in str(error.value)


@pytest.mark.parametrize("family", ONCE)
def test_more_families_are_those_of_plain_transformers(family: str) -> None:
    layers = "n_layer" if family == "bloom" else "num_hidden_layers"
    # Dtypes differ in kernels, not in graphs; but experts go another way in half precision.
    # With torch 2.9 and 2.10 they ask for an address there, which ends the graph.
    halved = family == "qwen3_moe" and torch.__version__ >= "2.11"
    dtype = torch.bfloat16 if halved else torch.float32
    model = make_model(family, dtype, **{layers: 2 if family in OF_TWO_KINDS else 1})

    def run() -> list[Any]:
        with warnings.catch_warnings():
            # transformers asks for torch's version inside the experts' forward.
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            # BLOOM's activation is an autograd function, of which Dynamo makes an object.
            warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
            kinds = ("static", None) if family == "gemma3" else (None,)
            return [results(model, PROMPT, 4, cache=kind) for kind in kinds]

    same_at_every_budget(model, run, budgets=("min",))
