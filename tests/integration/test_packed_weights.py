"""Models whose weights are packed: equal to the same packed model in plain transformers."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.graph.packed import PACKED_LINEAR, SLICED_LINEAR
from ds_finepage.packing import kept, op, sliced
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import pack_model
from ds_finepage.planning.rewrite import split
from tests.integration.families import make_model, token_ids
from tests.integration.parity import results, same_at_every_budget, same_within

FORMS = {name: PackedForm.parse(name) for name in ("int4", "int8")}
NUM_LAYERS = {"llama": 7, "mixtral": 5, "gpt2": 4}
PROMPT = token_ids(7)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("family", "form", "dtype"),
    [
        ("llama", "int4", torch.float32),
        ("llama", "int8", torch.bfloat16),
        ("mixtral", "int8", torch.bfloat16),
        ("gpt2", "int4", torch.bfloat16),
    ],
    ids=str,
)
def test_packed_models_are_the_same_at_every_budget(
    family: str, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "SLICE_ROWS", 96)  # so that a weight has several slices
    model = make_model(family, dtype, num_hidden_layers=1)
    whole_bytes = sum(p.nbytes for p in model.parameters())
    packed = pack_model(model, FORMS[form])
    assert len(packed) == NUM_LAYERS[family]
    packed_bytes = sum(p.nbytes for p in model.parameters())
    stats = same_at_every_budget(model, lambda: results(model, PROMPT))
    assert stats.weight_bytes == packed_bytes < whole_bytes


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_packed_output_layer_is_the_same_at_every_budget(is_tied: bool) -> None:
    model = make_model("llama", torch.bfloat16, tie_word_embeddings=is_tied)
    packed = pack_model(model, PackedForm.parse("int4+output"))
    assert ("lm_head" in packed) is not is_tied
    stats = same_at_every_budget(model, lambda: results(model, PROMPT))
    assert stats.weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "policy"), [(torch.float32, "finepage"), (torch.bfloat16, "horizon")], ids=str
)
def test_without_split_no_weight_is_needed_whole(
    dtype: torch.dtype, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output layer, which is not packed, is larger than the least budget."""
    monkeypatch.setattr(op, "SLICE_ROWS", 32)
    monkeypatch.setattr(split, "CUT_ROWS", 32)
    for module in (sliced, split):
        monkeypatch.setattr(module, "OUTPUT_ROWS", 64)
    torch._dynamo.reset()
    model = make_model("llama", dtype, num_hidden_layers=1, vocab_size=2048)
    plain = results(model.eval(), PROMPT)
    pack_model(model, PackedForm.parse("int4", 32))
    expected = results(model, PROMPT)
    assert not all(map(torch.equal, expected, plain))
    handle = attach(model, device_budget="1GiB", device="cpu", policy=policy)
    assert all(map(torch.equal, results(model, PROMPT), expected))
    least = handle.stats.min_budget_bytes
    assert least < model.lm_head.weight.nbytes
    for seed, budget_bytes in enumerate((least, least * 5 // 4, least * 2)):
        same_within(handle, lambda: results(model, PROMPT), expected, budget_bytes, seed)
    handle.replan(budget_bytes=least)
    results(model, PROMPT)
    tight = min((m for m, _ in handle.plans()), key=lambda m: m.arena_bytes)
    ops = [t.op for t in tight.graph.tasks]
    assert ops.count(SLICED_LINEAR) == 2048 // 64 and ops.count(PACKED_LINEAR) > 7
    assert not handle.stats.unplanned_reasons


@pytest.mark.parametrize("form", FORMS)
def test_the_key_packs_a_model_and_leaves_it_packed(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = make_model("llama")
    same = copy.deepcopy(model)
    pack_model(same, PackedForm.parse(form, 32))
    plain = results(same, PROMPT)
    with caplog.at_level(logging.WARNING):
        handle = attach(
            model, device_budget="90%weights", device="cpu", weights=form, weights_group=32
        )
    said = [r.getMessage() for r in caplog.records if "quantised model" in r.getMessage()]
    assert said == [
        f"linear layers and experts of LlamaForCausalLM are packed as {form} in groups of 32: "
        "results are those of the quantised model"
    ]
    assert all(map(torch.equal, results(model, PROMPT), plain))
    stats = handle.stats
    assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
    assert stats.weight_bytes == sum(p.nbytes for p in same.parameters())
    handle.detach()
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    assert all(map(torch.equal, results(model, PROMPT), plain))


def test_a_stand_in_has_what_the_folder_keeps_of_a_packed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = make_model("llama")
    asked = {"device": "cpu", "weights_group": 16, "weights_dir": str(tmp_path)}
    packed = copy.deepcopy(llama)
    attach(packed, device_budget="150%weights", weights="int4", **asked).detach()
    monkeypatch.setattr(kept, "pack", None)
    handle = attach(llama, device_budget="85%weights", draft="stand-in", **asked)
    for name, copied in handle.draft.named_modules():
        if isinstance(copied, PackedLinear):
            assert torch.equal(copied.numbers, packed.get_submodule(name).numbers)
