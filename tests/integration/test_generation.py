"""Generation as people call it: default caches, any decoding, tokens of plain transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.capture import recorder
from tests.integration.families import (
    CACHE,
    Streamer,
    greedy,
    left_padded,
    make_model,
    token_ids,
    tokens,
)
from tests.integration.parity import same_at_every_budget

pytestmark = pytest.mark.usefixtures("fresh")

NUM_TOKENS = 12
PROMPTS = (5, 150)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("gpt2", torch.bfloat16), ("mistral", torch.float32)],
    ids=str,
)
def test_the_default_cache_gives_the_tokens_of_plain_transformers(
    family: str, dtype: torch.dtype
) -> None:
    model = make_model(family, dtype, num_hidden_layers=2 if family == "llama" else 1)

    def run() -> list[torch.Tensor]:
        return [tokens(model, token_ids(n), NUM_TOKENS, cache=None) for n in PROMPTS]

    same_at_every_budget(model, run)


def test_a_padded_batch_has_the_logits_of_plain_transformers() -> None:
    """Two heads share keys. Eager and compiled transformers attend with a mask in two ways."""
    model = make_model("llama", num_hidden_layers=1)

    def run() -> list[torch.Tensor]:
        settings: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
        found = model.generate(**left_padded(12, 4), max_new_tokens=4, do_sample=False, **settings)
        return [found.sequences, *found.logits]

    same_at_every_budget(model, run)


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
    return model.generate(longer, **{CACHE: turn[CACHE]}, **settings)


def assisted(model: Any) -> torch.Tensor:
    draft = make_model("llama", model.dtype, seed=3, num_hidden_layers=1)
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
    "prompt lookup": lambda m: greedy(m, prompt_lookup_num_tokens=3),
    "chat": chat,
    "assisted": assisted,
}


def test_any_decoding_is_that_of_plain_transformers() -> None:
    model = make_model("llama", num_hidden_layers=1)
    plain = {name: decode(model) for name, decode in DECODINGS.items()}
    handle = attach(model, device_budget="64MiB", device="cpu")
    for name, decode in DECODINGS.items():
        least = handle.stats.min_budget_bytes  # of the others, without a draft
        assert torch.equal(decode(model), plain[name]), name
    handle.replan(budget_bytes=least)
    num_captures = handle.stats.num_captures
    for name, decode in DECODINGS.items():
        if decode is assisted:  # by a new draft, which is in the budget
            assert handle.stats.num_captures == num_captures
            handle.replan(budget_bytes=3 * least)
        assert torch.equal(decode(model), plain[name]), name
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")
def test_what_cannot_be_captured_with_symbols_is_captured_size_by_size(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without help torch cannot work out the shapes of its baddbmm with symbols.
    monkeypatch.setattr(recorder, "with_known_shapes", lambda op, args: args)
    model = make_model("bloom", n_layer=1)
    plain = [tokens(model, token_ids(n), 3, cache=None) for n in (5, 9, 12)]
    handle = attach(model, device_budget="64MiB", device="cpu")
    with caplog.at_level("INFO", logger="ds_finepage"):
        for length, expected in zip((5, 9, 12), plain, strict=True):
            assert torch.equal(tokens(model, token_ids(length), 3, cache=None), expected)
    said = [r for r in caplog.records if "is captured by itself" in r.message]
    assert 0 < len(said) <= handle.stats.num_captures
    assert "failed while attempting" not in capfd.readouterr().err


def test_models_with_other_numbers_have_plans_too() -> None:
    """The heads differ in width, so attention has another scale."""
    for num_heads in (2, 4):
        sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
        model = make_model("llama", num_hidden_layers=1, **sizes)
        plain = tokens(model, token_ids(7), 3)
        handle = attach(model, device_budget="64MiB", device="cpu")
        assert torch.equal(tokens(model, token_ids(7), 3), plain)
        handle.detach()
        assert handle.stats.num_unplanned_graphs == 0, handle.stats.unplanned_reasons


# What stays behind.


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def test_memory_does_not_grow_over_many_calls() -> None:
    torch._dynamo.reset()  # graphs of earlier tests are freed now, and not in between
    model = make_model("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    handle = attach(model, device_budget="64MiB", device="cpu")
    for length in (20, 30, 60):
        tokens(model, token_ids(length), 8, cache=None)
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    process, seen = psutil.Process(), []
    for call in range(200):  # 20 calls have every pair of a prompt and a length
        tokens(model, token_ids(3 + 11 * (call % 5)), 1 + 3 * (call % 4), cache=None)
        if call in (79, 199):
            seen.append((num_tensors(), process.memory_info().rss))
    (tensors_before, rss_before), (tensors_after, rss_after) = seen
    assert tensors_after == tensors_before
    assert rss_after - rss_before <= 2 << 20
