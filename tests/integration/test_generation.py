"""Generation as people call it: default caches, any decoding, tokens of plain transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ds_finepage.api import attach
from ds_finepage.capture import recorder
from ds_finepage.capture.from_config import capture_config
from ds_finepage.config import DebugConfig
from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError, StoreError
from ds_finepage.execution.host_cache import move_to_host, seen_lengths, take_back
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.generation import Longest, kv_bytes, longest_of, require_memory
from ds_finepage.session import Handle
from tests.integration.families import (
    DTYPES,
    FAMILIES,
    left_padded,
    make_model,
    token_ids,
    tokens,
)

NUM_TOKENS = 64
PROMPTS = (5, 40, 150)
NUM_SEEDS = 50


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()


def budgets(handle: Handle) -> list[int]:
    """From the least budget to all that the model needs."""
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    return [least, max(least, needed // 2), needed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_cache_gives_the_tokens_of_plain_transformers(
    family: str, dtype: torch.dtype
) -> None:
    model = make_model(family, dtype)
    plain = [tokens(model, token_ids(n), NUM_TOKENS, cache=None) for n in PROMPTS]
    handle = attach(model, device_budget="64MiB", device="cpu")
    for length, expected in zip(PROMPTS, plain, strict=True):
        assert torch.equal(tokens(model, token_ids(length), NUM_TOKENS, cache=None), expected)
    for budget in budgets(handle):
        handle.replan(budget_bytes=budget)
        for length, expected in zip(PROMPTS, plain, strict=True):
            assert torch.equal(tokens(model, token_ids(length), NUM_TOKENS, cache=None), expected)
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    handle.detach()


class Streamer:
    def __init__(self) -> None:
        self.got: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.reshape(-1).clone())

    def end(self) -> None:
        pass


def seeded(model: Any, **settings: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(
        token_ids(9), max_new_tokens=10, do_sample=True, top_k=20, top_p=0.9, **settings
    )


def streamed(model: Any) -> torch.Tensor:
    streamer = Streamer()
    model.generate(token_ids(9), max_new_tokens=6, do_sample=False, streamer=streamer)
    return torch.cat(streamer.got)


def chat(model: Any) -> torch.Tensor:
    """Go on with the cache of the turn before."""
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    turn = model.generate(token_ids(9), return_dict_in_generate=True, **settings)
    longer = torch.cat([turn.sequences, token_ids(4, seed=9)], dim=1)
    return model.generate(longer, past_key_values=turn.past_key_values, **settings)


def greedy(model: Any, **settings: Any) -> torch.Tensor:
    inputs = {"input_ids": token_ids(9)} if "input_ids" not in settings else {}
    return model.generate(
        **inputs, **{"max_new_tokens": 10, "do_sample": False, "use_cache": True, **settings}
    )


def assisted(model: Any) -> torch.Tensor:
    draft = make_model(model.config.model_type, model.dtype, seed=3)
    return greedy(model, assistant_model=draft)


DECODINGS: dict[str, Callable[[Any], torch.Tensor]] = {
    "greedy": greedy,
    "left-padded": lambda m: greedy(m, **left_padded(12, 4)),
    "sampled": seeded,
    "three samples": lambda m: seeded(m, num_return_sequences=3),
    "beams": lambda m: greedy(m, num_beams=3),
    "beams, left-padded": lambda m: greedy(
        m, num_beams=2, num_return_sequences=2, **left_padded(12, 4)
    ),
    "streamed": streamed,
    "assisted": assisted,
    "prompt lookup": lambda m: greedy(m, prompt_lookup_num_tokens=3),
    "chat": chat,
}


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)], ids=str
)
def test_any_decoding_is_that_of_plain_transformers(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    plain = {name: decode(model) for name, decode in DECODINGS.items()}
    handle = attach(model, device_budget="64MiB", device="cpu")
    for name, decode in DECODINGS.items():
        assert torch.equal(decode(model), plain[name]), name
    for budget in budgets(handle)[:2]:
        handle.replan(budget_bytes=budget)
        num_captures = handle.stats.num_captures
        for name, decode in DECODINGS.items():
            assert torch.equal(decode(model), plain[name]), name
        assert handle.stats.num_captures == num_captures
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    handle.detach()


@pytest.mark.parametrize("family", ("llama", "opt"))
def test_delays_and_poison_change_nothing(family: str) -> None:
    model = make_model(family)
    plain = tokens(model, token_ids(13), 8, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu")
    tokens(model, token_ids(13), 8, cache=None)
    three = budgets(handle)
    for seed in range(NUM_SEEDS):
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed)
        handle.replan(budget_bytes=three[seed % 3], debug=debug)
        assert torch.equal(tokens(model, token_ids(13), 8, cache=None), plain), seed
    handle.detach()


def test_a_thousand_tokens_need_a_plan_for_each_doubling_and_no_more_captures() -> None:
    model = make_model("llama", max_position_embeddings=2048, hidden_size=64, intermediate_size=64)
    plain = tokens(model, token_ids(5), 1000, cache=None)
    handle = attach(model, device_budget="8MiB", device="cpu", policy="horizon")
    assert torch.equal(tokens(model, token_ids(5), 1000, cache=None), plain)
    num_buckets = handle.stats.num_plans - 2  # but for the prefill and the first step
    assert num_buckets <= 10  # log2 of the length
    assert handle.stats.num_captures <= 2 + num_buckets
    assert handle.stats.num_captures == 3
    handle.detach()


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")
def test_what_cannot_be_captured_with_symbols_is_captured_size_by_size(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without help torch cannot work out the shapes of its baddbmm with symbols.
    monkeypatch.setattr(recorder, "with_known_shapes", lambda op, args: args)
    model = make_model("bloom")
    plain = [tokens(model, token_ids(n), 3, cache=None) for n in (5, 9, 12)]
    handle = attach(model, device_budget="64MiB", device="cpu")
    with caplog.at_level("INFO", logger="ds_finepage"):
        for length, expected in zip((5, 9, 12), plain, strict=True):
            assert torch.equal(tokens(model, token_ids(length), 3, cache=None), expected)
    said = [r for r in caplog.records if "is captured by itself" in r.message]
    assert 0 < len(said) <= handle.stats.num_captures
    assert "failed while attempting" not in capfd.readouterr().err
    handle.detach()


def test_plans_of_a_generation_are_kept_and_found_again(tmp_path: Path) -> None:
    model = make_model("mistral")  # counts its tokens, so that sizes are arguments of ops too
    plain = tokens(model, token_ids(6), 30, cache=None)
    settings = {"device_budget": "400KiB", "policy": "horizon", "plan_dir": str(tmp_path)}
    for is_first in (True, False):
        torch._dynamo.reset()
        handle = attach(model, device="cpu", **settings)
        assert torch.equal(tokens(model, token_ids(6), 30, cache=None), plain)
        assert (handle.stats.num_plans > 0) is is_first
        handle.detach()


# A cache that has no room.


@dataclass
class Large:
    """A model whose KV cache is larger than the budget, and what plain transformers generated."""

    model: Any
    handle: Handle
    budget_bytes: int
    cache_bytes: int


BATCH, LENGTH, NEW = 6, 100, 12
LAST: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}


@pytest.fixture(scope="module")
def large() -> Iterator[Large]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=10)
    handle = attach(model, device_budget="64MiB", device="cpu")
    longest = Longest(BATCH, LENGTH + NEW, LENGTH)
    cache_bytes = kv_bytes(model.config, model.dtype, longest)
    assert cache_bytes is not None
    yield Large(model, handle, cache_bytes * 9 // 10, cache_bytes)
    handle.detach()


PAGED: dict[str, Callable[[Any], torch.Tensor]] = {
    "greedy": lambda m: greedy(m, input_ids=token_ids(LENGTH, batch=BATCH), max_new_tokens=NEW),
    "beams": lambda m: greedy(
        m, input_ids=token_ids(LENGTH, batch=2), num_beams=3, max_new_tokens=NEW
    ),
}


@pytest.mark.parametrize("name", PAGED)
def test_a_cache_larger_than_the_budget_goes_to_host_memory(large: Large, name: str) -> None:
    model, handle = large.model, large.handle
    handle.replan(budget_bytes=64 << 20)
    plain = PAGED[name](model)  # held against plain transformers by the tests above
    handle.replan(budget_bytes=large.budget_bytes)
    before = handle.stats.num_caches_on_host
    for _ in range(2):
        with DeviceMeter(torch.device("cpu")) as meter:
            assert torch.equal(PAGED[name](model), plain)
        assert 0 < meter.peak_bytes <= handle.stats.budget_bytes
    assert handle.stats.num_caches_on_host > before
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    assert handle.stats.budget_bytes < large.cache_bytes


def test_a_cache_in_host_memory_can_be_cut_and_gone_on_with(large: Large) -> None:
    model, handle = large.model, large.handle
    ids = token_ids(LENGTH, batch=BATCH)

    def steps() -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            out = model(ids, **LAST)
            cache = out.past_key_values
            for step in range(4):
                new = token_ids(3, batch=BATCH, seed=step)
                out = model(new, past_key_values=cache, **LAST)
                found.append(out.logits)
                cache.crop(-2)
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.arange(0, 2 * BATCH, 2))
                assert cache.get_seq_length() == LENGTH + step + 1
        return found

    handle.replan(budget_bytes=64 << 20)
    plain = steps()
    handle.replan(budget_bytes=large.budget_bytes)
    before = handle.stats.num_caches_on_host
    for a, b in zip(steps(), plain, strict=True):
        assert torch.equal(a, b)
    assert handle.stats.num_caches_on_host == before + 1


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_a_cache_in_host_memory_goes_on_with_a_model_that_is_not_attached(mode: Any) -> None:
    model = make_model("llama")

    def steps(*, on_host: bool) -> list[torch.Tensor]:
        with mode():
            cache = model(token_ids(9, batch=2), **LAST).past_key_values
            if on_host:
                assert move_to_host(cache, pinned=False)
        found = []
        with torch.no_grad():
            for seed in range(3):
                new = token_ids(1, batch=2, seed=seed)
                found.append(model(new, past_key_values=cache, **LAST).logits)
        assert cache.get_seq_length() == 9 + 3
        return found

    plain = steps(on_host=False)
    assert all(map(torch.equal, steps(on_host=True), plain))


def test_what_a_failed_forward_has_added_is_taken_back() -> None:
    model = make_model("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(token_ids(5), past_key_values=cache, use_cache=True)
        before = seen_lengths([cache])
        cache.layers[0].update(*(torch.zeros(1, 2, 3, 32) for _ in range(2)))
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 5]
    assert take_back(before)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    empty = DynamicCache(config=model.config)
    before = seen_lengths([empty])
    empty.layers[1].update(*(torch.zeros(1, 2, 3, 32) for _ in range(2)))
    assert take_back(before)
    assert empty.get_seq_length() == 0
    window = DynamicCache(config=make_model("mistral").config)
    before = seen_lengths([window])
    window.layers[0].update(*(torch.zeros(1, 2, 3, 32) for _ in range(2)))
    assert not take_back(before)  # what slid out of it is gone


def test_an_error_leaves_the_cache_in_host_memory_as_it_was(large: Large) -> None:
    model, handle = large.model, large.handle
    ids, new = token_ids(LENGTH, batch=BATCH), token_ids(1, batch=BATCH)
    handle.replan(budget_bytes=large.budget_bytes)
    with torch.no_grad():
        cache = model(ids, **LAST).past_key_values
        failing = iter([RuntimeError("stop")])

        def fail(*_: Any) -> None:
            for error in failing:
                raise error

        remove = handle.register_op_hook(after=fail)
        with pytest.raises(RuntimeError, match="stop"):
            model(new, past_key_values=cache, **LAST)
        remove()
        assert cache.get_seq_length() == LENGTH
        once = model(new, past_key_values=cache, **LAST).logits
    assert cache.get_seq_length() == LENGTH + 1
    handle.replan(budget_bytes=64 << 20)
    with torch.no_grad():
        cache = model(ids, **LAST).past_key_values
        assert torch.equal(model(new, past_key_values=cache, **LAST).logits, once)


# Bad input.


def test_a_prompt_longer_than_the_positions_is_refused() -> None:
    model = make_model("gpt2")
    plain = tokens(model, token_ids(6), 3)
    handle = attach(model, device_budget="64MiB", device="cpu")
    with pytest.raises(ConfigError, match="prompt has 300 tokens, and the model knows 256"):
        model.generate(token_ids(300), max_new_tokens=3)
    assert torch.equal(tokens(model, token_ids(6), 3), plain)
    handle.detach()
    assert "generate" not in vars(model)


def test_a_cache_that_fits_nowhere_is_refused_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    handle = attach(model, device_budget="1MiB", device="cpu")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    settings = {"max_new_tokens": 200, "num_beams": 8}
    need = 2 * 2 * (206 * 8) * 64 * 4
    with pytest.raises(PlanInfeasibleError, match=f"{need} bytes.*1048576.*1000 bytes of host"):
        model.generate(token_ids(6), **settings)
    assert handle.stats.num_captures == 0
    handle.detach()


def test_a_layer_whose_cache_is_larger_than_the_device_is_refused_at_once() -> None:
    model = make_model("llama")
    handle = attach(model, device_budget="1MiB", device="cpu")
    with pytest.raises(PlanInfeasibleError, match="of KV cache in one layer; device_budget is"):
        model.generate(token_ids(6), max_new_tokens=2100)
    assert handle.stats.num_captures == 0
    handle.detach()


def test_what_a_generation_needs_at_its_longest() -> None:
    model = make_model("mistral")
    ids = token_ids(6, batch=3)
    assert longest_of(model, (ids,), {"max_new_tokens": 4}) == Longest(3, 10, 6)
    assert longest_of(model, (), {"input_ids": ids, "max_length": 30}) == Longest(3, 30, 6)
    many = {"inputs": ids, "max_new_tokens": 1, "num_beams": 2, "num_return_sequences": 4}
    assert longest_of(model, (), many) == Longest(12, 7, 6)
    assert longest_of(model, (), {"max_new_tokens": 4}) is None
    window = kv_bytes(model.config, torch.bfloat16, Longest(3, 100, 6))
    assert window == 2 * 2 * 16 * 3 * 64 * 2  # layers, keys and values, rows, batch, width, bytes
    require_memory(100, 60, 60, 40, Longest(1, 1, 1))


@pytest.mark.parametrize("change", ({"num_hidden_layers": 3}, {"num_key_value_heads": 4}))
def test_the_cache_of_another_model_is_refused(change: dict[str, int]) -> None:
    model, other = make_model("llama"), make_model("llama", **change)
    cache = DynamicCache(config=other.config)
    with torch.no_grad():
        other(token_ids(4), past_key_values=cache, **LAST)
        handle = attach(model, device_budget="64MiB", device="cpu")
        with pytest.raises(StoreError, match="cache of another model"):
            model(token_ids(1), past_key_values=cache, **LAST)
        model(token_ids(1), use_cache=True)
    handle.detach()


def test_generate_goes_on_after_detach() -> None:
    model = make_model("llama")
    plain = tokens(model, token_ids(6), 4, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu")
    assert torch.equal(tokens(model, token_ids(6), 4, cache=None), plain)
    handle.detach()
    assert torch.equal(tokens(model, token_ids(6), 4, cache=None), plain)


# What stays behind.


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def test_memory_does_not_grow_over_many_calls() -> None:
    model = make_model("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    handle = attach(model, device_budget="64MiB", device="cpu")
    for length in (20, 30, 60):
        tokens(model, token_ids(length), 8, cache=None)
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    process, seen = psutil.Process(), []
    for call in range(500):
        tokens(model, token_ids(3 + call % 50), 1 + call % 7, cache=None)
        if call in (249, 499):
            seen.append((num_tensors(), process.memory_info().rss))
    (tensors_before, rss_before), (tensors_after, rss_after) = seen
    assert tensors_after == tensors_before
    assert rss_after - rss_before <= 4 << 20
    handle.detach()


class Emitted(BaseStreamer):
    """Counts the tokens that come out."""

    def __init__(self) -> None:
        self.num_tokens = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1

    def end(self) -> None:
        pass


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_generation_that_cannot_end_does_not_begin(attention: str) -> None:
    model = make_model("llama", num_key_value_heads=1, attn_implementation=attention)
    ids = token_ids(6, batch=32)
    handle = attach(model, device_budget="1GiB", device="cpu")
    with torch.no_grad():
        model(ids, use_cache=True)
    least = handle.stats.min_budget_bytes
    refused: dict[int, str] = {}
    for percent in (100, 170, 300):
        emitted = Emitted()
        handle.replan(budget_bytes=least * percent // 100)
        try:
            tokens(model, ids, 124, cache=None, streamer=emitted)
        except PlanInfeasibleError as error:
            assert emitted.num_tokens == -1
            refused[percent] = str(error)
        else:
            assert emitted.num_tokens == 124
    assert any("last step of 32 sequences of 130 tokens" in text for text in refused.values())
    assert {100, 300}.intersection(refused) == {100}
    handle.detach()


def test_a_last_step_that_cannot_be_captured_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureError("layers of another kind")

    monkeypatch.setattr("ds_finepage.generation.capture_config", refuse)
    model = make_model("llama")
    plain = tokens(model, token_ids(60), 4, cache=None)
    handle = attach(model, device_budget="2MiB", device="cpu")
    with caplog.at_level("INFO", logger="ds_finepage.generation"):
        assert torch.equal(tokens(model, token_ids(60), 4, cache=None), plain)
    assert "layers of another kind" in caplog.text
    handle.detach()


def test_lengths_are_looked_at_once_for_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def capture(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["seq"])
        return capture_config(*args, **kwargs)

    monkeypatch.setattr("ds_finepage.generation.capture_config", capture)
    model = make_model("llama")
    handle = attach(model, device_budget="2MiB", device="cpu")
    for length in (40, 50, 60, 45, 70, 100):
        tokens(model, token_ids(length), 2, cache=None)
    assert seen == [63, 127]
    handle.detach()


def test_layers_that_differ_are_not_asked_for_one_width() -> None:
    config = transformers.CONFIG_MAPPING["gemma4_text"](
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"global_head_dim": 32, "hidden_size_per_layer_input": 8, "pad_token_id": 0},
        **{"vocab_size_per_layer_input": 64, "eos_token_id": None},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.ones(1, 8, dtype=torch.long)
    plain = tokens(model, ids, 3, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu")
    assert torch.equal(tokens(model, ids, 3, cache=None), plain)
    assert kv_bytes(model.config, torch.float32, Longest(1, 9, 8)) is None
    handle.detach()


def test_the_call_s_own_settings_are_looked_at() -> None:
    model = make_model("llama")
    ids = token_ids(6)
    settings = GenerationConfig(max_new_tokens=4, num_beams=3, use_cache=False)
    assert longest_of(model, (ids, settings), {}) == Longest(3, 10, 6)
    assert longest_of(model, (ids,), {"generation_config": settings}) == Longest(3, 10, 6)
    handle = attach(model, device_budget="1MiB", device="cpu")
    long = {"max_new_tokens": 3000}  # whose KV cache has no room; there is none here
    handle.stats.budget_bytes = 1 << 20
    with pytest.raises(PlanInfeasibleError, match="of KV cache in one layer"):
        model.generate(ids, **long)
    settings = GenerationConfig(max_new_tokens=2, use_cache=False, eos_token_id=None)
    assert model.generate(ids, settings, do_sample=False).shape == (1, 8)
    handle.detach()


def test_one_new_token_needs_no_step() -> None:
    model = make_model("llama", num_key_value_heads=4, max_position_embeddings=2048)
    ids = token_ids(1100)
    handle = attach(model, device_budget="64MiB", device="cpu")
    tokens(model, ids, 1, cache=None)
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    assert tokens(model, ids, 1, cache=None).shape == (1, 1101)
    handle.detach()


def test_the_rows_that_a_cache_has_already_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama", max_position_embeddings=2048)
    with torch.no_grad():
        cache = model(token_ids(1000), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    seen = []
    monkeypatch.setattr("ds_finepage.generation.require_memory", lambda *a: seen.append(a[3]))
    handle = attach(model, device_budget="64MiB", device="cpu")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7}))
    found = model.generate(token_ids(1004), past_key_values=cache, max_new_tokens=3)
    assert found.shape == (1, 1007)
    assert seen == [7 + held]
    handle.detach()
