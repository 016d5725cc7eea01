"""A checkpoint loaded for tensor parallelism, cut by hand, and read: one process plays a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import modeling_utils
from transformers.integrations import HfDeepSpeedConfig

from ds_finepage.errors import RankError
from ds_finepage.integrations.deepspeed import loading, shard_loading
from ds_finepage.integrations.deepspeed.deferred import DeferredTensor
from tests.integration.engines import one_process_deepspeed
from tests.integration.families import make_model
from tests.integration.test_loading import ds_config, load, masters

GATE = "model.layers.0.mlp.gate_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[Any]:
    with one_process_deepspeed() as found:
        found.init_distributed("gloo")
        yield found


def config_of_ranks(**changes: Any) -> dict[str, Any]:
    return ds_config(tensor_parallel={"autotp_size": 2}, **changes)


def read(model: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Read what a rank needs, as in the engine."""
    bf16 = config.get("bf16", {}).get("enabled", False)
    engine = SimpleNamespace(
        mpu=SimpleNamespace(get_data_parallel_group=lambda: torch.distributed.group.WORLD),
        _config=SimpleNamespace(_param_dict=config),
        fp16_enabled=lambda: False,
        bfloat16_enabled=lambda: bf16,
    )
    shard_loading.note_parts(model)
    shard_loading.read_parts(engine, model)
    return masters(model)


@pytest.mark.parametrize("family", ("llama", "mixtral", "gpt2"))
def test_nothing_is_read_before_the_model_is_cut(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_model(family)
    expected.save_pretrained(tmp_path, max_shard_size="200KB")
    with monkeypatch.context() as patch:
        patch.setattr(DeferredTensor, "value", lambda _: pytest.fail("read"))
        patch.setattr(DeferredTensor, "read_into", lambda *_: pytest.fail("read"))
        model, info = load(tmp_path, config_of_ranks(), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["error_msgs"]
    assert all(parameter.is_meta for parameter in model.parameters())
    found = read(model, config_of_ranks())
    plain = dict(expected.named_parameters())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_masters_are_the_parts_that_are_left(tmp_path: Path, dtype: torch.dtype) -> None:
    """Casts to the dtype of the ds_config, whatever the model was loaded in."""
    expected = make_model("llama")
    expected.save_pretrained(tmp_path)
    config = config_of_ranks(bf16={"enabled": dtype is torch.bfloat16})
    model = load(tmp_path, config, dtype=torch.float32)
    for name, dim in ((GATE, 0), (DOWN, 1)):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.chunk(2, dim)[1]
    found = read(model, config)
    plain = {name: p.to(dtype) for name, p in expected.named_parameters()}
    plain[GATE], plain[DOWN] = plain[GATE].chunk(2)[1], plain[DOWN].chunk(2, 1)[1]
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    marks = [model.get_parameter(name)._is_hf_initialized for name in plain]
    assert all(marks)


def test_weights_that_no_checkpoint_brings_are_initialised(tmp_path: Path) -> None:
    make_model("llama").model.save_pretrained(tmp_path)
    model = load(tmp_path, config_of_ranks())
    head = model.lm_head.weight.detach().clone()
    assert head.device.type == "cpu" and head.std() > 0
    assert torch.equal(read(model, config_of_ranks())["lm_head.weight"], head)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    expected = make_model("gpt2", tie_word_embeddings=True)
    expected.save_pretrained(tmp_path)
    model = load(tmp_path, config_of_ranks())
    assert model.lm_head.weight is model.transformer.wte.weight
    read(model, config_of_ranks())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_pinned_masters_have_the_same_values(tmp_path: Path) -> None:
    expected = make_model("llama")
    expected.save_pretrained(tmp_path)
    config = config_of_ranks()
    config["zero_optimization"]["offload_param"]["pin_memory"] = True
    found = read(load(tmp_path, config), config)
    assert all(torch.equal(found[name], p) for name, p in expected.named_parameters())


def test_an_error_of_reading_reaches_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    model = load(tmp_path, config_of_ranks())
    (tmp_path / "model.safetensors").unlink()
    found: list[str] = []
    monkeypatch.setattr(shard_loading.Meetings, "fail", lambda _, error: found.append(str(error)))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        read(model, config_of_ranks())
    assert "model.safetensors" in found[0]


def test_an_error_of_another_rank_ends_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    model = load(tmp_path, config_of_ranks())
    gone = OSError("model.safetensors is gone")
    monkeypatch.setattr(shard_loading.Meetings, "post", lambda self, _: self.fail(gone))
    with pytest.raises(RankError, match=r"rank 0 refuses .* model\.safetensors is gone"):
        read(model, config_of_ranks())


@pytest.mark.parametrize("section", ({"enabled": False}, {"weights": "int8"}))
def test_other_loads_are_not_deferred(section: dict[str, Any]) -> None:
    config = config_of_ranks()
    config["finepage"].update(section)
    keep_alive = HfDeepSpeedConfig(config)
    assert not loading.is_wanted(modeling_utils)
    del keep_alive
    keep_alive = HfDeepSpeedConfig(config_of_ranks())
    assert loading.is_wanted(modeling_utils)
    del keep_alive
