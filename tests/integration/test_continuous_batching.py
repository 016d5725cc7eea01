"""Continuous batching of transformers runs by plan, and gives the tokens of the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ds_finepage.api import attach
from ds_finepage.execution.meter import DeviceMeter
from tests.integration.batching import gemma3, llama, outputs_of, tokens_of

pytestmark = pytest.mark.usefixtures("fresh")


@contextmanager
def metered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceMeter]]:
    """Meter the thread that makes the cache and runs the passes."""
    run, meters = ContinuousBatchingManager._run_generation_loop, []

    def metered_run(manager: Any, **settings: Any) -> None:
        with DeviceMeter(torch.device("cpu")) as meter:
            run(manager, **settings)
        meters.append(meter)

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousBatchingManager, "_run_generation_loop", metered_run)
        yield meters


@pytest.mark.parametrize("make", [llama, gemma3])
def test_requests_get_the_plain_tokens_within_the_budget(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    expected = tokens_of(model, num_blocks=64)
    handle = attach(model, device_budget="90%weights", device="cpu")
    with metered(monkeypatch) as meters:
        assert tokens_of(model) == expected
    (meter,) = meters
    stats = handle.stats
    assert 0 < meter.peak_bytes <= stats.budget_bytes
    assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
    num_tasks = 40 * model.config.num_hidden_layers
    assert min(p.num_tasks for p in stats.passes) > num_tasks  # the whole model is one graph
    assert stats.num_captures <= 6
    assert tokens_of(model, max_memory_percent=0.6) == expected  # a cache of another size
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    handle.detach()
    assert tokens_of(model, num_blocks=64) == expected


def test_a_cache_that_leaves_no_room_for_the_weights_is_refused_by_name() -> None:
    model = llama()
    attach(model, device_budget="60%weights", device="cpu")
    outputs = outputs_of(model, num_blocks=400)
    assert all("min_budget_bytes" in str(output.error) for output in outputs)
    assert not any(output.generated_tokens for output in outputs)
    assert all(tokens_of(model))
