"""Rejects a ``generate`` call that would run out of memory, before its first token."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_finepage._compat.transformers import given_cache
from ds_finepage.capture.from_config import DTYPES, capture_config, windows_of
from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError
from ds_finepage.execution import host_ops
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.packing.model import form_of, pack_model
from ds_finepage.planning.budget import FULL_SHARE, LARGE_SHARE, SMALL_SHARE, competes, is_small
from ds_finepage.planning.pipeline import PlanSettings, needs_of
from ds_finepage.units import format_bytes

logger = logging.getLogger(__name__)

FEW_LAYERS = 128
"""The tensors of one op that grow with the length take less than the KV cache of so many layers:
keys and values, old and new, each repeated for up to 16 heads of the query, twice over. A larger
budget has room for any length if it has room for the prompt."""


@dataclass(frozen=True, slots=True)
class Longest:
    """The largest call of a generation: sequences (beams included), and tokens of each."""

    num_sequences: int
    num_tokens: int
    prompt_tokens: int


def longest_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Longest | None:
    """Read the longest call from the arguments of ``generate``; None where they do not tell it."""
    inputs = args[0] if args else None
    for name in ("inputs", "input_ids", "inputs_embeds"):
        inputs = kwargs.get(name) if inputs is None else inputs
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
        return None
    if getattr(module.config, "is_encoder_decoder", False):
        return None  # its cache does not grow from its prompt

    setting = functools.partial(setting_of, module, args, kwargs)
    prompt = inputs.shape[1]
    new, most = setting("max_new_tokens"), setting("max_length")
    if new is not None:
        total = prompt + new
    else:
        total = max(prompt + 1, most) if most is not None else prompt + 1
    beams = setting("num_beams") or 1
    returned = setting("num_return_sequences") or 1
    return Longest(inputs.shape[0] * max(beams, returned), total, prompt)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a generation uses its KV cache.

    Attributes:
        longest: Rows of the cache at its end; None where they are not known.
        is_reordered: Whether its sequences get another order after each step, as beams do.
        is_made_at_once: It has room for all rows from its first pass on.
        competes: It competes with the weights; see :func:`ds_finepage.planning.budget.competes`.
    """

    longest: int | None = None
    is_reordered: bool = False
    is_made_at_once: bool = False
    competes: bool = False


def cache_use_of(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    budget_bytes: int,
    weight_bytes: int,
    is_assisted: bool,
) -> CacheUse:
    """Find out how a generation uses its KV cache.

    Args:
        module: The model.
        args: The positional arguments of ``generate``.
        kwargs: Its named arguments.
        budget_bytes: The bytes for the weights and the cache.
        weight_bytes: Bytes of all weights.
        is_assisted: Tokens are drafted. A step of a stand-in reads the cache too, so it competes
            only where it would have no room in the end. It then has room for all rows at once,
            and where it would double more than twice, because few passes follow each plan.
    """
    longest = longest_of(module, args, kwargs)
    num_rows = None if longest is None else longest.num_tokens - 1  # no step reads the last token
    is_reordered = (setting_of(module, args, kwargs, "num_beams") or 1) > 1
    dtype, nbytes = getattr(module, "dtype", None), None
    if longest is not None and dtype is not None:
        nbytes = kv_bytes(module.config, dtype, longest)
    if longest is None or nbytes is None:
        return CacheUse(num_rows, is_reordered)
    small, large = (LARGE_SHARE, FULL_SHARE) if is_assisted else (SMALL_SHARE, LARGE_SHARE)
    moves = not is_reordered and competes(nbytes, weight_bytes, budget_bytes, share=large)
    doubles_often = longest.num_tokens > 4 * longest.prompt_tokens
    at_once = is_small(nbytes, budget_bytes, share=small)
    at_once = at_once or (is_assisted and (moves or doubles_often))
    return CacheUse(num_rows, is_reordered, is_made_at_once=at_once, competes=moves)


def setting_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a generation, from the call or from its configuration."""
    found = kwargs.get(name)
    if found is not None:
        return found
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    return getattr(config or getattr(module, "generation_config", None), name, None)


def kv_bytes(config: Any, dtype: torch.dtype, longest: Longest) -> int | None:
    """Return the bytes of a KV cache at its longest; None where the config does not tell them."""
    try:
        text = config.get_text_config(decoder=True)
        heads = getattr(text, "num_attention_heads", 0)
        shared = getattr(text, "num_key_value_heads", 0) or heads
        hidden = getattr(text, "hidden_size", 0)
        sizes = (heads, shared, hidden, getattr(text, "num_hidden_layers", 0))
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        width: int = getattr(text, "head_dim", None) or hidden // heads
        windows = (window or longest.num_tokens for window in windows_of(text))
        num_rows = sum(min(longest.num_tokens, window) for window in windows)
    except (AttributeError, CaptureError, RuntimeError, TypeError, ValueError) as error:
        logger.info("the config does not tell how large a KV cache becomes: %s", error)
        return None  # some configs raise for settings that differ between layers
    return 2 * num_rows * longest.num_sequences * shared * width * dtype.itemsize


def require_tokens(longest: Longest, kwargs: Mapping[str, Any]) -> None:
    """Refuse a prompt without tokens: transformers reads what the last one predicts.

    Raises:
        ConfigError: It has none, and no embeddings take its place.
    """
    if longest.prompt_tokens == 0 and kwargs.get("inputs_embeds") is None:
        raise ConfigError(
            "the prompt has no tokens: the second size of input_ids is 0. Give one token or more, "
            "or leave input_ids out to begin with the model's bos token."
        )


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
    """Refuse a KV cache without room on device and host, or with a layer too large for the device.

    Raises:
        PlanInfeasibleError: Device and host together have less, or the device has less than the
            attention of one layer reads.
    """
    if layer_bytes > budget_bytes:
        raise PlanInfeasibleError(
            f"attention over {longest.num_sequences} sequences of {longest.num_tokens} tokens "
            f"reads {format_bytes(layer_bytes)} ({layer_bytes} bytes) of KV cache in one layer; "
            f"device_budget is {budget_bytes} bytes. Raise finepage.device_budget to >= "
            f"{layer_bytes} or lower the batch, the beams or max_new_tokens.",
            layer_bytes,
        )
    if need_bytes <= budget_bytes + host_bytes:
        return
    raise PlanInfeasibleError(
        f"the KV cache of {longest.num_sequences} sequences of {longest.num_tokens} tokens needs "
        f"{format_bytes(need_bytes)} ({need_bytes} bytes); device_budget is {budget_bytes} bytes "
        f"and {host_bytes} bytes of host memory are free within finepage.host_budget. Lower the "
        f"batch, the beams or max_new_tokens."
    )


class Preflight:
    """Checks the generations of one model before they begin."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._longest_that_fits: dict[tuple[Any, ...], int] = {}  # tokens

    def require(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        budget_bytes: int,
        host_bytes: int,
        planning: PlanSettings,
    ) -> None:
        """Refuse a generation that would run out of memory.

        Args:
            args: The positional arguments of ``generate``.
            kwargs: Its named arguments.
            budget_bytes: The device budget.
            host_bytes: Bytes of host memory that a cache may take.
            planning: The settings of the planner.

        Raises:
            ConfigError: The prompt has no tokens, or more than a table of positions.
            PlanInfeasibleError: The KV cache fits nowhere, or the last step cannot be planned.
        """
        module, longest = self._module, longest_of(self._module, args, kwargs)
        if longest is None:
            return
        require_tokens(longest, kwargs)
        require_positions(module, longest)
        need = kv_bytes(module.config, module.dtype, longest)
        if need is None or not setting_of(module, args, kwargs, "use_cache"):
            return
        given = given_cache(kwargs)
        free = host_bytes + (0 if given is None else cache_bytes(given))
        layers = module.config.get_text_config(decoder=True).num_hidden_layers
        require_memory(need, need // layers, budget_bytes, free, longest)
        if FEW_LAYERS * (need // layers) > budget_bytes:
            self._require_last_step(longest, budget_bytes, planning)

    def _require_last_step(
        self, longest: Longest, budget_bytes: int, planning: PlanSettings
    ) -> None:
        """Refuse a generation whose last step cannot run with its KV cache in host memory.

        A capture takes seconds for a large model. Lengths are therefore rounded up first: if those
        fit, all shorter ones do.
        """
        if longest.num_tokens - 1 <= longest.prompt_tokens:
            return  # no step follows the prompt, since no step reads the last token
        settings = (longest.num_sequences, budget_bytes, planning.cuts_weights)
        if longest.num_tokens <= self._longest_that_fits.get(settings, 0):
            return
        rounded_up = replace(longest, num_tokens=1 << (longest.num_tokens - 1).bit_length())
        step = self._capture(rounded_up)
        if step is not None and _refusal(step, budget_bytes, planning) is None:
            self._longest_that_fits[settings] = rounded_up.num_tokens
            return
        step = self._capture(longest)
        refusal = None if step is None else _refusal(step, budget_bytes, planning)
        if refusal is not None:
            raise PlanInfeasibleError(
                f"the last step of {longest.num_sequences} sequences of {longest.num_tokens} "
                f"tokens has no room, even with their KV cache in host memory: {refusal}",
                refusal.min_budget_bytes,
            )
        self._longest_that_fits[settings] = longest.num_tokens  # or its need is not known

    def _capture(self, longest: Longest) -> TaskGraph | None:
        """Capture the last step of a generation; None where the model's config does not tell it.

        The config does not tell which other library has quantised the weights.
        """
        dtype = str(self._module.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            return None
        form = form_of(self._module)
        if form is None and is_quantised(self._module):
            return None
        try:
            return capture_config(
                self._module.config,
                phase="decode",
                batch=longest.num_sequences,
                seq=longest.num_tokens - 1,
                dtype=dtype,
                host_ops=host_ops,
                prepare=None if form is None else functools.partial(pack_model, form=form),
            )
        except (CaptureError, ConfigError) as error:
            logger.info("the last step cannot be captured ahead: %s", error)
            return None


def is_quantised(module: Any) -> bool:
    """Tell whether the weights of a model are not numbers of its dtype."""
    has_config = getattr(module.config, "quantization_config", None) is not None
    return has_config or not all(p.is_floating_point() for p in module.parameters())


def _refusal(
    step: TaskGraph, budget_bytes: int, planning: PlanSettings
) -> PlanInfeasibleError | None:
    """Return why a step cannot run; None where it can.

    The workspaces of its ops are not counted, because they are not measured yet.
    """
    needs = needs_of(step, alignment=planning.alignment, cuts_weights=planning.cuts_weights)
    try:
        needs.require_room(budget_bytes)
    except PlanInfeasibleError as error:
        return error
    return None


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the rows of a cache, wherever they are."""
    tensors = [
        getattr(layer, name, None)
        for layer in getattr(cache, "layers", ())
        for name in ("keys", "values")
    ]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
