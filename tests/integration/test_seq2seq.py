"""Encoder-decoders: ``generate`` calls the encoder by itself, which is planned like the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tests.integration import vocabularies
from tests.integration.parity import equal, same_at_every_budget

HIDDEN = 64
VOCAB = 256
SAMPLING_RATE = 16_000
CHUNK_SECONDS = 2  # Whisper hears so much at a time, instead of 30

_BART_SIZES: dict[str, Any] = {
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
}

MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda **sizes: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            d_kv=HIDDEN // 4,
            d_ff=2 * HIDDEN,
            num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
            **sizes,
        )
    ),
    "bart": lambda **sizes: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCAB,
            forced_eos_token_id=None,
            **{"max_position_embeddings": 128, **_BART_SIZES, **sizes},
        )
    ),
}


def make(family: str, **sizes: int) -> Any:
    """Make a tiny random model whose ``generate`` never stops early."""
    torch.manual_seed(0)
    model = MODELS[family](**sizes).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts() -> dict[str, torch.Tensor]:
    """Return two prompts, the second of which ends with padding."""
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 6:] = mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_those_of_plain_transformers(family: str) -> None:
    model, inputs = make(family), prompts()

    def run() -> Any:
        with torch.no_grad():
            return model.generate(**inputs, max_new_tokens=16, do_sample=False)

    stats = same_at_every_budget(model, run, budgets=("min", "100%"))
    assert stats.passes[0].num_runs >= 3  # the encoder


def test_what_the_encoder_has_made_counts_while_the_decoder_runs() -> None:
    """The decoder's cache outgrows what the encoder needed, and the encoder's output stays."""
    model = make("bart", decoder_layers=6, max_position_embeddings=512)
    ids = torch.randint(3, VOCAB, (1, 500), generator=torch.Generator().manual_seed(1))

    def run() -> Any:
        with torch.no_grad():
            return model.generate(input_ids=ids, max_new_tokens=70, do_sample=False)

    same_at_every_budget(model, run, budgets=("min",))


@pytest.mark.parametrize("family", MODELS)
def test_one_forward_of_both_halves(family: str) -> None:
    model, inputs = make(family), prompts()

    def run() -> Any:
        with torch.no_grad():
            return model(**inputs, decoder_input_ids=inputs["input_ids"][:, :4]).logits

    assert same_at_every_budget(model, run).num_captures == 1


def test_a_part_that_is_called_by_itself_is_planned() -> None:
    model, ids = make("t5"), prompts()["input_ids"]

    def run() -> Any:
        with torch.no_grad():
            hidden = model.get_encoder()(ids).last_hidden_state
            return [hidden, model.decoder(ids[:, :3], encoder_hidden_states=hidden)[0]]

    assert same_at_every_budget(model, run).num_captures == 2


def test_a_hook_on_a_part_is_called_and_breaks_nothing() -> None:
    model, inputs = make("bart"), prompts()
    calls = []

    def run() -> Any:
        with torch.no_grad():
            return model.model.encoder(**inputs).last_hidden_state

    def double(module: Any, args: Any, output: Any) -> Any:
        calls.append(1)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    before = run()
    model.model.encoder.register_forward_hook(double)
    same_at_every_budget(model, run, budgets=("min",))
    assert calls and not equal(run(), before)


def test_a_speech_pipeline_writes_what_it_writes_without_finepage() -> None:
    tokenizer = vocabularies.whisper()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in vocabularies.WHISPER_SPECIAL}
    end = ids["<|endoftext|>"]
    torch.manual_seed(0)
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=len(tokenizer),
            max_source_positions=CHUNK_SECONDS * 50,
            max_target_positions=64,
            decoder_start_token_id=ids["<|startoftranscript|>"],
            pad_token_id=end,
            bos_token_id=end,
            eos_token_id=end,
            **_BART_SIZES,
        )
    ).eval()
    settings = model.generation_config
    settings.is_multilingual = True
    settings.lang_to_id = {"<|en|>": ids["<|en|>"]}
    settings.task_to_id = {"transcribe": ids["<|transcribe|>"]}
    settings.no_timestamps_token_id = ids["<|notimestamps|>"]
    settings.suppress_tokens = list(range(end, len(tokenizer)))  # so that there is a text
    settings.begin_suppress_tokens = None
    settings.max_new_tokens = 8
    recognize = hf.pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=tokenizer,
        feature_extractor=hf.WhisperFeatureExtractor(chunk_length=CHUNK_SECONDS),
        device="cpu",
    )
    at = np.arange(SAMPLING_RATE) / SAMPLING_RATE
    tone = np.sin(2 * np.pi * 440 * at).astype(np.float32)

    def run() -> Any:
        return [recognize({"raw": tone.copy(), "sampling_rate": SAMPLING_RATE})]

    assert run()[0]["text"]
    same_at_every_budget(model, run)
