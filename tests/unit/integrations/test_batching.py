"""Continuous batching takes its part of the budget, and leaves the caller's settings alone."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
from transformers import ContinuousBatchingConfig

from ds_finepage.integrations.transformers import batching
from ds_finepage.integrations.transformers.batching import (
    BATCHING,
    CACHE_SHARE,
    BudgetedBatching,
    within_budget,
)

FREE = 1 << 30


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "batching_memory_bytes", lambda: FREE)


def test_the_cache_gets_its_share_of_the_budget() -> None:
    assert within_budget(None, FREE // 4).max_memory_percent == CACHE_SHARE / 4
    chosen = ContinuousBatchingConfig(max_memory_percent=0.8, max_batch_tokens=16)
    found = within_budget(chosen, FREE // 4)
    assert (found.max_memory_percent, found.max_batch_tokens) == (0.8 / 4, 16)
    assert chosen.max_memory_percent == 0.8
    assert within_budget(chosen, 4 * FREE).max_memory_percent == 1


def test_a_number_of_blocks_is_the_callers_choice() -> None:
    found = within_budget(ContinuousBatchingConfig(num_blocks=7), FREE)
    assert (found.num_blocks, found.max_memory_percent) == (7, None)


def test_steps_are_not_replayed_from_graphs_of_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert within_budget(None, FREE).use_cuda_graph is False
        assert not caplog.records
        asked = ContinuousBatchingConfig(use_cuda_graph=True)
        assert within_budget(asked, FREE).use_cuda_graph is False
    assert "without graphs of the device" in caplog.text
    assert asked.use_cuda_graph is True


class Model:
    """A model that says how its batching was set up."""

    generation_config: Any = None

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None
    ) -> Any:
        """Theirs."""
        return generation_config, continuous_batching_config


def test_the_configuration_is_found_wherever_the_caller_gives_it() -> None:
    model = Model()
    start = BudgetedBatching(model, lambda: FREE // 2)
    assert start.__doc__ == "Theirs."
    _, config = start()
    assert config.max_memory_percent == CACHE_SHARE / 2
    given = ContinuousBatchingConfig(max_batch_tokens=32)
    for found in (start(None, given), start(continuous_batching_config=given)):
        assert found[1].max_batch_tokens == 32

    class Generation:
        continuous_batching_config = given

    generation = Generation()
    assert start(generation)[0] is generation
    assert start(generation)[1].max_batch_tokens == 32
    model.generation_config = generation
    assert start()[1].max_batch_tokens == 32


def test_a_copy_of_a_model_batches_by_itself() -> None:
    model: Any = Model()
    setattr(model, BATCHING, BudgetedBatching(model, lambda: FREE))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.init_continuous_batching(1, 2) == (1, 2)
