"""Results of many model families are those of plain transformers, bit by bit, at any budget.

Seven families run under every budget. The others run once: a prompt, and a cache that grows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.runtime.handle import Handle
from tests.integration.families import (
    FAMILIES,
    MORE_FAMILIES,
    left_padded,
    logits,
    make_model,
    token_ids,
    tokens,
)
from tests.integration.parity import same_at_every_budget

POLICIES = ("finepage", "horizon", "horizon-outputs")
BUDGETS = ("min", "25%", "50%", "100%")
NUM_SEEDS = 4  # for each family and dtype, spread over the budgets
NUM_TOKENS = 8
PADDED_FAMILIES = ("llama", "gpt2", "mistral")
"""Positions that turn, positions that are looked up, and a window."""
IN_FLOAT32 = (*PADDED_FAMILIES, *(f for f in FAMILIES if f not in PADDED_FAMILIES))
HALVED = ("llama", "gpt2")
"""Run in bfloat16 too: dtypes differ in kernels, not in graphs."""
IN_HALF = ("qwen3_moe",)  # whose experts go another way in half precision
STATIC = ("gemma3", "mixtral")
"""The others of those that run once leave out the static cache."""

PROMPT = token_ids(7)
PADDED = (left_padded(9, 3), left_padded(30, 1))


@dataclass
class Case:
    """One model, attached, with its first captures made, and what plain transformers returned."""

    model: Any
    dtype: torch.dtype
    logits: torch.Tensor
    tokens: torch.Tensor
    tokens_default_cache: torch.Tensor
    padded_logits: list[torch.Tensor]
    padded_tokens: torch.Tensor
    handle: Handle

    def budget_bytes(self, budget: str) -> int:
        if budget == "min":
            return self.handle.stats.min_budget_bytes
        return self.handle.stats.needed_budget_bytes * int(budget.rstrip("%")) // 100


@pytest.fixture(
    scope="module",
    params=[*((f, torch.float32) for f in IN_FLOAT32), *((f, torch.bfloat16) for f in HALVED)],
    ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}",
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family, dtype = request.param
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model = make_model(family, dtype)
    plain = Case(
        model=model,
        dtype=dtype,
        logits=logits(model, PROMPT),
        tokens=tokens(model, PROMPT, NUM_TOKENS),
        tokens_default_cache=tokens(model, PROMPT, NUM_TOKENS, cache=None),
        padded_logits=[logits(model, **padded) for padded in PADDED],
        padded_tokens=tokens(model, num_tokens=NUM_TOKENS, **PADDED[0]),
        handle=attach(model, device_budget="1GiB", device="cpu"),
    )
    assert torch.equal(logits(model, PROMPT), plain.logits)
    assert torch.equal(tokens(model, PROMPT, NUM_TOKENS), plain.tokens)
    gc.collect()
    gc.freeze()  # Dynamo leaves much behind, and planning would make the collector go over it
    yield plain
    plain.handle.detach()
    assert torch.equal(logits(model, PROMPT), plain.logits)


@pytest.mark.parametrize("budget", BUDGETS)
def test_logits_and_tokens_are_those_of_plain_transformers(case: Case, budget: str) -> None:
    handle, budget_bytes = case.handle, case.budget_bytes(budget)
    if budget_bytes < handle.stats.min_budget_bytes:
        refuses(case, budget_bytes)
        return
    at = BUDGETS.index(budget)
    for seed in range(at, NUM_SEEDS, len(BUDGETS)):
        policy = POLICIES[(seed // len(BUDGETS) + at) % len(POLICIES)]
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed)
        handle.replan(budget_bytes=budget_bytes, policy=policy, debug=debug)
        where = f"policy {policy}, seed {seed}"
        assert torch.equal(logits(case.model, PROMPT), case.logits), where
        found = tokens(case.model, PROMPT, NUM_TOKENS)
        assert torch.equal(found, case.tokens), where
        if case.dtype is torch.float32:
            assert torch.equal(found, case.tokens_default_cache), where
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


def refuses(case: Case, budget_bytes: int) -> None:
    """Check that a budget below one op's needs is refused, by name and with both numbers."""
    case.handle.replan(budget_bytes=budget_bytes)
    with pytest.raises(PlanInfeasibleError, match=r"task \d+ aten\.\S+ \(.+\) needs") as error:
        logits(case.model, PROMPT)
        tokens(case.model, PROMPT, NUM_TOKENS)
    assert f"device_budget is {budget_bytes} bytes" in str(error.value)
    assert "which makes min_budget_bytes " in str(error.value)


@pytest.mark.parametrize(
    "case", [(f, torch.float32) for f in PADDED_FAMILIES], ids=PADDED_FAMILIES, indirect=True
)
def test_left_padded_batches_of_several_lengths(case: Case) -> None:
    # Every length is captured under a budget that is known to be enough, then run under the least.
    run_padded(case, 1 << 30)
    run_padded(case, case.handle.stats.min_budget_bytes)


def run_padded(case: Case, budget_bytes: int) -> None:
    debug = DebugConfig(poison_vacated=True, lane_delay_seed=100)
    case.handle.replan(budget_bytes=budget_bytes, debug=debug)
    for padded, plain in zip(PADDED, case.padded_logits, strict=True):
        assert torch.equal(logits(case.model, **padded), plain)
    found = tokens(case.model, num_tokens=NUM_TOKENS, **PADDED[0])
    assert torch.equal(found, case.padded_tokens)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(f, torch.float32) for f in MORE_FAMILIES if f not in IN_HALF]
    + [(f, torch.bfloat16) for f in IN_HALF],
    ids=lambda p: str(p).removeprefix("torch."),
)
def test_more_families_are_those_of_plain_transformers(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)

    def run() -> list[Any]:
        with warnings.catch_warnings():
            # transformers asks for torch's version inside the experts' forward.
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            # BLOOM's activation is an autograd function, of which Dynamo makes an object.
            warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
            found = [logits(model, PROMPT), tokens(model, PROMPT, 4, cache=None)]
            return [*found, tokens(model, PROMPT, 4)] if family in STATIC else found

    same_at_every_budget(model, run, budgets=("min",))
