"""Holds an attached model against itself without ds_finepage, at several budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.planning.finepage import search
from ds_finepage.planning.finepage.best_plans import BestPlans
from ds_finepage.planning.finepage.forecast import Plan
from ds_finepage.planning.problem import Problem
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.stats import Stats

BUDGETS = ("min", "50%", "100%")
AMPLE = "1GiB"
POOL_BYTES = 8 << 20


@contextmanager
def only_cut_plans() -> Iterator[None]:
    """Let finepage cut weights always: whole ones are often as good for models this small."""
    whole = search._plans_of_whole_weights

    def if_needed(plans: BestPlans, problem: Problem, *, has_ring: bool) -> Iterator[Plan | None]:
        return iter(()) if plans.tried else whole(plans, problem, has_ring=has_ring)

    with mock.patch.object(search, "_plans_of_whole_weights", if_needed):
        yield


def equal(found: Any, expected: Any) -> bool:
    """Compare nested results; tensors bit by bit."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


def shows_masters(handle: Handle) -> bool:
    """Tell whether every parameter is its host master, so that it takes no device bytes."""
    weights = handle._weights
    return all(
        parameter.data_ptr() == weights.masters[weights.names[id(parameter)]].data_ptr()
        for parameter in handle._calls._module.parameters()
    )


def results(
    model: Any, prompt: torch.Tensor, num_tokens: int = 3, *, cache: str | None = None
) -> list[torch.Tensor]:
    """Generate greedily; return the tokens, and the logits of each step, the prompt's first.

    Of a static cache it returns those of the prompt alone: a step of plain transformers attends
    over its padding, too, so that sums may come in another order.
    """
    found = model.generate(
        prompt,
        max_new_tokens=num_tokens,
        do_sample=False,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [found.sequences, *found.logits[: 1 if cache == "static" else None]]


def same_within(
    handle: Handle, run: Callable[[], Any], plain: Any, budget_bytes: int, seed: int
) -> None:
    """Run with poison and delays; results have to be the plain ones, and the peak in budget."""
    debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed)
    handle.replan(budget_bytes=budget_bytes, debug=debug)
    with DeviceMeter(torch.device("cpu")) as meter:
        found = run()
    assert equal(found, plain), f"budget {budget_bytes}"
    assert meter.peak_bytes <= budget_bytes, f"budget {budget_bytes}"


def same_at_every_budget(
    model: torch.nn.Module, run: Callable[[], Any], *, budgets: tuple[str, ...] = BUDGETS
) -> Stats:
    """Run without ds_finepage, then with it; every graph has to be planned, every peak in budget.

    Args:
        model: What to attach to.
        run: Makes the results to compare; called once for each budget and three times more.
        budgets: ``"min"``, or shares of what the model needs to run unpaged.

    Returns:
        The counters.
    """
    torch._dynamo.reset()
    plain = run()
    handle = attach(model, device_budget=AMPLE, device="cpu")
    try:
        assert equal(run(), plain)
        handle._memory._pool.reserve(POOL_BYTES)  # host memory: kept out of the meter's sight
        stats = handle.stats
        least_bytes, needed_bytes = stats.min_budget_bytes, stats.needed_budget_bytes
        for seed, budget in enumerate(budgets):
            share_bytes = 0 if budget == "min" else needed_bytes * int(budget.rstrip("%")) // 100
            budget_bytes = max(least_bytes, share_bytes)
            same_within(handle, run, plain, budget_bytes, seed)
        assert handle._memory._pool.bytes.numel() == POOL_BYTES
        stats = handle.stats
        assert stats.min_budget_bytes == least_bytes, "every shape was captured in the first run"
        assert not stats.unplanned_reasons
        assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
    finally:
        handle.detach()
    assert equal(run(), plain)
    return stats
