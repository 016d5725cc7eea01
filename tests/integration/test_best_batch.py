"""``ds_finepage.best_batch``: the batch for an engine that is there."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

import ds_finepage
from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from ds_finepage.runtime.ranks import Ranks
from tests.integration.engines import TINY_WEIGHTS, ds_config
from tests.integration.families import greedy, make_model, token_ids
from tests.unit.planning.finepage.test_search import machine

PROMPT, NEW = 40, 8
SLOW = machine(h2d=1e9)

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_best_batch_runs_under_the_budget_with_plain_tokens(family: str) -> None:
    model = make_model(family)
    handle = attach(model, device_budget="50%weights", device="cpu", profile=SLOW)
    found = ds_finepage.best_batch(model, PROMPT, NEW)
    assert found.batch > 1
    assert found.title.startswith(f"{family} on ")
    assert (found.prefill.seq, found.step.seq) == (PROMPT, PROMPT + NEW - 1)
    assert found.step.budget_bytes == handle.stats.budget_bytes
    assert found.step.weight_bytes == handle.stats.weight_bytes
    ids = token_ids(PROMPT, batch=found.batch)
    with DeviceMeter(torch.device("cpu")) as meter:
        tokens = greedy(model, input_ids=ids, max_new_tokens=NEW)
    assert meter.peak_bytes <= handle.stats.budget_bytes
    assert handle.stats.num_unplanned_graphs == 0
    handle.detach()
    assert torch.equal(tokens, greedy(model, input_ids=ids, max_new_tokens=NEW))


def test_no_more_sequences_than_there_are() -> None:
    model = make_model("llama")
    attach(model, device_budget="50%weights", device="cpu", profile=SLOW)
    most = ds_finepage.best_batch(model, PROMPT, NEW).batch
    assert ds_finepage.best_batch(model, PROMPT, NEW, most=most // 2).batch == most // 2


def test_host_memory_is_what_is_free_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    handle = attach(model, device_budget="50%weights", device="cpu", profile=SLOW, kv_cache="host")
    free = 300_000
    memory = psutil.virtual_memory()._replace(available=free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    found = ds_finepage.best_batch(model, PROMPT, NEW)
    assert found.step.kv_on_host
    assert found.step.host_bytes <= free + handle.stats.weight_bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10 * free))
    assert ds_finepage.best_batch(model, PROMPT, NEW).batch > found.batch


def test_the_cache_is_where_the_config_has_it() -> None:
    model = make_model("llama")
    for place in ("auto", "device"):
        handle = attach(
            model, device_budget="50%weights", device="cpu", profile=SLOW, kv_cache=place
        )
        found = ds_finepage.best_batch(model, PROMPT, NEW)
        assert found.step.kv_on_host is (place == "auto")
        handle.detach()


def test_an_engine_of_deepspeed_has_its_own_budget_and_dtype(deepspeed: Any) -> None:
    section = {"enabled": True, "device_budget": "50%weights"}
    config = ds_config(section, zero=TINY_WEIGHTS, bf16={"enabled": True})
    engine, *_ = deepspeed.initialize(model=make_model("llama"), config=config)
    found, stats = ds_finepage.best_batch(engine, PROMPT, NEW), ds_finepage.stats(engine)
    assert found.step.budget_bytes == stats.budget_bytes
    assert found.step.weight_bytes == stats.weight_bytes
    engine.destroy()


@pytest.mark.parametrize("given", ["by the section", "before"])
def test_packed_weights_are_planned_packed(given: str) -> None:
    model = make_model("llama")
    if given == "before":
        pack_model(model, PackedForm.parse("int8", 32))
    weights = {} if given == "before" else {"weights": "int8", "weights_group": 32}
    handle = attach(model, device_budget="80%weights", device="cpu", profile=SLOW, **weights)
    found = ds_finepage.best_batch(model, PROMPT, NEW)
    assert found.step.weights == "int8, group 32"
    assert found.step.weight_bytes == handle.stats.weight_bytes


def test_a_budget_without_room_for_one_sequence_is_refused() -> None:
    model = make_model("llama")
    attach(model, device_budget=100_000, device="cpu", profile=SLOW)
    with pytest.raises(PlanInfeasibleError) as caught:
        ds_finepage.best_batch(model, PROMPT, NEW)
    assert caught.value.min_budget_bytes is not None and caught.value.min_budget_bytes > 100_000


def test_what_no_batch_can_be_found_for() -> None:
    model = make_model("llama")
    with pytest.raises(ConfigError, match="runs without ds_finepage"):
        ds_finepage.best_batch(model, PROMPT, NEW)
    handle = attach(model, device_budget="50%weights", device="cpu", profile=SLOW)
    with pytest.raises(ConfigError, match="positions"):
        ds_finepage.best_batch(model, 100_000, NEW)
    for name, lengths in (("prompt_length", (0, NEW)), ("new_tokens", (PROMPT, 0))):
        with pytest.raises(ConfigError, match=f"{name}: 0 is less than 1"):
            ds_finepage.best_batch(model, *lengths)
    handle.detach()
    handle = attach(model, device_budget="50%weights", device="cpu", policy="horizon")
    with pytest.raises(ConfigError, match="policy horizon is not finepage"):
        ds_finepage.best_batch(model, PROMPT, NEW)
    handle.detach()
    plain = torch.nn.Linear(4, 4)
    handle = attach(plain, device_budget="1MiB", device="cpu", profile=SLOW)
    with pytest.raises(ConfigError, match="Linear has no config of transformers"):
        ds_finepage.best_batch(plain, PROMPT, NEW)


@pytest.mark.parametrize(
    ("name", "value"), [("has_whole_model", False), ("collects_weights", True)]
)
def test_ranks_that_share_a_model_are_refused(
    name: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    attach(model, device_budget="50%weights", device="cpu", profile=SLOW)
    monkeypatch.setattr(Ranks, name, value)
    with pytest.raises(ConfigError, match="several ranks share the model"):
        ds_finepage.best_batch(model, PROMPT, NEW)
    monkeypatch.undo()


def test_weights_that_another_library_has_quantised_are_refused() -> None:
    model = make_model("llama")
    attach(model, device_budget="50%weights", device="cpu", profile=SLOW)
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ConfigError, match="another library has quantised it"):
        ds_finepage.best_batch(model, PROMPT, NEW)
