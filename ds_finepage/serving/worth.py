"""Predicts what an endpoint can do under a budget, from the config of its model alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import AutoConfig

from ds_finepage.capture.models import positions_of
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.planning.budget import budget_on
from ds_finepage.reporting.figures import PlanFigures
from ds_finepage.runtime.drafts import TYPICAL_LENGTH
from ds_finepage.whatif import capture_model, forms_of, plan_captured

USUAL_POSITIONS = 4096
"""The longest context of a model that does not say how many positions it has."""

LEAST_CONTEXT = 16

LONGEST_WARM = 4096
"""Prompts of up to so many tokens are planned before the endpoint is ready."""

NUM_TRIES = 4
"""Prompts that are captured in order to find the longest one that has room."""

PAGE = 32
"""Tokens of a block of the paged KV cache."""

MOST_A_PASS = 1024
"""Tokens of prompts that clients who share a pass read in it, at most."""


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of what fits.

    Attributes:
        longest: Tokens of the longest context.
        clients: Those that share a pass.
        cached: Tokens of all clients in the paged KV cache; 0 if clients take turns.
        tokens_a_pass: Tokens that a pass reads, of all clients.
    """

    longest: int
    clients: int = 1
    cached: int = 0
    tokens_a_pass: int = 0


def worth_of(
    model: str, budget: DeviceBudget, profile: HardwareProfile, *, clients: int = 1, **form: Any
) -> tuple[dict[str, Any], Room]:
    """Plan a model under a budget, before its weights are read.

    Args:
        model: A folder, or a name that transformers knows.
        budget: The limit on all device bytes.
        profile: The machine.
        clients: Those that share a pass. A single one takes turns with others.
        **form: Of the weights, as :func:`ds_finepage.whatif.capture_model` takes it.

    Returns:
        Figures by name, those of sizes end with ``_bytes``; and what there is room for.

    Raises:
        ConfigError: The model cannot be read.
        CaptureError: It cannot be captured from its config.
        PlanInfeasibleError: A step, or a short prompt, has no room.
    """
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"serve: {model!r} cannot be read: {error}") from None
    dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    config = config.get_text_config()  # a model of images takes its steps with this part
    positions = context_of(config)
    seq = min(positions, TYPICAL_LENGTH)
    capture = partial(capture_model, config, batch=1, profile=profile, dtype=dtype, **form)
    prompt = cache(lambda seq: capture(phase="prefill", seq=seq))

    def least_bytes(seq: int) -> int:
        forms = forms_of(prompt(seq), policy="finepage", split=True)
        return min(needs.min_budget_bytes for _, needs in forms)

    captured = capture(phase="decode", seq=seq)
    budget_bytes = budget_on(budget, captured.graph.weight_bytes, profile)
    plan = partial(plan_captured, budget_bytes=budget_bytes, profile=profile)
    step = plan(captured).figures
    if least_bytes(shortest := min(LEAST_CONTEXT, positions)) > budget_bytes:
        plan(prompt(shortest))  # refuses it
    if clients == 1:
        room = Room(longest_context(least_bytes, positions, budget_bytes))
    else:
        room = room_to_share(step, positions, clients, least_bytes)
        seq = min(seq, room.cached // clients)
        free_bytes = (room.cached - clients * seq) * step.kv_bytes // step.seq  # not theirs yet
        shared = capture(phase="decode", seq=seq, batch=clients)
        step = plan(shared, budget_bytes=budget_bytes - free_bytes, kv_cache="device").figures
    return {
        "budget_bytes": budget_bytes,
        "weights_bytes": step.weight_bytes,
        "weights and KV cache that stay on the device_bytes": step.entry_reloaded_bytes
        - step.reloaded_bytes,
        f"copied for a step behind {seq} tokens_bytes": step.reloaded_bytes,
        "read by the host for that step_bytes": step.host_read_bytes or None,
        f"tokens a second, clients a pass: {clients}": f"{step.tokens_per_s:.2f}",
        "longest context, tokens": room.longest,
    }, room


def room_to_share(
    step: PlanFigures, positions: int, clients: int, least_bytes: Callable[[int], int]
) -> Room:
    """Return the room of clients who share passes.

    A pass copies the weights that do not stay, for one client or for many. So tokens a second grow
    with each client, although blocks of its KV cache push out as many bytes of weights: with M
    bytes copied beside no cache, and c bytes for each of n clients, they are n / (M + n c) of the
    link's rate. Once all clients have blocks, more of them gain nothing. So there are blocks for
    contexts of twice the typical length, in half of the budget at most; the prompts of a pass need
    no more than an eighth.

    Args:
        step: A step of one client.
        positions: The most tokens that the model takes.
        clients: How many there are.
        least_bytes: The least budget for a prompt of so many tokens.
    """
    row_bytes = step.kv_bytes // step.seq or 1
    in_cache = min(clients * 2 * step.seq, step.budget_bytes // 2 // row_bytes)
    cached = max(1, in_cache // PAGE) * PAGE
    most = min(positions, MOST_A_PASS, cached)
    in_pass = longest_context(least_bytes, most, step.budget_bytes // 8)
    return Room(min(positions, cached - 1), clients, cached, in_pass)


def context_of(config: Any) -> int:
    """Return the most tokens that a model takes, whatever the budget."""
    return positions_of(config) or USUAL_POSITIONS


def longest_context(least_bytes: Callable[[int], int], positions: int, budget_bytes: int) -> int:
    """Return the most tokens of a prompt that has room.

    The bytes grow with the tokens almost in proportion, so a straight line finds the end soon.

    Args:
        least_bytes: The least budget for a prompt of so many tokens.
        positions: The most tokens that the model takes.
        budget_bytes: The budget, which has room for ``LEAST_CONTEXT``.
    """
    low, high = min(LEAST_CONTEXT, positions), positions
    fits, exceeds = least_bytes(low), least_bytes(high)
    if exceeds <= budget_bytes:
        return high
    for _ in range(NUM_TRIES):
        share = (budget_bytes - fits) / (exceeds - fits)
        middle = min(max(low + 1, low + int(share * (high - low))), high - 1)
        if middle <= low + low // 64:
            break  # each try is a capture
        found = least_bytes(middle)
        if found <= budget_bytes:
            low, fits = middle, found
        else:
            high, exceeds = middle, found
    return low


def warm_lengths(longest: int) -> list[int]:
    """Return lengths of prompts whose plans serve all others: each half of the one before."""
    first = 1 << (min(longest, LONGEST_WARM).bit_length() - 1)
    return [first >> n for n in range(first.bit_length()) if first >> n >= LEAST_CONTEXT]
