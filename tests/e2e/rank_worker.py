"""What one rank does in ``test_ranks.py``: writes what it found into a file of its own.

The first argument is a mode: "all" for families, budgets and faults on two ranks, "experts" for a
model with experts under all budgets on four ranks, "one" for one family and one budget on any
number of ranks, "killed" for a rank that is gone.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from rich.console import Console
from rich.table import Table

import ds_finepage
from ds_finepage.capture.from_config import capture_config
from ds_finepage.capture.shards import cutting
from ds_finepage.errors import FinepageError
from ds_finepage.graph.collectives import is_collective
from ds_finepage.graph.taskgraph import TaskGraph
from tests.integration.families import make_model

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MODE, FOLDER = sys.argv[-2:]
NUM_NEW = 4
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
LLAMA_SIZES = {**SIZES, "intermediate_size": 384, "num_key_value_heads": max(2, NUM_RANKS)}
ONE_LAYER = {"num_hidden_layers": 1}
"""Of families whose second layer is like the first, and is not needed to reach a small budget."""
CUT_OF_MIXTRAL = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*lm_head\.weight$"], "partition_type": "column", "gather_output": True},
    ],
}
MAKERS: dict[str, Callable[[], Any]] = {
    "llama": partial(make_model, "llama", **LLAMA_SIZES),
    "llama of 4": partial(
        make_model,
        "llama",
        **{**LLAMA_SIZES, **ONE_LAYER, "num_key_value_heads": 4, "vocab_size": 98},
    ),
    "qwen3": partial(make_model, "qwen3", **{**LLAMA_SIZES, **ONE_LAYER}),
    "opt": partial(make_model, "opt", **{**SIZES, **ONE_LAYER}, ffn_dim=512),
    "mixtral": partial(make_model, "mixtral", **LLAMA_SIZES),
    "gpt2": partial(make_model, "gpt2"),
}
FAMILIES = (("llama", torch.float32), ("qwen3", torch.bfloat16), ("opt", torch.float32))


def ds_config(*, dtype: torch.dtype = torch.float32, size: int = NUM_RANKS, **changes: Any) -> Any:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "tensor_parallel": {"autotp_size": size, **changes.pop("tensor_parallel", {})},
        "finepage": {"enabled": True, "device_budget": "70%weights", **changes},
    }


def engine_of(model: torch.nn.Module, config: Any) -> Any:
    return deepspeed.initialize(model=copy.deepcopy(model), config=config)[0]


def prompt() -> torch.Tensor:
    return torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def generated(
    model: Any, ids: torch.Tensor, num_new: int = NUM_NEW
) -> tuple[torch.Tensor, list[Any]]:
    """Return the logits of every step of a generation, and its tokens."""
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(made.logits), made.sequences.tolist()


def replanned(handle: Any, shares: tuple[float, ...] = (0.7, 0.0, 1.0)) -> Iterator[float]:
    """Go on under one share of the weights after the other, and at least under what is needed."""
    for share in shares:
        least = max((p.min_budget_bytes for p in handle.stats.passes), default=0)
        handle.replan(budget_bytes=max(least, int(handle.stats.weight_bytes * share)))
        yield share


def figures_of(handle: Any) -> dict[str, Any]:
    """Return what is of interest of a handle when all has run."""
    return {
        "unplanned": handle.stats.unplanned_reasons,
        "reloaded": handle.stats.reloaded_bytes,
        "link": [handle.profile.rank_bytes_per_s, handle.profile.rank_latency_ns],
    }


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except FinepageError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_setups() -> dict[str, str]:
    """Ask for setups that cannot run; every rank stays in step."""
    llama = MAKERS["llama"]()
    budget = "70%weights" if RANK == 0 else "60%weights"
    asked: dict[str, tuple[Any, Any]] = {
        "other budgets": (llama, ds_config(device_budget=budget)),
        "more than there are": (llama, ds_config(size=3)),
        "cannot be cut": (MAKERS["gpt2"](), ds_config()),
    }
    return {name: error_of(partial(engine_of, *each)) for name, each in asked.items()}


def run_family(
    name: str, dtype: torch.dtype, shares: tuple[float, ...] = (0.7, 0.0, 1.0)
) -> tuple[dict[str, Any], Any]:
    """Run one model by plan under budgets from the least to the whole, beside stock AutoTP."""
    torch.manual_seed(0)
    plain = MAKERS[name]().eval().to(dtype)
    more = {"partition_config": CUT_OF_MIXTRAL} if name == "mixtral" else {}
    wanted, tokens = generated(plain, prompt())
    stock = engine_of(plain, ds_config(dtype=dtype, tensor_parallel=more, enabled=False))
    far, stock_tokens = generated(stock.module.eval(), prompt())
    stock.destroy()
    engine = engine_of(plain, ds_config(dtype=dtype, tensor_parallel=more))
    model, handle = engine.module.eval(), ds_finepage.handle_of(engine)
    found: dict[str, Any] = {"stock": (far - wanted).abs().max().item(), "budgets": {}}
    found["stock tokens"] = stock_tokens == tokens
    for share in replanned(handle, shares):
        logits, made = generated(model, prompt())
        distance = (logits - wanted).abs().max().item()
        found["budgets"][share] = {"distance": distance, "tokens": made == tokens}
    found |= figures_of(handle)
    found["num_unplanned"] = handle.stats.num_unplanned_graphs + handle.stats.num_unplanned_modules
    found["forecast"] = forecast_of(plain.config, dtype)
    found["weight_bytes"] = handle.stats.weight_bytes
    found["collectives"] = [collectives(plan.graph) for plan, _ in handle.plans()]
    return found, engine


def forecast_of(config: Any, dtype: torch.dtype) -> list[Any]:
    """Return what a forecast from the config says of a rank: bytes of its weights, collectives."""
    graph = capture_config(
        config,
        phase="decode",
        batch=2,
        seq=8,
        dtype=str(dtype).removeprefix("torch."),
        prepare=cutting(NUM_RANKS, None),
    )
    return [graph.weight_bytes, collectives(graph)]


def collectives(graph: TaskGraph) -> list[str]:
    return [task.op for task in graph.tasks if is_collective(task)]


def out_of_step(engine: Any) -> dict[str, Any]:
    """Let one rank do something else: other tokens, no room, and at last an exception."""
    other = {"other tokens": error_of(lambda: engine.module(prompt() + RANK))}
    return {**other, **without_room(engine, prompt()), **with_an_exception(engine, prompt())}


def without_room(engine: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Let rank 1 have no room for a call, and then room again."""
    handle = ds_finepage.handle_of(engine)
    budget_bytes = handle.stats.budget_bytes
    if RANK == 1:
        handle.replan(budget_bytes=1)
    found = {"no room": error_of(lambda: engine.module(ids, use_cache=False))}
    handle.replan(budget_bytes=budget_bytes)
    return {**found, "in step": error_of(lambda: engine.module(ids, use_cache=False))}


def with_an_exception(engine: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Let rank 1 fail in the middle of a call."""

    def before(task: Any, operands: Any) -> None:
        if RANK == 1 and task.index == 10:
            raise KeyError("of the user")

    ds_finepage.handle_of(engine).register_op_hook(before=before)
    found: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        found["exception"] = error_of(lambda: engine.module(ids, use_cache=False))
    except KeyError as error:
        found["exception"] = repr(error)
    found["in time"] = time.monotonic() - begin < 30
    found["afterwards"] = error_of(lambda: engine.module(ids, use_cache=False))
    return found


def be_killed() -> None:
    """Let rank 1 be gone in the middle of a generation; write what rank 0 sees."""
    engine = engine_of(MAKERS["llama"]().eval(), ds_config())

    def before(task: Any, operands: Any) -> None:
        if task.index == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the other ranks, too
    if RANK == 1:
        ds_finepage.handle_of(engine).register_op_hook(before=before)
    write({"error": error_of(lambda: generated(engine.module, prompt()))})
    raise SystemExit(3)


def shown(table: Table) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def write(found: dict[str, Any]) -> None:
    (Path(FOLDER) / f"rank{RANK}.json").write_text(json.dumps(found))


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if MODE == "killed":
        be_killed()
    deepspeed.init_distributed("gloo")
    if MODE == "one":
        found, engine = run_family("llama of 4", torch.float32, (0.7,))
        found["table"] = shown(ds_finepage.handle_of(engine).rank_table())
        write(found)
        return
    if MODE == "experts":
        write(run_family("mixtral", torch.bfloat16)[0])
        return
    found = {"setups": refused_setups()}
    for name, dtype in FAMILIES:
        found[name], engine = run_family(name, dtype)
    found["out of step"] = out_of_step(engine)
    write(found)


if __name__ == "__main__":
    main()
