"""What an endpoint says of a budget before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as hf

from ds_finepage.config import DeviceBudget
from ds_finepage.graph.profiles import load_profile
from ds_finepage.serving.worth import (
    LEAST_CONTEXT,
    NUM_TRIES,
    longest_context,
    warm_lengths,
    worth_of,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def test_of_a_model_of_images_the_steps_of_its_text_model_are_predicted(tmp_path: Path) -> None:
    text = hf.LlamaConfig(**SIZES, vocab_size=64, max_position_embeddings=40)
    vision = hf.CLIPVisionConfig(**SIZES, image_size=56, patch_size=14)
    hf.LlavaConfig(vision_config=vision, text_config=text, dtype="float32").save_pretrained(
        tmp_path
    )
    budget = DeviceBudget.parse("2MiB", name="budget")
    figures, longest = worth_of(str(tmp_path), budget, load_profile("t4"))
    assert longest == 40
    layer_bytes = 4 * (4 * 64 * 64 + 3 * 64 * 128)
    assert 2 * layer_bytes < figures["weights_bytes"] < 3 * layer_bytes


@pytest.mark.parametrize("power", [1, 1.5, 2])
@pytest.mark.parametrize("budget_bytes", [2_000, 50_000, 3_000_000])
def test_the_longest_context_has_room_and_a_longer_one_has_not(
    power: float, budget_bytes: int
) -> None:
    asked = []

    def least_bytes(seq: int) -> int:
        asked.append(seq)
        return 1000 + int(3 * seq**power)

    found = longest_context(least_bytes, 100_000, budget_bytes)
    assert least_bytes(found) <= budget_bytes and found >= LEAST_CONTEXT
    if power == 1 and found < 100_000:
        assert least_bytes(found + 2) > budget_bytes
    assert len(asked) <= NUM_TRIES + 4


def test_a_model_with_few_positions_takes_all_of_them() -> None:
    assert longest_context(lambda seq: seq, 100, 1000) == 100
    assert longest_context(lambda seq: seq, 8, 1000) == 8


def test_prompts_are_halved_and_the_first_kind_comes_twice() -> None:
    assert warm_lengths(200) == [128, 96, 64, 32, 16]
    assert warm_lengths(1 << 20)[:3] == [4096, 3072, 2048]
    assert warm_lengths(20) == [16, 12]
