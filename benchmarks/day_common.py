"""What the steps of gpu_day.py share: devices, rows of the report, models, timed generation."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

ROW = "gpu_day row: "
"""Begins a line of a step's output that holds a row of the report, as JSON."""

DTYPE = torch.bfloat16
BLOCK_ELEMENTS = 1 << 24

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
}
"""Shapes of Llama models, by name."""


def report(table: str, **cells: Any) -> None:
    """Hand a row of a table to the report; it is safe there even if this process is killed."""
    print(ROW + json.dumps({"table": table, **cells}), flush=True)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with its class."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every step has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load", metavar="MODULE:FUNCTION", help="call it first; it adds a device")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a rehearsal")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after that")
    return parser


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the device of the options, with its index."""
    if arguments.load:
        module, _, function = arguments.load.partition(":")
        getattr(importlib.import_module(module), function)()
    device = torch.device(arguments.device)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, 0)


def synchronize(device: torch.device) -> None:
    """Wait for everything that a device was given to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of a device, and all bytes."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def weight_bytes_of(model: Any) -> int:
    """Return the bytes of all weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def make_llama(shape: dict[str, int], device: torch.device) -> Any:
    """Make a Llama of random weights in seconds, on the device where it fits.

    Each weight is a different part of one block of random numbers, again and again: copies are
    faster than generators.

    Args:
        shape: Sizes, as in ``LlamaConfig``.
        device: Where it will run; a model that does not fit it is made in host memory.
    """
    import transformers  # takes seconds, and not every step needs it

    config = transformers.LlamaConfig(
        **shape,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,  # so that no run stops early
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(DTYPE).eval()
    fits = weight_bytes_of(model) * 1.3 < memory_of(device)[0]
    where = device if fits else torch.device("cpu")
    model.to_empty(device=where)
    # Its buffers are computed from the config, and "meta" kept none of their values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(where)
    fill(model, where)
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def fill(model: Any, where: torch.device) -> None:
    """Give every weight random values: norms about 1, others about 0."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(BLOCK_ELEMENTS, generator=generator).mul_(0.05).to(where, DTYPE)
    start = 0
    for name, weight in model.named_parameters():
        flat = weight.view(-1)
        start = (start + 1_000_003) % BLOCK_ELEMENTS
        for begin in range(0, flat.numel(), BLOCK_ELEMENTS):
            part = flat[begin : begin + BLOCK_ELEMENTS]
            first = min(part.numel(), BLOCK_ELEMENTS - start)
            part[:first].copy_(block[start : start + first])
            part[first:].copy_(block[: part.numel() - first])
        if "norm" in name:
            weight.add_(1)


class TokenClock:
    """A streamer of ``generate`` that notes when each token has reached the host."""

    def __init__(self) -> None:
        """Start when the prompt comes."""
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        """Note the time; ``generate`` has moved the token to the host by now."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; every token was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Some calls of ``generate`` with the same prompt.

    Attributes:
        tokens: Of the last call, on the CPU.
        prefill_s: Seconds to the first token, call by call.
        step_s: Seconds of each later token of all calls.
    """

    tokens: torch.Tensor
    prefill_s: list[float]
    step_s: list[float]


def generate(model: Any, ids: torch.Tensor, num_tokens: int) -> Decoded:
    """Generate greedily with a static cache, once."""
    clock = TokenClock()
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,  # compiled code would round differently
            streamer=clock,
        )
    begin, first, *later = clock.times
    steps = [after - before for before, after in zip([first, *later], later, strict=False)]
    return Decoded(tokens=found.cpu(), prefill_s=[first - begin], step_s=steps)


def generate_often(
    model: Any, ids: torch.Tensor, num_tokens: int, *, rounds: int = 3, until: float = 1e18
) -> Decoded:
    """Generate once to warm up, which plans, and then some times more, which count.

    Args:
        model: The model.
        ids: Token ids of shape (batch, length).
        num_tokens: Tokens of each call.
        rounds: Calls that count.
        until: The time of ``time.perf_counter`` after which no call begins beyond the first
            that counts.
    """
    generate(model, ids, num_tokens)
    found = [generate(model, ids, num_tokens)]
    while len(found) < rounds and time.perf_counter() < until:
        found.append(generate(model, ids, num_tokens))
    return Decoded(
        tokens=found[-1].tokens,
        prefill_s=[s for each in found for s in each.prefill_s],
        step_s=[s for each in found for s in each.step_s],
    )


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 5) -> list[float]:
    """Run something some times; return how long the device took for each, after one to warm up."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return found[1:]
