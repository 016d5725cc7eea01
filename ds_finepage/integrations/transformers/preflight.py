"""What a generation will need at its longest, said before its first token."""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from ds_finepage.capture.from_config import DTYPES, capture_config
from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError
from ds_finepage.execution.host_ops import to_device
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.pipeline import needs_of
from ds_finepage.units import format_bytes

logger = logging.getLogger(__name__)

FEW_LAYERS = 128
"""What grows with the length is, in one op, less than the KV cache of so many layers: keys and
values, old and new, each repeated for up to 16 heads of the query, twice over. A budget above that
has room for any length if it has room for the prompt."""


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

    def setting(name: str) -> Any:
        return setting_of(module, args, kwargs, name)

    prompt = inputs.shape[1]
    new, most = setting("max_new_tokens"), setting("max_length")
    if new is not None:
        total = prompt + new
    else:
        total = max(prompt + 1, most) if most is not None else prompt + 1
    beams = setting("num_beams") or 1
    returned = setting("num_return_sequences") or 1
    return Longest(inputs.shape[0] * max(beams, returned), total, prompt)


def setting_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a generation: as named in the call, or as in its configuration."""
    found = kwargs.get(name)
    if found is not None:
        return found
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    return getattr(config or module.generation_config, name, None)


def kv_bytes(config: Any, dtype: torch.dtype, longest: Longest) -> int | None:
    """Return the bytes of a KV cache at its longest; None where the config does not tell."""
    try:
        return _kv_bytes(config, dtype, longest)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        logger.info("the config does not tell how large a KV cache becomes: %s", error)
        return None  # some configs refuse to be asked for what differs from layer to layer


def _kv_bytes(config: Any, dtype: torch.dtype, longest: Longest) -> int | None:
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
        elif kind in ("full_attention", "sliding_attention"):
            num_rows += longest.num_tokens
        else:
            return None  # it keeps something else than keys and values, or not all of them
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
            f"device_budget is {budget_bytes} bytes. Raise finepage.device_budget to >= "
            f"{layer_bytes} or lower the batch, the beams or max_new_tokens.",
            layer_bytes,
        )
    if need_bytes <= budget_bytes + host_bytes:
        return
    raise PlanInfeasibleError(
        f"the KV cache of {longest.num_sequences} sequences of {longest.num_tokens} tokens needs "
        f"{format_bytes(need_bytes)} ({need_bytes} bytes); device_budget is {budget_bytes} bytes "
        f"and {host_bytes} bytes of host memory are free. Lower the batch, the beams or "
        f"max_new_tokens."
    )


class LookAhead:
    """What is asked before a generation begins, of one model."""

    def __init__(
        self,
        module: Any,
        *,
        alignment: int,
        budget_bytes: Callable[[], int],
        may_cut: Callable[[], bool],
    ) -> None:
        """Start without having looked.

        Args:
            module: The model.
            alignment: Of extents, in bytes.
            budget_bytes: Tells the device budget of now.
            may_cut: Tells whether plans may cut weights now.
        """
        self._module = module
        self._alignment = alignment
        self._budget_bytes = budget_bytes
        self._may_cut = may_cut
        self._longest_that_fits: dict[tuple[int, int, bool], int] = {}  # by batch and budget

    def require(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a generation that is known to end for want of memory.

        Args:
            args: The arguments of ``generate``.
            kwargs: Its named arguments.

        Raises:
            ConfigError: The prompt is longer than a table of positions.
            PlanInfeasibleError: The KV cache fits nowhere, or the last step cannot be planned.
        """
        module, longest = self._module, longest_of(self._module, args, kwargs)
        if longest is None:
            return
        require_positions(module, longest)
        need = kv_bytes(module.config, module.dtype, longest)
        if need is None or not setting_of(module, args, kwargs, "use_cache"):
            return
        given = kwargs.get("past_key_values")
        free = psutil.virtual_memory().available + (0 if given is None else _held_bytes(given))
        layers = module.config.get_text_config(decoder=True).num_hidden_layers
        require_memory(need, need // layers, self._budget_bytes(), free, longest)
        if FEW_LAYERS * (need // layers) <= self._budget_bytes():
            return
        self._require_last_step(longest)

    def _require_last_step(self, longest: Longest) -> None:
        """Refuse a generation whose last step cannot run with its KV cache in host memory.

        A capture takes seconds for a large model, so lengths are looked at as rounded up first: if
        those fit, so does whatever is shorter.
        """
        if longest.num_tokens - 1 <= longest.prompt_tokens:
            return  # no step follows the prompt: what is generated last is never looked at
        settings = (longest.num_sequences, self._budget_bytes(), self._may_cut())
        if longest.num_tokens <= self._longest_that_fits.get(settings, 0):
            return
        rounded_up = replace(longest, num_tokens=1 << (longest.num_tokens - 1).bit_length())
        step = self._capture(rounded_up)
        if step is not None and self._refusal(step) is None:
            self._longest_that_fits[settings] = rounded_up.num_tokens
            return
        step = self._capture(longest)
        refusal = None if step is None else self._refusal(step)
        if refusal is not None:
            raise PlanInfeasibleError(
                f"the last step of {longest.num_sequences} sequences of {longest.num_tokens} "
                f"tokens has no room, even with their KV cache in host memory: {refusal}",
                refusal.min_budget_bytes,
            )
        self._longest_that_fits[settings] = longest.num_tokens  # or nothing is known of it

    def _capture(self, longest: Longest) -> TaskGraph | None:
        """Return the last step of a generation; None where the model's config does not tell."""
        dtype = str(self._module.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            return None
        try:
            return capture_config(
                self._module.config,
                phase="decode",
                batch=longest.num_sequences,
                seq=longest.num_tokens - 1,
                dtype=dtype,
                to_device=to_device,
            )
        except (CaptureError, ConfigError) as error:
            logger.info("the last step is not known before it comes: %s", error)
            return None

    def _refusal(self, step: TaskGraph) -> PlanInfeasibleError | None:
        """Say why a step cannot run; None where it can.

        It is counted without the workspaces of its ops, which are known when they are measured.
        """
        needs = needs_of(step, alignment=self._alignment, cuts_weights=self._may_cut())
        try:
            needs.require_room(self._budget_bytes())
        except PlanInfeasibleError as error:
            return error
        return None


class WatchedGenerate:
    """``generate`` of one model with a look ahead in front of it.

    A copy of the model gets the ordinary ``generate`` of its class.
    """

    def __init__(
        self,
        module: Any,
        ahead: LookAhead,
        around: Callable[[], AbstractContextManager[None]],
        refuse: Callable[..., PlanInfeasibleError],
    ) -> None:
        """Stand in front of ``module.generate``.

        Args:
            module: The model.
            ahead: Refuses a generation that is known to end for want of memory.
            around: Makes a context for each generation.
            refuse: ``refuse(error, generate, args, kwargs)`` says what a refused generation needs.
        """
        self._module = module
        self._generate = module.generate
        self._ahead = ahead
        self._around = around
        self._refuse = refuse
        functools.update_wrapper(self, self._generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look ahead, then generate.

        Raises:
            ConfigError: The prompt is longer than a table of positions.
            PlanInfeasibleError: The generation is known to end for want of memory.
        """
        try:
            self._ahead.require(args, kwargs)
            with self._around():
                return self._generate(*args, **kwargs)
        except PlanInfeasibleError as error:
            refusal = error.bare()
        raise self._refuse(refusal, self._generate, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the ordinary ``generate`` of the copy that is being made."""
        return types.MethodType(type(self._module).generate, copy.deepcopy(self._module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the ordinary ``generate`` of the module that is being pickled."""
        return getattr, (self._module, "generate")


def _held_bytes(cache: Any) -> int:
    """Count what a cache holds already, wherever that is."""
    tensors = [
        getattr(layer, name, None)
        for layer in getattr(cache, "layers", ())
        for name in ("keys", "values")
    ]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
