"""What one rank does in ``test_rank_parts.py``: writes what it found into a file of its own.

The ranks hold each weight together, as plain ZeRO stage 3 shards it. The first argument is a mode:
"all" for families, budgets and faults on two ranks, "more" for other families under all budgets,
and a checkpoint that stock partitions, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from rank_worker import (
    FOLDER,
    LLAMA_SIZES,
    MAKERS,
    MODE,
    NUM_NEW,
    ONE_LAYER,
    RANK,
    ds_config,
    engine_of,
    error_of,
    figures_of,
    generated,
    replanned,
    with_an_exception,
    without_room,
    write,
)
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_finepage
from tests.integration.families import make_model

DEBUG = {"lane_delay_seed": 5, "poison_vacated": True}
"""Runs the lanes in threads of their own, and fills what a plan has vacated."""


def odd_llama() -> Any:
    """Make a model whose weights have odd numbers of elements, so that parts have padding.

    The width of its heads is a multiple of four: a CPU's attention in float32 rounds other rows by
    their place in memory.
    """
    odd = {"vocab_size": 97, "hidden_size": 99, "intermediate_size": 301}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32}
    return make_model("llama", **{**LLAMA_SIZES, **ONE_LAYER, **odd, **heads})


def gpt2() -> Any:
    """Make a model with biases, of which some have an odd number of elements."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=100, n_layer=1, n_head=5, n_positions=31, n_inner=301)
    )


MAKERS_OF_PARTS: dict[str, Callable[[], Any]] = {
    **{name: MAKERS[name] for name in ("llama", "qwen3", "mixtral")},
    "odd llama": odd_llama,
    "gpt2": gpt2,
}


def own_prompt(num_tokens: int = 7) -> torch.Tensor:
    """Return tokens that no other rank has."""
    random = torch.Generator().manual_seed(1 + RANK)
    return torch.randint(1, 96, (2, num_tokens), generator=random)


def is_equal(model: Any, plain: Any, num_new: int = NUM_NEW) -> bool:
    (logits, tokens), (expected, expected_tokens) = (
        generated(each, own_prompt(), num_new) for each in (model, plain)
    )
    return torch.equal(logits, expected) and tokens == expected_tokens


def made(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return MAKERS_OF_PARTS[name]().eval().to(dtype)


def run_family(name: str, dtype: torch.dtype) -> tuple[dict[str, Any], Any, Any]:
    """Run one model by plan under budgets from the least to the whole."""
    plain = made(name, dtype)
    debug = DEBUG if dtype is torch.float32 else {}
    engine = engine_of(plain, ds_config(dtype=dtype, size=1, debug=debug))
    model, handle = engine.module.eval(), ds_finepage.handle_of(engine)
    found = {"equal": {share: is_equal(model, plain) for share in replanned(handle)}}
    found |= {**figures_of(handle), "share of host memory": share_of_host_memory(model, plain)}
    return found, engine, plain


def share_of_host_memory(model: Any, plain: Any) -> float:
    masters = sum(p.ds_tensor.untyped_storage().nbytes() for p in model.parameters())
    return float(masters / sum(p.nbytes for p in plain.parameters()))


def changed(model: Any, plain: Any) -> dict[str, Any]:
    """Change weights where ZeRO has gathered them; the next call has to see it."""
    found = {}
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        found["inside"] = error_of(lambda: model(own_prompt()))
        if RANK == 0:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    found["equal"] = is_equal(model, plain)
    found["shapes"] = [list(p.shape) for p in model.parameters()][:1]
    return found


def out_of_step(engine: Any) -> dict[str, Any]:
    """Let one rank do something else, and at last fail."""
    model = engine.module
    return {
        "other lengths": error_of(lambda: model(own_prompt(7 + RANK), use_cache=False)),
        "in step before": error_of(lambda: model(own_prompt(), use_cache=False)),
        **without_room(engine, own_prompt()),
        "without a plan": error_of(lambda: model.lm_head(torch.zeros(1, 1, 128))),
        **with_an_exception(engine, own_prompt()),
    }


def run_loaded() -> dict[str, Any]:
    """Let stock partition a checkpoint while it is loaded."""
    plain = made("odd llama", torch.float32)
    plain.save_pretrained(f"{FOLDER}/checkpoint")  # rank 0 does it
    torch.distributed.barrier()
    config = ds_config(size=1)
    alive = HfDeepSpeedConfig(config)
    model = LlamaForCausalLM.from_pretrained(f"{FOLDER}/checkpoint").eval()
    engine = deepspeed.initialize(model=model, config=config)[0]
    handle = ds_finepage.handle_of(engine)
    found = {
        "equal": is_equal(engine.module, plain),
        "share of host memory": share_of_host_memory(model, plain),
        **figures_of(handle),
    }
    del alive
    return found


FAMILIES = (("llama", torch.float32), ("gpt2", torch.float32), ("qwen3", torch.bfloat16))


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, dtype in FAMILIES:
        found[name], engine, plain = run_family(name, dtype)
        if name == "llama":
            # Rank 1 stops early; plain models of both ranks do not wait for each other.
            found["early stop"] = is_equal(engine.module, plain, NUM_NEW - 2 * RANK)
            found["after it"] = is_equal(engine.module, plain)
            found["changed"] = changed(engine.module, plain)
            of_llama = engine
    found["out of step"] = out_of_step(of_llama)
    return found


def run_more() -> dict[str, Any]:
    families = (("odd llama", torch.float32), ("mixtral", torch.bfloat16))
    found = {name: run_family(name, dtype)[0] for name, dtype in families}
    return {**found, "loaded": run_loaded()}


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    write(run_all() if MODE == "all" else run_more())


if __name__ == "__main__":
    main()
