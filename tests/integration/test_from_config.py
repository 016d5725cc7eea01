from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ds_finepage.capture.from_config import capture_config
from ds_finepage.capture.models import default_dtype, load_model_config, positions_of
from ds_finepage.capture.shipped import model_names
from ds_finepage.checker.checker import check
from ds_finepage.errors import CaptureError, ConfigError
from ds_finepage.execution import host_ops
from ds_finepage.execution.measure import estimate_workspaces
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, Task, TaskGraph
from ds_finepage.planning.liveness import needed_arena_bytes
from tests.integration.families import CACHE, make_model
from tests.unit.capture.replay import replay
from tests.unit.planning.steady import plan_steady

PUBLISHED_PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "opt-175b": 174_604_468_224,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "gemma-2-9b": 9_241_705_984,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the biases of its routers are buffers here
}

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
LLAMA = transformers.LlamaConfig(**GROUPED)
OPT = transformers.OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=64, dropout=0.0)
MISTRAL = transformers.MistralConfig(**GROUPED, sliding_window=8)
MIXTRAL = transformers.MixtralConfig(**GROUPED, num_local_experts=8, num_experts_per_tok=2)


def capture(config: Any = LLAMA, phase: str = "prefill", **changes: Any) -> TaskGraph:
    return capture_config(config, **{"phase": phase, "batch": 2, "seq": 16, **changes})


def nbytes(graph: TaskGraph, kind: BufferKind) -> list[int]:
    return [b.nbytes for b in graph.buffers if b.kind is kind]


def ops(graph: TaskGraph, part: str) -> list[Task]:
    return [task for task in graph.tasks if part in task.op]


# The shipped models.


def test_all_of_them_are_here() -> None:
    assert sorted(PUBLISHED_PARAMETERS) == list(model_names())


def num_parameters(config: transformers.PretrainedConfig) -> int:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).num_parameters()


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_shipped_models_have_the_published_number_of_parameters(name: str) -> None:
    assert num_parameters(load_model_config(name)) == PUBLISHED_PARAMETERS[name]


def test_seven_billion_parameters_take_seconds() -> None:
    start = time.process_time()
    graph = capture_config(load_model_config("llama-7b"), phase="decode", batch=1, seq=2048)
    assert time.process_time() - start < 10
    assert graph.weight_bytes == 2 * PUBLISHED_PARAMETERS["llama-7b"]
    assert sum(nbytes(graph, BufferKind.STATE)) == 32 * 2 * 2048 * 4096 * 2
    matmul_flops = 2 * (PUBLISHED_PARAMETERS["llama-7b"] - 32000 * 4096 - 65 * 4096)
    attention_flops = 32 * 4 * 2048 * 4096
    assert sum(t.flops for t in graph.tasks) == matmul_flops + attention_flops


# What the graph says.


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_weights_are_those_of_the_model_and_tied_ones_are_there_once(
    config: Any, phase: str
) -> None:
    graph = capture(config, phase, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config)
    wanted = {name: 2 * p.numel() for name, p in model.named_parameters()}
    assert wanted == {b.name: b.nbytes for b in graph.buffers if b.kind is BufferKind.WEIGHT}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_pass_changes_the_kv_cache_and_gives_the_logits_of_the_last_position(phase: str) -> None:
    graph = capture(phase=phase)
    heads, width = 2, 16
    assert nbytes(graph, BufferKind.STATE) == [2 * heads * 16 * width * 2] * 4
    assert {b.name for b in graph.buffers if b.kind is BufferKind.STATE} == {
        f"cache.{layer}.{part}" for layer in (0, 1) for part in ("keys", "values")
    }
    (output,) = graph.outputs
    assert output.tensor is not None
    assert graph.tensors[output.tensor].shape == (2, 1, 100)
    assert nbytes(graph, BufferKind.OUTPUT) == [2 * 100 * 2]
    # Attention is one op, and needs no mask.
    assert len(ops(graph, "scaled_dot_product")) == 2
    assert not [v for v in graph.tensors if v.dtype == "bool"]


def test_other_inputs() -> None:
    graph = capture(phase="decode")
    named = {b.name: b.nbytes for b in graph.buffers if b.kind is BufferKind.INPUT}
    assert named == {
        "model.rotary_emb.inv_freq": 8 * 4,
        "input_ids": 2 * 8,
        "position_ids": 2 * 8,
        "cache_position": 8,
    }


def test_labels_and_calls_name_modules() -> None:
    graph = capture()
    assert graph.tasks[0].label == "model.embed_tokens"
    assert graph.tasks[-1].label == "lm_head"
    (call,) = [c for c in graph.calls if c.name == "model.layers.1.mlp"]
    inside = graph.tasks[call.begin : call.end]
    assert inside and all(t.label.startswith("model.layers.1.mlp") for t in inside)


def test_the_config_is_left_as_it_was_and_gives_the_same_graph() -> None:
    before, graph = LLAMA.to_dict(), capture()
    capture(dtype="bfloat16")
    assert capture(dtype="float16") == graph
    assert LLAMA.to_dict() == before


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_sliding_window_keeps_its_rows_only(phase: str) -> None:
    assert nbytes(capture(MISTRAL, phase), BufferKind.STATE) == [2 * 2 * 8 * 16 * 2] * 4


@pytest.mark.parametrize("config", [LLAMA, OPT, MISTRAL, MIXTRAL], ids=lambda c: c.model_type)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_it_can_be_planned(config: Any, phase: str) -> None:
    graph = capture(config, phase)
    profile = load_profile("t4")
    arena = needed_arena_bytes(graph, 512) * 3 // 4
    check(plan_steady(graph, arena_bytes=arena, policy="finepage", alignment=512, profile=profile))


# What the graph computes: run op by op, it gives what the model gives.


def logits_of(graph: TaskGraph, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Replay a graph; rows of a KV cache that the values lack begin as zeros, and come there."""
    args = []
    for given in graph.inputs:
        view = graph.tensors[given.tensor]
        args.append(values.setdefault(graph.buffers[view.buffer].name, torch.zeros(view.shape)))
    (found,) = replay(graph, args)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
def test_prefill_and_decode_give_the_models_own_logits(config: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(2, 100, (2, 16))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(ids[:, :15], **{CACHE: cache}, logits_to_keep=1).logits
        wanted_next = model(ids[:, 15:], **{CACHE: cache}, logits_to_keep=1).logits
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    positions = torch.arange(15)
    values["input_ids"] = ids[:, :15].contiguous()
    values["position_ids"], values["cache_position"] = positions.repeat(2, 1), positions
    prefill = capture(config, "prefill", seq=15, dtype="float32")
    assert torch.equal(logits_of(prefill, values), wanted)

    values["input_ids"] = ids[:, 15:].contiguous()
    values["position_ids"], values["cache_position"] = torch.full((2, 1), 15), torch.tensor([15])
    for buffer in prefill.buffers:
        if buffer.kind is BufferKind.STATE:
            values[buffer.name] = torch.nn.functional.pad(values[buffer.name], (0, 0, 0, 1))
    decode = capture(config, "decode", seq=16, dtype="float32")
    assert torch.equal(logits_of(decode, values), wanted_next)


# What the graph costs.


def test_flops_of_a_prefill() -> None:
    graph = capture()
    tokens, hidden, inner = 2 * 16, 64, 96
    linear = 2 * tokens * (hidden * hidden * 2 + hidden * 32 * 2 + 3 * hidden * inner)
    causal = 4 * 2 * 4 * 16 * 16 * 16 // 2
    head = 2 * 2 * hidden * 100
    assert sum(t.flops for t in graph.tasks) == 2 * (linear + causal) + head
    assert {t.flops for t in ops(graph, "scaled_dot_product")} == {causal}


def test_costs_of_a_decode_step() -> None:
    graph = capture(phase="decode")
    (lookup,) = ops(graph, "embedding")  # it moves rows, and not its table
    assert lookup.moved_bytes == 2 * 8 + 2 * (2 * 64 * 2)
    # A cache is written by rows and read whole.
    row, rows, queries = 2 * 2 * 16 * 2, 2 * 2 * 16 * 16 * 2, 2 * 4 * 16 * 2
    assert {t.moved_bytes for t in ops(graph, "index_copy_")} == {8 + 2 * row}
    attention = ops(graph, "scaled_dot_product")
    logarithms = 2 * 4 * 4  # the op returns them
    assert {t.moved_bytes for t in attention} == {2 * rows + 2 * queries + logarithms}
    assert {t.flops for t in attention} == {4 * 2 * 4 * 16 * 16}
    (head,) = [t for t in ops(graph, "aten.mm") if t.label == "lm_head"]
    assert head.moved_bytes == 2 * (2 * 64 + 64 * 100 + 2 * 100)
    assert head.flops == 2 * 2 * 64 * 100


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts_are_one_product_that_reads_those_it_needs(dtype: str) -> None:
    few = ops(capture(MIXTRAL, "decode", batch=1, dtype=dtype), "grouped_mm")
    many = ops(capture(MIXTRAL, "prefill", dtype=dtype), "grouped_mm")
    assert len(few) == len(many) == 4
    up = 8 * 2 * 96 * 64 * 2
    rows = 2
    assert few[0].moved_bytes == up // 4 + rows * (64 + 192) * 2 + 8 * 4
    assert few[0].flops == 2 * rows * 64 * 192
    assert many[0].moved_bytes == up + 64 * (64 + 192) * 2 + 8 * 4


def test_workspaces_are_results_of_ops_that_cannot_write_in_place() -> None:
    graph = estimate_workspaces(capture())
    attention = 2 * 4 * 16 * 16 * 2 + 2 * 4 * 16 * 4
    for task in graph.tasks:
        expected = attention if "scaled_dot_product" in task.op else 0
        assert task.workspace_bytes == expected, task.where
    assert graph.workspace_bytes == attention
    assert dataclasses.replace(graph, tasks=()) == dataclasses.replace(capture(), tasks=())


# What is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phase": "prefil"}, ["prefil", "prefill", "decode"]),
        ({"dtype": "int8"}, ["int8", "float16"]),
        ({"batch": 0}, ["batch", "0"]),
        ({"seq": -1}, ["seq", "-1"]),
        ({"seq": 65}, ["65", "64 positions"]),
    ],
)
def test_arguments_out_of_range(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        capture(**changes)
    assert all(word in str(caught.value) for word in words)


def llama_like(kind: Any, **changes: Any) -> Any:
    """Make a small config, some attributes of which have odd values."""
    config = kind(**GROUPED)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


OF_A_STATE = {"layer_types": ["full_attention", "linear_attention"]}
EAGER = {"_experts_implementation": "eager"}
ODD_HEADS = {"hidden_size": 64, "num_attention_heads": 7, "word_embed_proj_dim": 64}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (transformers.ViTConfig, ConfigError, "cannot build a language model of model_type 'vit'"),
        (lambda: transformers.OPTConfig(**ODD_HEADS), ConfigError, "opt"),
        (
            lambda: llama_like(transformers.Qwen3Config, **OF_A_STATE),
            CaptureError,
            "linear_attention",
        ),
        (
            lambda: llama_like(transformers.MixtralConfig, **EAGER),
            CaptureError,
            "MixtralForCausalLM looks at values .*nonzero",
        ),
    ],
    ids=["no text", "sizes", "a state that is no KV cache", "values"],
)
def test_models_that_cannot_be_captured(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        capture(make())


# Loading configs.


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA.to_dict(), **changes}))
    return path


def test_by_directory_and_by_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert load_model_config(str(tmp_path)).to_dict() == load_model_config(str(path)).to_dict()
    assert num_parameters(load_model_config(str(path))) == num_parameters(LLAMA)


def test_a_config_stands_for_what_is_saved_of_it(tmp_path: Path) -> None:
    config = make_model("llama", torch.bfloat16).config
    config._attn_implementation = "eager"
    config.save_pretrained(tmp_path)
    found, saved = load_model_config(config), load_model_config(str(tmp_path))
    assert found is not config and found.to_dict() == saved.to_dict()
    assert found._attn_implementation == saved._attn_implementation != "eager"
    config.temperature = 0.5  # which transformers refuses to save
    assert load_model_config(config).to_dict() == saved.to_dict()


def test_a_config_of_an_unknown_type_is_refused() -> None:
    class Lama(transformers.PretrainedConfig):
        model_type = "lama"

    with pytest.raises(ConfigError, match=r"^Lama: .* model_type 'lama'\. Did you mean 'llama'"):
        load_model_config(Lama())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object but list"),
        ("{}", "has no model_type"),
        ('{"model_type": "lama"}', "Did you mean 'llama'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers cannot read it"),
    ],
)
def test_configs_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model_config(str(path))
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_what_is_no_model_is_answered_with_all_names(tmp_path: Path) -> None:
    for name, message in (
        ("llama2-7b", "Did you mean 'llama-2-7b'?"),
        (str(tmp_path), "cannot read model config"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_model_config(name)
        assert message in str(caught.value) and str(caught.value).count(name) == 1
        assert all(known in str(caught.value) for known in model_names())


def test_positions_and_dtype() -> None:
    assert positions_of(LLAMA) == 64
    bfloat16 = load_model_config("qwen3-32b")
    assert default_dtype(bfloat16, load_profile("h200")) == "bfloat16"
    assert default_dtype(bfloat16, load_profile("v100-16gb")) == "float16"
    assert default_dtype(load_model_config("llama-7b"), load_profile("h200")) == "float16"
    assert default_dtype(LLAMA, load_profile("h200")) == "float16"


def test_shipped_configs_are_no_larger_than_their_positions() -> None:
    for name in model_names():
        positions = positions_of(load_model_config(name))
        assert positions is not None and math.log2(positions) >= 11


def written_to_host(graph: TaskGraph) -> list[int]:
    return [graph.buffers[b].nbytes for t in graph.tasks if t.op == TO_HOST for b in t.writes]


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
def test_rows_in_host_memory_are_brought_in_by_layer(config: Any) -> None:
    graph = capture(config, "decode", dtype="bfloat16", host_ops=host_ops)
    handed = [b for b in graph.buffers if graph.is_handed(b)]
    width = config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    row = 2 * heads * width * 2  # sequences, heads, width, bytes
    num_tensors = 2 * config.num_hidden_layers
    assert [b.nbytes for b in handed] == [16 * row] * num_tensors  # with room for the new one
    assert written_to_host(graph) == [row] * num_tensors
    assert sum(nbytes(graph, BufferKind.HOST)) == 16 * row * num_tensors
    assert len(graph.outputs) == 1 + num_tensors
    assert not nbytes(graph, BufferKind.STATE)
    writes = [task.op for task in graph.tasks if set(task.writes) & {b.id for b in handed}]
    assert writes == ["aten.copy_.default"] * len(handed)
    assert [b.name for b in handed] == [f"KV rows {i}" for i in range(num_tensors)]


def test_a_prefill_writes_all_its_rows_to_host_memory() -> None:
    graph = capture(LLAMA, "prefill", host_ops=host_ops)
    assert sum(written_to_host(graph)) == sum(nbytes(graph, BufferKind.HOST))
    assert written_to_host(graph) == nbytes(capture(LLAMA, "prefill"), BufferKind.STATE)
    assert not nbytes(graph, BufferKind.STATE)
    assert not any(graph.is_handed(b) for b in graph.buffers)


def test_a_window_stays_on_the_device() -> None:
    config = transformers.MistralConfig(**{**LLAMA.to_dict(), "sliding_window": 4})
    graph = capture(config, "decode", host_ops=host_ops)
    assert not nbytes(graph, BufferKind.HOST)
    assert nbytes(graph, BufferKind.STATE)
