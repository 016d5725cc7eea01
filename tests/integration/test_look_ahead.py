"""What is said before a generation begins, and what is refused."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from transformers import DynamicCache

from ds_finepage.api import attach
from ds_finepage.capture.from_config import capture_config
from ds_finepage.errors import CaptureError, PlanInfeasibleError, StoreError
from ds_finepage.integrations.transformers.preflight import Longest, Preflight
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from tests.integration.families import CACHE, LAST, Streamer, make_model, token_ids, tokens

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_cache_that_fits_nowhere_is_refused_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    handle = attach(model, device_budget="1MiB", device="cpu")
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    settings = {"max_new_tokens": 200, "num_beams": 8}
    need = 2 * 2 * (206 * 8) * 64 * 4
    with pytest.raises(PlanInfeasibleError, match=f"{need} bytes.*1048576.*1000 bytes of host"):
        model.generate(token_ids(6), **settings)
    assert handle.stats.num_captures == 0


@pytest.mark.parametrize("change", ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}))
def test_the_cache_of_another_model_is_refused(change: dict[str, int]) -> None:
    sizes = {"num_hidden_layers": 1}
    model, other = make_model("llama", **sizes), make_model("llama", **{**sizes, **change})
    cache = DynamicCache(config=other.config)
    with torch.no_grad():
        other(token_ids(4), **{CACHE: cache}, **LAST)
        attach(model, device_budget="64MiB", device="cpu")
        with pytest.raises(StoreError, match="cache of another model"):
            model(token_ids(1), **{CACHE: cache}, **LAST)
        model(token_ids(1), use_cache=True)


def test_a_generation_that_cannot_end_does_not_begin() -> None:
    model = make_model("llama", num_key_value_heads=1)
    ids = token_ids(6, batch=32)
    handle = attach(model, device_budget="1GiB", device="cpu")
    with torch.no_grad():
        model(ids, use_cache=True)
    least = handle.stats.min_budget_bytes
    refused: dict[int, str] = {}
    for percent in (100, 170, 300):
        emitted = Streamer()
        handle.replan(budget_bytes=least * percent // 100)
        try:
            tokens(model, ids, 124, cache=None, streamer=emitted)
        except PlanInfeasibleError as error:
            assert not emitted.got
            refused[percent] = str(error)
        else:
            assert len(emitted.got) == 1 + 124
    assert any("last step of 32 sequences of 130 tokens" in text for text in refused.values())
    assert {100, 300}.intersection(refused) == {100}


def test_a_last_step_that_cannot_be_captured_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureError("layers of another kind")

    monkeypatch.setattr("ds_finepage.integrations.transformers.preflight.capture_config", refuse)
    model = make_model("llama")
    plain = tokens(model, token_ids(60), 4, cache=None)
    attach(model, device_budget="2MiB", device="cpu")
    with caplog.at_level("INFO", logger="ds_finepage.integrations.transformers.preflight"):
        assert torch.equal(tokens(model, token_ids(60), 4, cache=None), plain)
    assert "layers of another kind" in caplog.text


def test_the_last_step_reads_the_weights_as_they_are_packed() -> None:
    model = make_model("llama", num_hidden_layers=1)
    last = Longest(num_sequences=1, num_tokens=20, prompt_tokens=5)
    plain = Preflight(model)._capture(last)
    pack_model(model, PackedForm(4, 32))
    packed = Preflight(model)._capture(last)
    assert plain is not None and packed is not None
    assert packed.weight_bytes == sum(p.nbytes for p in model.parameters()) < plain.weight_bytes


@pytest.mark.parametrize("has_config", [False, True])
def test_weights_that_another_library_has_quantised_tell_nothing(has_config: bool) -> None:
    model = make_model("llama", num_hidden_layers=1)
    if has_config:
        model.config.quantization_config = {"quant_method": "another"}
    else:
        numbers = torch.zeros(3, dtype=torch.int8)
        model.lm_head.register_parameter("numbers", torch.nn.Parameter(numbers, False))
    last = Longest(num_sequences=1, num_tokens=20, prompt_tokens=5)
    assert Preflight(model)._capture(last) is None


def test_lengths_are_looked_at_once_for_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def capture(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["seq"])
        return capture_config(*args, **kwargs)

    monkeypatch.setattr("ds_finepage.integrations.transformers.preflight.capture_config", capture)
    model = make_model("llama")
    attach(model, device_budget="2MiB", device="cpu")
    for length in (40, 60, 45, 70):
        tokens(model, token_ids(length), 2, cache=None)
    assert seen == [63, 127]


def test_one_new_token_needs_no_step() -> None:
    model = make_model("llama", num_key_value_heads=4, max_position_embeddings=2048)
    ids = token_ids(1100)
    handle = attach(model, device_budget="64MiB", device="cpu")
    tokens(model, ids, 1, cache=None)
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    assert tokens(model, ids, 1, cache=None).shape == (1, 1101)


def test_the_rows_that_a_cache_has_already_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama", max_position_embeddings=2048)
    with torch.no_grad():
        cache = model(token_ids(1000), use_cache=True)[CACHE]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    seen = []
    monkeypatch.setattr(
        "ds_finepage.integrations.transformers.preflight.require_memory",
        lambda *a: seen.append(a[3]),
    )
    attach(model, device_budget="64MiB", device="cpu")
    memory = psutil.virtual_memory()._replace(available=7)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    found = model.generate(token_ids(1004), **{CACHE: cache}, max_new_tokens=3)
    assert found.shape == (1, 1007)
    assert seen == [7 + held]
