"""Checkpoints loaded into ZeRO's partitions, held against transformers and the files' bytes."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, initialization, modeling_utils
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

import ds_finepage
from ds_finepage.errors import ConfigError
from ds_finepage.execution import disk, file_weights
from ds_finepage.integrations.deepspeed import deferred, loading
from ds_finepage.integrations.deepspeed.deferred import DeferredTensor
from tests.integration import engines
from tests.integration.engines import TINY_WEIGHTS
from tests.integration.families import logits, make_model, token_ids, tokens
from tests.integration.peaks import HAS_PEAKS, make_large, peak_of_load

pytestmark = pytest.mark.usefixtures("deepspeed")

PROMPT = token_ids(7)
SHARD = "200KB"


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every weight of these small models into pieces, the last of which is shorter."""
    monkeypatch.setattr(deferred, "PIECE_BYTES", 6000)


def ds_config(enabled: bool = True, **changes: Any) -> dict[str, Any]:
    section = {"enabled": enabled, "device_budget": "120%weights"}
    return {**engines.ds_config(section, zero=TINY_WEIGHTS), **changes}


def load(folder: Path, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Load under a ds_config; the same seed each time, for what the checkpoint does not bring."""
    keep_alive = HfDeepSpeedConfig(ds_config() if config is None else config)
    torch.manual_seed(0)
    try:
        return kwargs.pop("model_class", AutoModelForCausalLM).from_pretrained(folder, **kwargs)
    finally:
        del keep_alive


def masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """ZeRO's partitions, in the shapes of the parameters."""
    parameter: Any
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.numel() == 0 and parameter.ds_tensor.device.type == "cpu"
        found[name] = parameter.ds_tensor.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Types of the tensors that transformers was given to load, and what ZeRO gathered."""
    from deepspeed.runtime.zero.partition_parameters import Init

    found: dict[str, Any] = {"types": set(), "gathered": 0}
    stock_gather = Init._all_gather
    names = ("convert_and_load_state_dict_in_model", "_load_state_dict_into_zero3_model")

    def spied(stock_load: Any) -> Any:
        def spy_load(model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            found["types"] |= {type(tensor) for tensor in state_dict.values()}
            return stock_load(model, state_dict, *args, **kwargs)

        return spy_load

    def spy_gather(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        found["gathered"] += sum(p.ds_numel for p in params)
        return stock_gather(self, params, *args, **kwargs)

    for name in names:
        monkeypatch.setattr(modeling_utils, name, spied(getattr(modeling_utils, name)))
    monkeypatch.setattr(Init, "_all_gather", spy_gather)
    return found


# Bytes.


@pytest.mark.skipif(not HAS_PEAKS, reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ["llama", "tied"])  # ranks load another one
def test_host_bytes_stay_within_a_tenth_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    num_bytes = make_large(name, tmp_path)
    peak_bytes, _ = peak_of_load(tmp_path, "large", ds_config(bf16={"enabled": True}))
    assert num_bytes < 1.01 * peak_bytes  # the masters themselves were seen
    assert peak_bytes <= 1.1 * num_bytes


# Values.

FAMILIES = {"llama": {}, "gpt2": {"tie_word_embeddings": True}, "mixtral": {}}


@pytest.mark.parametrize("shard", [SHARD, "1GB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masters_are_the_checkpoint(
    family: str, shard: str, tmp_path: Path, seen: dict[str, Any]
) -> None:
    expected = make_model(family, **FAMILIES[family])
    expected.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard == SHARD)
    model, info = load(tmp_path, output_loading_info=True)
    assert_same(masters(model), dict(expected.named_parameters()))
    assert seen == {"types": {DeferredTensor}, "gathered": 0}
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["error_msgs"]
    stock = load(tmp_path, ds_config(enabled=False))
    assert_same(masters(model), masters(stock))
    assert_same(dict(model.named_buffers()), dict(stock.named_buffers()))
    assert not model.training
    tied = family == "gpt2"
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_checkpoint_of_another_dtype_is_converted(
    dtype: torch.dtype, tmp_path: Path, seen: dict[str, Any]
) -> None:
    """To that of the ds_config, whatever the model is loaded in."""
    expected = make_model("mixtral")
    expected.save_pretrained(tmp_path, max_shard_size=SHARD)
    model = load(tmp_path, ds_config(bf16={"enabled": True}), dtype=dtype)
    assert seen == {"types": {DeferredTensor}, "gathered": 0}
    assert_same(masters(model), dict(expected.to(torch.bfloat16).named_parameters()))


def test_a_base_model_fits_into_one_with_a_head(tmp_path: Path, seen: dict[str, Any]) -> None:
    """Keys of the checkpoint lack the prefix, and the head is missing."""
    make_model("llama").model.save_pretrained(tmp_path)
    ours, stock = load(tmp_path), load(tmp_path, ds_config(enabled=False))
    assert_same(masters(ours), masters(stock))


MISSING = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_key_is_initialised_and_reported_as_by_stock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    del state[MISSING]
    save_file(state, path, metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    ours, info = load(tmp_path, output_loading_info=True)
    assert list(info["missing_keys"]) == [MISSING] and "up_proj" in caplog.text
    stock, stock_info = load(tmp_path, ds_config(enabled=False), output_loading_info=True)
    assert info == stock_info
    assert_same(masters(ours), masters(stock))
    assert masters(ours)[MISSING].std() > 0


def test_a_wrong_shape_is_refused_as_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    gc.collect()  # no HfDeepSpeedConfig is alive
    messages = []
    for loads in (load, AutoModelForCausalLM.from_pretrained):
        caplog.clear()
        with pytest.raises(RuntimeError) as error:
            loads(tmp_path, num_key_value_heads=4)
        messages.append((str(error.value), caplog.text.count("MISMATCH")))
    assert messages[0] == messages[1] and messages[0][1] > 0
    assert modeling_utils.is_deepspeed_zero3_enabled is is_deepspeed_zero3_enabled


class Custom(hf.PreTrainedModel):
    """Values of its own where the checkpoint has none, and a buffer."""

    config_class = hf.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(64, 64)
        self.full = torch.nn.Parameter(torch.full((64,), 3.0))
        self.written = torch.nn.Parameter(torch.empty(5, 64))
        self.register_buffer("mean", torch.zeros(64))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self:
            initialization.constant_(self.full, 3.0)
            initialization.normal_(self.written)


@pytest.mark.parametrize("missing", [(), ("full", "written")])
def test_a_model_of_ones_own(missing: tuple[str, ...], tmp_path: Path) -> None:
    values = {
        "linear.weight": torch.randn(64, 64),
        "linear.bias": torch.randn(64),
        "full": torch.randn(64),
        "written": torch.randn(5, 64),
        "mean": torch.randn(64),
    }
    Custom(hf.LlamaConfig()).config.save_pretrained(tmp_path)
    saved = {name: tensor for name, tensor in values.items() if name not in missing}
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path, model_class=Custom)
    assert torch.equal(model.mean, values.pop("mean"))
    if missing:
        gc.collect()  # no HfDeepSpeedConfig is alive
        torch.manual_seed(0)
        plain = Custom.from_pretrained(tmp_path)
        values |= {name: plain.get_parameter(name).detach() for name in missing}
        assert torch.equal(values["full"], torch.full((64,), 3.0))
    assert_same(masters(model), values)


def test_a_model_generates_and_is_saved_as_plain_transformers_does(
    deepspeed: Any, tmp_path: Path
) -> None:
    expected = make_model("llama")
    expected.save_pretrained(tmp_path, max_shard_size=SHARD)
    plain = {"logits": logits(expected, PROMPT), "tokens": tokens(expected, PROMPT, 6)}
    torch._dynamo.reset()
    config = ds_config()
    model = load(tmp_path, config)
    model.generation_config.eos_token_id = None
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        ds_finepage.assert_active(engine)
        assert torch.equal(engine(PROMPT).logits, plain["logits"])
        assert torch.equal(tokens(engine.module, PROMPT, 6), plain["tokens"])
        assert ds_finepage.stats(engine).num_unplanned_modules == 0
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
        state = engine._zero3_consolidated_16bit_state_dict()
        model.save_pretrained(tmp_path / "saved", state_dict=state)
    finally:
        engine.destroy()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(again.state_dict(), expected.state_dict())


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_weights_stay_in_their_files_where_host_memory_has_no_room(
    deepspeed: Any, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO's own offload to NVMe would write them to other files first."""
    for module in (disk, file_weights):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 14)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    expected = make_model("llama", **shape)
    expected.save_pretrained(tmp_path, max_shard_size="1MB")
    nbytes = sum(p.nbytes for p in expected.parameters())
    plain = tokens(expected, PROMPT, 6)
    torch._dynamo.reset()
    section = {"enabled": True, "device_budget": "60%weights", "host_budget": nbytes // 2}
    config = engines.ds_config(section, zero=TINY_WEIGHTS)
    config["zero_optimization"]["offload_param"]["device"] = device
    model = load(tmp_path, config, dtype="auto")
    assert all(source is not None for source in disk.files_of(large_masters(model)))
    model.generation_config.eos_token_id = None
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        ds_finepage.assert_active(engine)
        for _ in range(2):
            assert torch.equal(tokens(engine.module, PROMPT, 6), plain)
        stats = ds_finepage.stats(engine)
        assert stats.file_bytes > 0 and not stats.unplanned_reasons
        assert stats.host_bytes <= stats.host_budget_bytes < stats.weight_bytes
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
        assert torch.equal(tokens(engine.module, PROMPT, 6), plain)
    finally:
        engine.destroy()
    assert all(source is not None for source in disk.files_of(large_masters(model)))


def large_masters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in masters(model).values() if each.nbytes >= disk.LEAST_BYTES]


# Stock stays stock.


@pytest.mark.parametrize("section", [None, {"enabled": False}])
def test_without_finepage_loading_is_stock(
    section: Any, tmp_path: Path, seen: dict[str, Any]
) -> None:
    expected = make_model("llama")
    expected.save_pretrained(tmp_path)
    config = ds_config()
    del config["finepage"]
    model = load(tmp_path, config if section is None else {**config, "finepage": section})
    num_elements = sum(p.numel() for p in expected.parameters())
    assert seen == {"types": {torch.Tensor}, "gathered": num_elements}
    assert_same(masters(model), dict(expected.named_parameters()))


def test_without_a_config_loading_is_plain(tmp_path: Path, seen: dict[str, Any]) -> None:
    expected = make_model("llama")
    expected.save_pretrained(tmp_path)
    gc.collect()  # no HfDeepSpeedConfig is alive
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert DeferredTensor not in seen["types"]


def test_more_than_one_rank_is_stock(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep_alive = HfDeepSpeedConfig(ds_config())
    deepspeed.init_distributed()
    assert loading.is_wanted(modeling_utils)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda *_, **__: 2)
    assert not loading.is_wanted(modeling_utils)
    del keep_alive


def test_a_wrong_section_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'device_budget'"):
        load(tmp_path, ds_config(finepage={"enabled": True, "device_bugdet": 1}))


def test_other_formats_are_read_by_transformers(tmp_path: Path, seen: dict[str, Any]) -> None:
    expected = make_model("llama")
    expected.config.save_pretrained(tmp_path)
    torch.save(expected.state_dict(), tmp_path / "pytorch_model.bin")
    model = load(tmp_path)
    assert seen == {"types": {torch.Tensor}, "gathered": 0}
    assert_same(masters(model), dict(expected.named_parameters()))


def test_the_seam_waits_for_transformers() -> None:
    code = """
import sys, ds_finepage
assert not {"torch", "transformers", "deepspeed"} & {*sys.modules}
import transformers
from ds_finepage.integrations.deepspeed.patches import is_wrapped
print(is_wrapped(transformers.PreTrainedModel, "get_init_context"))
"""
    assert engines.python(code).stdout.split() == ["True"]


class Older:
    """The model class of another version."""

    @classmethod
    def get_init_context(cls) -> list[Any]:
        return []

    def _load_pretrained_model(self) -> None:
        pass


@pytest.mark.parametrize("names", [{}, {**vars(modeling_utils), "PreTrainedModel": Older}])
def test_another_transformers_stays_stock(
    names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=loading.__name__)
    module = ModuleType("another")
    vars(module).update(names)
    members = dict(vars(Older))
    loading.install(module)
    assert "no PreTrainedModel" in caplog.text and "_load_pretrained_model" in caplog.text
    assert dict(vars(Older)) == members
