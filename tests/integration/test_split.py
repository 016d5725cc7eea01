"""Generation with weights that are cut: captured once for all lengths, and within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.taskgraph import JOIN, Length
from ds_finepage.integrations.transformers import preflight
from ds_finepage.runtime.handle import Handle
from tests.integration.families import logits, make_model, token_ids, tokens
from tests.integration.parity import only_cut_plans, same_within

CPU = torch.device("cpu")
NUM_TOKENS = 140
SHORT = ((5, 12), (9, 20), (40, 3))
CUT = ("llama", "gpt2")  # of GPT-2 the head alone: the others are transposed


@pytest.fixture(scope="module", autouse=True)
def _only_cut_plans() -> Iterator[None]:
    """Plans of whole weights have tests enough."""
    with only_cut_plans():
        yield


@dataclass
class Attached:
    model: Any
    plain: torch.Tensor  # of a long generation
    plain_short: list[torch.Tensor]
    handle: Handle
    num_plans: int  # of the first, long generation
    budgets: list[int]  # from the least for that generation on

    def num_cut(self) -> int:
        """Count the products that the present plans cut."""
        return sum(t.op == JOIN for m, _ in self.handle.plans() for t in m.graph.tasks)


@pytest.fixture(scope="module", params=CUT)
def attached(request: pytest.FixtureRequest) -> Iterator[Attached]:
    torch._dynamo.reset()
    model = make_model(request.param)
    plain = tokens(model, token_ids(5), NUM_TOKENS, cache=None)
    plain_short = [tokens(model, token_ids(n), new, cache=None) for n, new in SHORT]
    handle = attach(model, device_budget="64MiB", device="cpu", split=True, kv_cache="device")
    assert torch.equal(tokens(model, token_ids(5), NUM_TOKENS, cache=None), plain)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    budgets = [least, (2 * least + needed) // 3, (least + 2 * needed) // 3]
    num_plans = handle.stats.num_plans
    for length, new in SHORT:
        tokens(model, token_ids(length), new, cache=None)
    yield Attached(model, plain, plain_short, handle, num_plans, budgets)
    handle.detach()
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    assert handle.stats.num_caches_on_host == 0


def test_a_long_generation_is_captured_as_often_as_a_short_one(attached: Attached) -> None:
    # A prefill and a step, a step of any length, and mistral's step once its window is full.
    assert attached.handle.stats.num_captures <= 4
    assert attached.num_plans - 2 <= 5  # 16, 32, ... 256 rows


@pytest.mark.parametrize("share", (0, 1, 2))
def test_tokens_are_those_of_plain_transformers_within_any_budget(
    attached: Attached, share: int
) -> None:
    model, handle = attached.model, attached.handle
    num_captures = handle.stats.num_captures

    def run() -> list[torch.Tensor]:
        found = [tokens(model, token_ids(n), new, cache=None) for n, new in SHORT]
        return [tokens(model, token_ids(5), NUM_TOKENS, cache=None), *found]

    plain = [attached.plain, *attached.plain_short]
    same_within(handle, run, plain, attached.budgets[share], seed=share)
    assert handle.stats.num_captures == num_captures
    if share == 1:
        assert attached.num_cut() > 0
        assert any(p.last_reloaded_bytes for p in handle.stats.passes)


def test_every_length_of_a_bucket_has_the_logits_of_plain_transformers() -> None:
    torch._dynamo.reset()
    model = make_model("llama")
    calls = [token_ids(n, batch=2, seed=n) for n in (40, 33, 64, 47, 5, 1)]
    plain = [logits(model, ids) for ids in calls]
    handle = attach(model, device_budget="64MiB", device="cpu", split=True)
    for ids, expected in zip(calls, plain, strict=True):
        torch.testing.assert_close(logits(model, ids), expected)
    num_captures, num_passes = handle.stats.num_captures, len(handle.stats.passes)
    debug = DebugConfig(poison_vacated=True)
    handle.replan(budget_bytes=handle.stats.min_budget_bytes, debug=debug)
    for _ in range(2):
        for ids, expected in zip(calls, plain, strict=True):
            # Products are cut, so their sums may come in another order.
            torch.testing.assert_close(logits(model, ids), expected)
    assert (handle.stats.num_captures, len(handle.stats.passes)) == (num_captures, num_passes)
    cut = [m.graph for m, _ in handle.plans() if any(t.op == JOIN for t in m.graph.tasks)]
    assert any(isinstance(t.shape[0], Length) for g in cut for t in g.tensors if t.shape)


def test_a_cache_that_moves_in_the_middle_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = make_model("gpt2")
    plain = tokens(model, token_ids(5), 150, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu", split=True)
    monkeypatch.setattr(preflight, "competes", lambda *_, share: False)  # so it is not there first
    tokens(model, token_ids(5), 4, cache=None)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    handle.replan(budget_bytes=least + (needed - least) // 8)
    assert torch.equal(tokens(model, token_ids(5), 20, cache=None), plain[:, :25])
    assert handle.stats.num_caches_on_host == 0
    with DeviceMeter(CPU) as meter:
        assert torch.equal(tokens(model, token_ids(5), 150, cache=None), plain)
    assert handle.stats.num_caches_on_host == 1
    assert 0 < meter.peak_bytes <= handle.stats.budget_bytes
