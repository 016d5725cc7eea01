"""What an endpoint says of a budget before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as hf

from ds_finepage.config import DeviceBudget
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.serving.worth import (
    LEAST_CONTEXT,
    NUM_TRIES,
    PAGE,
    Room,
    longest_context,
    warm_lengths,
    worth_of,
)
from ds_finepage.whatif import capture_model, forms_of

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
    figures, room = worth_of(str(tmp_path), budget, load_profile("t4"))
    assert room == Room(longest=40)
    layer_bytes = 4 * (4 * 64 * 64 + 3 * 64 * 128)
    assert 2 * layer_bytes < figures["weights_bytes"] < 3 * layer_bytes


def test_clients_who_share_passes_have_blocks_in_half_of_the_budget(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**SIZES, vocab_size=64, max_position_embeddings=512, dtype="float32")
    config.save_pretrained(tmp_path)
    row_bytes = 2 * 2 * 64 * 4  # keys and values of 2 layers

    def room_of(budget_bytes: int, clients: int) -> Room:
        budget = DeviceBudget.parse(budget_bytes, name="budget")
        return worth_of(str(tmp_path), budget, load_profile("t4"), clients=clients)[1]

    small, ample = room_of(1 << 20, 8), room_of(1 << 25, 3)
    assert small.cached * row_bytes <= 1 << 19 < (small.cached + PAGE) * row_bytes
    assert small.clients == 8 and small.longest == small.cached - 1
    assert ample.cached == 3 * 2 * 512 and ample.longest == ample.tokens_a_pass == 512
    assert LEAST_CONTEXT <= small.tokens_a_pass < small.longest


def test_blocks_that_no_client_has_take_room_too(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 2048, "max_position_embeddings": 512, "vocab_size": 64}
    hf.LlamaConfig(**sizes, dtype="float32").save_pretrained(tmp_path)
    budget = DeviceBudget.parse(1 << 22, name="budget")
    figures, room = worth_of(str(tmp_path), budget, load_profile("t4"), clients=2)
    cache_bytes = room.cached * 2 * 2 * 64 * 4
    assert cache_bytes == 1 << 21 < figures["weights_bytes"]
    assert figures["weights and KV cache that stay on the device_bytes"] < (1 << 22) - cache_bytes


def test_the_step_of_all_clients_is_predicted(tmp_path: Path) -> None:
    hf.LlamaConfig(**SIZES, vocab_size=64, dtype="float32").save_pretrained(tmp_path)
    budget = DeviceBudget.parse("64MiB", name="budget")
    figures, _ = worth_of(str(tmp_path), budget, load_profile("t4"), clients=4)
    alone, _ = worth_of(str(tmp_path), budget, load_profile("t4"))
    together = float(figures["tokens a second, clients a pass: 4"])
    assert together > 2 * float(alone["tokens a second, clients a pass: 1"])


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
    assert len(asked) <= NUM_TRIES + 4
    if power == 1 and found < 100_000:
        assert least_bytes(found + 2) > budget_bytes
        assert len(asked) <= 6  # a straight line finds it at once


def test_a_model_with_few_positions_takes_all_of_them() -> None:
    assert longest_context(lambda seq: seq, 100, 1000) == 100
    assert longest_context(lambda seq: seq, 8, 1000) == 8


def test_prompts_are_halved() -> None:
    assert warm_lengths(200) == [128, 64, 32, 16]
    assert warm_lengths(1 << 20)[:3] == [4096, 2048, 1024]
    assert warm_lengths(20) == [16]


def test_a_budget_for_steps_alone_is_refused(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 1024, "max_position_embeddings": 64, "vocab_size": 64}
    hf.LlamaConfig(**sizes, dtype="float32").save_pretrained(tmp_path)
    profile, given = load_profile("t4"), {"batch": 1, "profile": load_profile("t4")}

    def least_bytes(phase: str, seq: int) -> int:
        captured = capture_model(str(tmp_path), phase=phase, seq=seq, **given)
        forms = forms_of(captured, policy="finepage", split=True)
        return min(needs.min_budget_bytes for _, needs in forms)

    prompt_bytes = least_bytes("prefill", LEAST_CONTEXT)
    assert least_bytes("decode", 64) < prompt_bytes
    with pytest.raises(PlanInfeasibleError) as refused:
        worth_of(str(tmp_path), DeviceBudget.parse(prompt_bytes - 1, name="budget"), profile)
    assert refused.value.min_budget_bytes == prompt_bytes
    figures, room = worth_of(
        str(tmp_path), DeviceBudget.parse(prompt_bytes, name="budget"), profile
    )
    assert room.longest == LEAST_CONTEXT and figures["longest context, tokens"] == LEAST_CONTEXT
