"""Captures of models with an encoder, from their configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ds_finepage.errors import CaptureError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import BufferKind
from ds_finepage.whatif import capture_model, plan_captured
from tests.integration.families import CACHE
from tests.integration.test_from_config import capture, logits_of

T5 = transformers.T5Config(
    d_model=64,
    d_kv=16,
    d_ff=96,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=4,
    vocab_size=100,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
BART = transformers.BartConfig(
    d_model=64,
    encoder_layers=2,
    encoder_ffn_dim=96,
    encoder_attention_heads=4,
    decoder_layers=2,
    decoder_ffn_dim=96,
    decoder_attention_heads=4,
    vocab_size=100,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_a_model_with_an_encoder_gives_its_own_logits(config: Any) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    source, ids = torch.randint(4, 100, (2, 5)), torch.randint(4, 100, (2, 5))
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    given = {CACHE: cache, "use_cache": True}
    with torch.no_grad():
        first = model(source, decoder_input_ids=ids[:, :1], **given)
        encoded = (first.encoder_last_hidden_state,)
        model(encoder_outputs=encoded, decoder_input_ids=ids[:, 1:4], **given)
        rows = {
            f"{name}.{index}.{part}": getattr(layer, part).clone()
            for name, layers in (
                ("cache", cache.self_attention_cache.layers),
                ("source", cache.cross_attention_cache.layers),
            )
            for index, layer in enumerate(layers)
            for part in ("keys", "values")
        }
        last = model(encoder_outputs=encoded, decoder_input_ids=ids[:, 4:], **given)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    prefill = capture(config, "prefill", seq=5, dtype="float32")
    starts = {"cache_position": torch.tensor([0]), "source_position": torch.arange(5)}
    tokens = {"input_ids": source, "decoder_input_ids": ids[:, :1].contiguous()}
    assert torch.equal(logits_of(prefill, {**values, **starts, **tokens}), first.logits)

    decode = capture(config, "decode", seq=5, dtype="float32")
    for name, tensor in rows.items():
        if name.startswith("cache"):
            rows[name] = torch.nn.functional.pad(tensor, (0, 0, 0, 1))
    assert {b.name for b in decode.buffers if b.kind is BufferKind.INPUT} >= {
        name for name in rows if name.startswith("source")
    }
    tokens = {"decoder_input_ids": ids[:, 4:].contiguous(), "cache_position": torch.tensor([4])}
    assert torch.equal(logits_of(decode, {**values, **rows, **tokens}), last.logits)


def test_an_encoder_that_looks_at_values() -> None:
    with pytest.raises(CaptureError, match="BartForConditionalGeneration looks at values"):
        capture(BART, dtype="float16")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_keys_and_values_of_the_source_count_as_kv(phase: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(T5.to_json_string(use_diff=False))
    captured = capture_model(
        str(tmp_path), phase=phase, batch=2, seq=16, profile=load_profile("a100-80gb")
    )
    rows = 2 * 4 * 16 * 2  # batch, heads, width, bytes
    num_own = 1 if phase == "prefill" else 16
    assert captured.kv_bytes == 3 * 2 * rows * (16 + num_own)  # layers, keys and values
    budget = captured.needs.needed_budget_bytes * 3 // 4
    planned = plan_captured(captured, budget_bytes=budget, profile=load_profile("a100-80gb"))
    assert planned.figures.peak_bytes <= budget
