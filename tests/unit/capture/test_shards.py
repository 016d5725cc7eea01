"""The first rank's shard of a model: its sizes, its collectives, and what cannot be cut."""

from __future__ import annotations

import copy
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from ds_finepage.capture.from_config import capture_config
from ds_finepage.capture.shards import NO_GROUP, cut_model, cutting
from ds_finepage.errors import ConfigError
from ds_finepage.execution import collectives as ops
from ds_finepage.graph.collectives import ALL_GATHER, ALL_REDUCE, is_collective
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model

assert ops  # defines them

SIZES: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LLAMA = transformers.LlamaConfig(**SIZES, intermediate_size=384, num_key_value_heads=2)
BIASED = transformers.LlamaConfig(
    **SIZES, intermediate_size=384, num_key_value_heads=2, attention_bias=True, mlp_bias=True
)
QWEN3 = transformers.Qwen3Config(
    **SIZES, intermediate_size=384, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False
)
OPT = transformers.OPTConfig(**SIZES, ffn_dim=512, word_embed_proj_dim=128, dropout=0.0)
MIXTRAL = transformers.MixtralConfig(
    **SIZES, intermediate_size=64, num_key_value_heads=2, num_local_experts=4
)
CONFIGS = {"llama": LLAMA, "biased": BIASED, "qwen3": QWEN3, "opt": OPT, "mixtral": MIXTRAL}


def captured(config: Any, num_ranks: int, then: Any = None) -> TaskGraph:
    return capture_config(
        config,
        phase="decode",
        batch=1,
        seq=8,
        dtype="float32",
        prepare=cutting(num_ranks, then),
    )


def collectives(graph: TaskGraph) -> Counter[str]:
    return Counter(task.op for task in graph.tasks if is_collective(task))


class _Alone(TorchDispatchMode):
    """Runs the first rank where the other ranks add nothing, and gather the same."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func) == ALL_REDUCE:
            return None
        if str(func) == ALL_GATHER:
            args[0].copy_(torch.cat([args[1]] * args[-1]))
            return None
        return func(*args, **(kwargs or {}))


def without_other_ranks(model: Any, num_ranks: int) -> None:
    """Let the columns of other ranks add nothing in the layers that are cut by rows."""
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in ("o_proj", "out_proj", "down_proj", "fc2"):
            layer.weight.data[:, layer.in_features // num_ranks :] = 0


@pytest.mark.parametrize("family", CONFIGS)
def test_a_shard_computes_its_part_of_the_model(family: str) -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    without_other_ranks(model, 2)
    shard = copy.deepcopy(model)
    cut_model(shard, num_ranks=2)
    ids = torch.randint(0, 98, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits.double()
        with _Alone():
            found = shard(ids).logits.double()
    own = 98 if family == "opt" else 49  # its output layer is the embedding table
    assert found.shape == expected.shape
    torch.testing.assert_close(found[..., :own], expected[..., :own], rtol=0, atol=1e-4)
    if family != "opt":
        assert torch.equal(found[..., 49:], found[..., :49])


@pytest.mark.parametrize(
    ("family", "sums", "gathers"),
    [("llama", 4, 1), ("qwen3", 4, 1), ("opt", 4, 0), ("mixtral", 2, 1)],
)
def test_a_layer_has_two_sums_and_the_output_layer_one_gathering(
    family: str, sums: int, gathers: int
) -> None:
    """A layer with experts, which stay whole, has one sum."""
    graph = captured(CONFIGS[family], 2)
    assert collectives(graph) == Counter({ALL_REDUCE: sums, ALL_GATHER: gathers})
    assert {task.args[-2:] for task in graph.tasks if is_collective(task)} == {(NO_GROUP, 2)}
    assert collectives(captured(CONFIGS[family], 1)) == Counter()


@pytest.mark.parametrize(
    ("family", "parts", "num_cut"),
    [("llama", "(self_attn|mlp)", 2 * 7 + 1 + 2 * 2), ("mixtral", "self_attn", 2 * 4 + 1 + 2 * 2)],
)
def test_weights_and_rows_of_the_kv_cache_are_divided_and_experts_stay_whole(
    family: str, parts: str, num_cut: int
) -> None:
    whole, half = (
        {b.name: b.nbytes for b in captured(CONFIGS[family], num_ranks).buffers if b.name}
        for num_ranks in (1, 2)
    )
    pattern = rf"{parts}\..*proj\.weight$|lm_head\.weight$|\.(keys|values)$"
    cut = [name for name in whole if re.search(pattern, name)]
    assert len(cut) == num_cut
    assert half == {name: whole[name] // (1 + (name in cut)) for name in whole}


def test_the_first_rank_has_the_rest_of_an_uneven_size() -> None:
    config = copy.deepcopy(LLAMA)
    config.update({"vocab_size": 97, "intermediate_size": 385})
    weights = {b.name: b.nbytes for b in captured(config, 2).buffers}
    assert weights["lm_head.weight"] == 49 * 128 * 4
    assert weights["model.layers.0.mlp.down_proj.weight"] == 193 * 128 * 4
    assert captured(config, 2).tensors[captured(config, 2).outputs[0].tensor].shape == (1, 1, 97)


def test_an_output_layer_with_the_weight_of_the_table_stays_whole() -> None:
    config = copy.deepcopy(LLAMA)
    config.tie_word_embeddings = True
    assert collectives(captured(config, 2)) == Counter({ALL_REDUCE: 4})


def test_a_shard_is_packed_after_it_is_cut() -> None:
    graph = captured(BIASED, 2, partial(pack_model, form=PackedForm.parse("int8", 64)))
    assert collectives(graph) == Counter({ALL_REDUCE: 4, ALL_GATHER: 1})
    packed = {b.name: b.nbytes for b in graph.buffers}
    assert packed["model.layers.0.self_attn.o_proj.numbers"] == 128 * 64
    assert packed["model.layers.0.self_attn.o_proj.bias_of_sum"] == 128 * 4


# What cannot be cut.


@pytest.mark.parametrize(
    ("config", "num_ranks", "message"),
    [
        (LLAMA, 3, "3 ranks do not divide the 4 attention heads of LlamaForCausalLM"),
        (LLAMA, 4, r"4 ranks do not divide the 2 KV heads of LlamaForCausalLM\. .* divisor of 2"),
        (LLAMA, 0, "ranks: 0 is less than 1"),
        (
            transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4),
            2,
            "GPT2LMHeadModel cannot be cut over ranks: transformers has no plan for it",
        ),
        (
            transformers.Phi3Config(
                **SIZES, num_key_value_heads=2, intermediate_size=64, pad_token_id=0
            ),
            2,
            "Phi3ForCausalLM .* AutoTP cannot follow: rowwise_split_input",
        ),
    ],
    ids=("heads", "KV heads", "no rank", "no plan", "fused layers"),
)
def test_ranks_that_cannot_be(config: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        captured(config, num_ranks)
