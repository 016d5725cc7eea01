"""Checkpoints packed while they are loaded, saved packed and loaded packed, within few bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.integrations import HfDeepSpeedConfig

import ds_finepage
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed import checkpoint_files
from ds_finepage.integrations.deepspeed.patches import is_wrapped
from ds_finepage.integrations.transformers.packed_loading import VERSION, PackedConfig
from ds_finepage.packing import kept, sliced
from ds_finepage.packing.form import Packed, PackedForm, pack
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import pack_model
from tests.integration import engines
from tests.integration.families import logits, make_model, token_ids
from tests.integration.peaks import HAS_PEAKS, make_large, peak_of_load

pytestmark = pytest.mark.usefixtures("deepspeed")

PROMPT = token_ids(7)
FORM = PackedForm.parse("int4", 32)
PACKED = PackedConfig.of(FORM)


def ds_config(**finepage: Any) -> dict[str, Any]:
    section = {"enabled": True, "device_budget": "120%weights", "weights": "int4"}
    section |= {"weights_group": FORM.group, **finepage}
    return engines.ds_config(section, bf16={"enabled": True})


def load(folder: Path, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    keep_alive = None if config is None else HfDeepSpeedConfig(config)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)
    finally:
        del keep_alive


def saved(folder: Path, family: str = "llama", form: PackedForm = FORM, **changes: Any) -> Any:
    """Save a model as it was trained; return the packed one that is to be compared with."""
    make_model(family, torch.bfloat16, **changes).save_pretrained(folder, max_shard_size="200KB")
    same = AutoModelForCausalLM.from_pretrained(folder)
    assert pack_model(same, form)
    return same


def assert_same(found: Any, expected: Any) -> None:
    theirs, ours = found.state_dict(), expected.state_dict()
    assert list(theirs) == list(ours)
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name


# Values.

OUTPUT = dataclasses.replace(FORM, packs_output=True)
TIED = {"tie_word_embeddings": True}
CASES: list[tuple[str, dict[str, Any], PackedForm]] = [
    ("llama", {"attention_bias": True}, FORM),
    ("gpt2", TIED, FORM),
    ("mixtral", {}, FORM),
    ("llama", {}, OUTPUT),
    ("llama", TIED, OUTPUT),
]


@pytest.mark.parametrize(("family", "changes", "form"), CASES, ids=str)
def test_a_checkpoint_is_packed_as_it_comes_and_saved_packed(
    family: str, changes: dict[str, Any], form: PackedForm, tmp_path: Path
) -> None:
    same = saved(tmp_path / "trained", family, form, **changes)
    assert isinstance(same.lm_head, PackedLinear) is (form is OUTPUT and changes is not TIED)
    model = load(tmp_path / "trained", quantization_config=PackedConfig.of(form))
    assert_same(model, same)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(logits(model, PROMPT), logits(same, PROMPT))

    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    again = load(tmp_path / "packed")
    assert_same(again, same)
    assert again.config.quantization_config.form == form
    ds_finepage.attach(
        again, device_budget="120%weights", weights=form.name, weights_group=form.group
    )
    assert torch.equal(logits(again, PROMPT), logits(same, PROMPT))


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_layer_is_sliced_where_it_is_not_packed(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced, "OUTPUT_ROWS", 64)
    same = saved(tmp_path / "trained", tie_word_embeddings=is_tied)
    model = load(tmp_path / "trained", quantization_config=PACKED)
    model.save_pretrained(tmp_path / "packed")
    for found in (same, model, load(tmp_path / "packed")):
        assert type(found.lm_head) is sliced.SlicedLinear
        assert (found.lm_head.weight is found.get_input_embeddings().weight) is is_tied
        assert_same(found, same)
        assert torch.equal(logits(found, PROMPT), logits(same, PROMPT))


def test_a_ds_config_keeps_what_it_packs(
    tmp_path: Path, deepspeed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = saved(tmp_path / "trained")
    asked = ds_config(weights_dir=str(tmp_path / "kept"))
    load(tmp_path / "trained", asked)

    def shapes_alone(weight: torch.Tensor, *others: Any) -> Packed:
        assert weight.is_meta
        return pack(weight, *others)

    monkeypatch.setattr(kept, "pack", shapes_alone)
    assert_same(load(tmp_path / "trained", asked), same)  # packed by transformers' loading
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    engine, *_ = deepspeed.initialize(model=plain, config=asked)  # packed by DeepSpeed's
    num_packed = sum(isinstance(m, PackedLinear) for m in engine.module.modules())
    assert num_packed == len(list((tmp_path / "kept").iterdir()))
    engine.destroy()


@pytest.mark.parametrize("kind", ["trained", "packed"])
def test_a_ds_config_packs_what_transformers_loads(
    kind: str, tmp_path: Path, deepspeed: Any
) -> None:
    same = saved(tmp_path / "trained")
    load(tmp_path / "trained", quantization_config=PACKED).save_pretrained(tmp_path / "packed")
    model = load(tmp_path / kind, ds_config())
    assert not any(hasattr(p, "ds_tensor") for p in model.parameters())
    assert_same(model, same)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config())
    with torch.no_grad():
        assert torch.equal(engine(PROMPT).logits, logits(same, PROMPT))
    stats = ds_finepage.stats(engine)
    assert stats.weight_bytes == sum(p.nbytes for p in same.parameters())
    assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
    engine.destroy()


def test_other_loads_stay_as_they_were(tmp_path: Path) -> None:
    saved(tmp_path)
    assert not any(isinstance(m, PackedLinear) for m in load(tmp_path).modules())
    config = ds_config(enabled=False)
    assert not any(isinstance(m, PackedLinear) for m in load(tmp_path, config).modules())
    assert is_wrapped(modeling_utils, "get_hf_quantizer")


@pytest.mark.parametrize("unusual", ["bin", "dtype"])
def test_files_that_cannot_be_read_in_pieces_are_packed_too(
    unusual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = saved(tmp_path)
    if unusual == "dtype":
        monkeypatch.setattr(checkpoint_files, "DTYPES", {})
        assert_same(load(tmp_path, quantization_config=PACKED), same)
    else:
        state = {n: t for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "config.json").write_text(json.dumps(config))
        torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
        assert_same(load(tmp_path / "bin", quantization_config=PACKED), same)


# Bytes.


@pytest.mark.skipif(not HAS_PEAKS, reason="needs Linux's /proc")
def test_host_bytes_stay_within_the_packed_ones_and_a_tensor(tmp_path: Path) -> None:
    whole_bytes = make_large("wide", tmp_path)
    largest_bytes = 32768 * 512 * 2
    config, packed = ds_config(weights_group=64), tmp_path / "packed"
    for name, saves in (("large", [packed]), ("packed", [])):
        peak_bytes, packed_bytes = peak_of_load(tmp_path, name, config, *saves)
        assert 1.1 * packed_bytes + largest_bytes < whole_bytes  # else it would show nothing
        assert packed_bytes < 1.01 * peak_bytes  # the packed weights themselves were seen
        assert peak_bytes <= 1.1 * packed_bytes + largest_bytes


# Refusals.


def edit(folder: Path, **changes: Any) -> None:
    """Change the ``quantization_config`` of a packed checkpoint."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}, and this ds_finepage reads"),
        ({"weights": "int3"}, "cannot be packed as 'int3'"),
        ({"weights_group": 7}, "groups of 7"),
        ({"weights_group": 48}, "groups of 48 do not divide"),
    ],
)
def test_a_packed_checkpoint_that_cannot_be_read_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    load(tmp_path, quantization_config=PACKED).save_pretrained(tmp_path / "packed")
    edit(tmp_path / "packed", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "packed")


def test_two_wishes_for_a_form_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="from_pretrained has another .*: finepage int8"):
        load(tmp_path, ds_config(), quantization_config=PackedConfig("int8", FORM.group))
    load(tmp_path, quantization_config=PACKED).save_pretrained(tmp_path / "packed")
    with pytest.raises(ConfigError, match="the checkpoint has another .*: finepage int4"):
        load(tmp_path / "packed", ds_config(weights="int8"))
    edit(tmp_path / "packed", quant_method="gptq")
    with pytest.raises(ConfigError, match="the checkpoint has another .*: gptq"):
        load(tmp_path / "packed", ds_config())


@pytest.mark.parametrize(
    ("value", "message"), [(torch.inf, "not finite"), (None, "shape .* in the checkpoint")]
)
def test_a_weight_that_cannot_be_packed_is_named(
    value: float | None, message: str, tmp_path: Path
) -> None:
    make_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name][:-1].clone() if value is None else state[name].fill_(value)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} has .*{message}"):
        load(tmp_path, quantization_config=PACKED)


def test_partitions_are_refused(tmp_path: Path, deepspeed: Any) -> None:
    saved(tmp_path)
    config = ds_config()
    whole = {**config, "finepage": {"enabled": True}}
    model = load(tmp_path, whole)
    with pytest.raises(ConfigError, match="this one has partitions"):
        deepspeed.initialize(model=model, config=config)
