"""What a generation will need at its longest, said before its first token (floor 3)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.units import format_bytes


@dataclass(frozen=True, slots=True)
class Longest:
    """The largest call of a generation: sequences (beams included), and tokens of each."""

    num_sequences: int
    num_tokens: int
    prompt_tokens: int


def longest_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Longest | None:
    """Read the longest call off the arguments of ``generate``; None where they do not tell."""
    inputs = args[0] if args else None
    for name in ("inputs", "input_ids", "inputs_embeds"):
        inputs = kwargs.get(name) if inputs is None else inputs
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
        return None
    if getattr(module.config, "is_encoder_decoder", False):
        return None  # its prompt is not what its cache grows with
    config = kwargs.get("generation_config") or module.generation_config

    def setting(name: str) -> Any:
        found = kwargs.get(name)
        return getattr(config, name, None) if found is None else found

    prompt = inputs.shape[1]
    new, most = setting("max_new_tokens"), setting("max_length")
    if new is not None:
        total = prompt + new
    else:
        total = max(prompt + 1, most) if most is not None else prompt + 1
    beams = setting("num_beams") or 1
    returned = setting("num_return_sequences") or 1
    return Longest(inputs.shape[0] * max(beams, returned), total, prompt)


def kv_bytes(config: Any, dtype: torch.dtype, longest: Longest) -> int | None:
    """Return the bytes of a KV cache at its longest; None where the config does not tell."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    shared = getattr(text, "num_key_value_heads", None) or heads
    hidden = getattr(text, "hidden_size", None)
    layers = getattr(text, "num_hidden_layers", None)
    for size in (heads, shared, hidden, layers):
        if not isinstance(size, int) or size < 1:
            return None
    assert isinstance(heads, int) and isinstance(shared, int)
    assert isinstance(hidden, int) and isinstance(layers, int)
    width: int = getattr(text, "head_dim", None) or hidden // heads
    window = getattr(text, "sliding_window", None)
    kinds = (
        getattr(text, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * layers
    )
    num_rows = 0
    for kind in kinds:
        if kind == "sliding_attention" and isinstance(window, int):
            num_rows += min(longest.num_tokens, window)
        else:
            num_rows += longest.num_tokens
    return 2 * num_rows * longest.num_sequences * shared * width * dtype.itemsize


def require_positions(module: torch.nn.Module, longest: Longest) -> None:
    """Refuse a prompt for which a table of positions is too short.

    Raises:
        ConfigError: The prompt is longer.
    """
    positions = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or longest.prompt_tokens <= positions:
        return
    for name, part in module.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(part, torch.nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            raise ConfigError(
                f"the prompt has {longest.prompt_tokens} tokens, and the model knows {positions} "
                f"positions ({name}). Shorten the prompt."
            )


def require_memory(
    need_bytes: int, layer_bytes: int, budget_bytes: int, host_bytes: int, longest: Longest
) -> None:
    """Refuse a KV cache for which there is no room anywhere, or that of one layer on the device.

    Raises:
        PlanInfeasibleError: Device and host together have less, or the device has less than one
            layer's attention reads.
    """
    if layer_bytes > budget_bytes:
        raise PlanInfeasibleError(
            f"attention over {longest.num_sequences} sequences of {longest.num_tokens} tokens "
            f"reads {format_bytes(layer_bytes)} ({layer_bytes} bytes) of KV cache in one layer; "
            f"device_budget is {budget_bytes} bytes. Lower the batch, the beams or max_new_tokens."
        )
    if need_bytes <= budget_bytes + host_bytes:
        return
    raise PlanInfeasibleError(
        f"the KV cache of {longest.num_sequences} sequences of {longest.num_tokens} tokens needs "
        f"{format_bytes(need_bytes)} ({need_bytes} bytes); device_budget is {budget_bytes} bytes "
        f"and {host_bytes} bytes of host memory are free. Lower the batch, the beams or "
        f"max_new_tokens."
    )


def watched_generate(
    module: Any, generate: Callable[..., Any], budget_bytes: Callable[[], int]
) -> Callable[..., Any]:
    """Return ``generate`` with a look ahead in front of it."""

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        longest = longest_of(module, args, kwargs)
        if longest is not None:
            require_positions(module, longest)
            need = kv_bytes(module.config, module.dtype, longest)
            if need is not None and _keeps_a_cache(module, kwargs):
                free = psutil.virtual_memory().available
                layers = module.config.get_text_config(decoder=True).num_hidden_layers
                require_memory(need, need // layers, budget_bytes(), free, longest)
        return generate(*args, **kwargs)

    return watched


def _keeps_a_cache(module: Any, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a generation keeps a cache."""
    wanted = kwargs.get("use_cache")
    return bool(module.generation_config.use_cache if wanted is None else wanted)
