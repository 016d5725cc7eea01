"""A refused call names the budget of its next step; under the last one named the call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.meter import DeviceMeter
from tests.integration.families import CACHE, make_model, token_ids
from tests.integration.test_seq2seq import make as make_seq2seq

pytestmark = pytest.mark.usefixtures("fresh")

CPU = torch.device("cpu")
TINY_BYTES = 1000
POOL_BYTES = 8 << 20
ALIGNMENT = 64
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256}


MODELS: dict[str, Callable[[torch.dtype], Any]] = {
    "llama": lambda dtype: make_model("llama", dtype, intermediate_size=128, **SMALL),
    "gpt2": lambda dtype: make_model("gpt2", dtype, n_inner=128, **SMALL),
    "mistral": lambda dtype: make_model("mistral", dtype, intermediate_size=128, **SMALL),
    "mixtral": lambda dtype: make_model("mixtral", dtype, intermediate_size=64, **SMALL),
    "t5": lambda dtype: make_seq2seq("t5").to(dtype),
}


def forward(model: Any) -> torch.Tensor:
    kwargs: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        kwargs = {"decoder_input_ids": token_ids(7, batch=2)}
    with torch.no_grad():
        return model(token_ids(24, batch=2), **kwargs).logits


def generate(model: Any, **settings: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 20, "do_sample": False, **settings}
    return model.generate(token_ids(24, batch=2), **settings)


def beams(model: Any) -> torch.Tensor:
    return generate(model, num_beams=3)


MOST_REFUSALS = 12


@pytest.mark.parametrize(
    ("name", "work", "dtype", "split"),
    [
        ("llama", beams, torch.bfloat16, True),
        ("gpt2", forward, torch.bfloat16, True),
        ("mistral", generate, torch.bfloat16, False),
        ("mixtral", generate, torch.float32, False),
        ("t5", generate, torch.bfloat16, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_refusal_names_more_until_the_call_runs_within_what_was_named(
    name: str, work: Callable[[Any], torch.Tensor], dtype: torch.dtype, split: bool
) -> None:
    model = MODELS[name](dtype)
    plain = work(model)
    budget = TINY_BYTES
    handle = attach(model, device_budget=budget, device="cpu", split=split)
    handle._memory._pool.reserve(POOL_BYTES)  # host memory: kept out of the meter's sight
    for _ in range(MOST_REFUSALS):
        try:
            with DeviceMeter(CPU) as meter:
                found = work(model)
            break
        except PlanInfeasibleError as error:
            least = error.min_budget_bytes
            assert least is not None and least > budget
            assert f"Raise finepage.device_budget to >= {least} " in str(error)
            assert budget > TINY_BYTES or all(not p.num_runs for p in handle.stats.passes)
            budget = least
        handle.replan(budget_bytes=budget)
    if split and work is forward:
        torch.testing.assert_close(found, plain)
    else:
        assert torch.equal(found, plain)
    assert meter.peak_bytes <= budget
    assert handle.stats.num_unplanned_graphs == 0
    handle.replan(budget_bytes=budget * 10 // 11)  # the least is not far below
    with pytest.raises(PlanInfeasibleError, match="Other steps of the call may need more"):
        work(model)


def test_a_refusal_leaves_no_trace() -> None:
    model = MODELS["llama"](torch.float32)
    with torch.no_grad():
        cache = model(token_ids(9), use_cache=True)[CACHE]
    rows = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    handle = attach(model, device_budget=100_000, device="cpu")
    state, seen = torch.get_rng_state(), []
    with pytest.raises(PlanInfeasibleError), torch.no_grad():
        model(token_ids(1), **{CACHE: cache}, use_cache=True)
    with pytest.raises(PlanInfeasibleError):
        generate(model, do_sample=True, stopping_criteria=[lambda *a, **k: seen.append(a)])
    assert not seen and torch.equal(torch.get_rng_state(), state)
    for layer, (keys, values) in zip(cache.layers, rows, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert handle.stats.num_unplanned_graphs == 0 and not handle.stats.reloaded_bytes


class Broken(torch.nn.Module):
    """Leaves its graph between two products, the second of which is a weight of its own."""

    def __init__(self, middle: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 256)
        self._middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self._middle(y)
        return self.second(y)


@pytest.mark.parametrize(
    "middle",
    [
        lambda y: torch._dynamo.graph_break(),
        lambda y: y[y > 0].numel(),  # whose size depends on data
    ],
)
def test_behind_a_graph_break_or_without_a_plan_the_error_names_a_step(middle: Any) -> None:
    torch.manual_seed(0)
    model, x = Broken(middle).eval(), torch.randn(3, 64)
    handle = attach(model, device_budget=TINY_BYTES, device="cpu")
    budget, plain = TINY_BYTES, None
    with torch.no_grad():
        for _ in range(4):
            try:
                plain = model(x)
                break
            except PlanInfeasibleError as error:
                assert error.min_budget_bytes is not None and error.min_budget_bytes > budget
                budget = error.min_budget_bytes
                handle.replan(budget_bytes=budget)
    handle.detach()
    assert plain is not None and torch.equal(plain, model(x))
