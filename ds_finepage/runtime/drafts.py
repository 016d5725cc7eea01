"""Drafts under the budget of a model: their weights stay on the device for good.

A draft runs once for each token that it makes, and the model once a round. A byte of the draft that
is missing on the device is copied ``k`` times a round, and a byte of the model once. So all weights
of a draft stay, beside the arena, and the model streams through the rest of the budget. To the
plans they are inputs that are there already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.execution.watch import data_of, set_data
from ds_finepage.integrations.transformers import drafting
from ds_finepage.integrations.transformers.preflight import Longest, kv_bytes
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import layers_to_pack
from ds_finepage.packing.stand_in import stand_in_for
from ds_finepage.planning.budget import FULL_SHARE
from ds_finepage.planning.finepage.stacking import spread_order
from ds_finepage.runtime.stats import Stats
from ds_finepage.units import format_bytes

STREAM_SHARE = 16
"""A stand-in leaves at least one part in so many of the budget to the model: for its stream, KV
cache and activations. What tables of logits take comes on top."""

STREAM_MATRICES = 3
"""It leaves at least as many times the largest matrix."""

TYPICAL_LENGTH = 1024
"""Tokens in the KV cache for which a draft is chosen before any prompt is known."""

MOST_CACHE_SHARE = 5
"""Room is left for such a KV cache, since each step of a draft reads it, up to one part in so many
of the budget."""

STAND_IN = "stand-in"

STAND_IN_FORM = "int4"
"""Of the copies of layers that stream."""


class Draft:
    """A draft of an attached model, and its weights, which stay on the device.

    Attributes:
        model: The draft.
        generation: Its ``generate``.
        weights: Its weights; some of them may be those of the model.
        nbytes: Bytes of them.
        assists_all: It assists each generation that transformers can assist; else only those that
            name it.
    """

    def __init__(self, model: Any, *, stands_for: Any = None, assists_all: bool = True) -> None:
        """Take a draft; its weights are where they are until :meth:`move_to`.

        A stand-in comes with the model that it ``stands_for``.

        Raises:
            ConfigError: It is no model that generates.
        """
        if not hasattr(model, "generate"):
            raise ConfigError(
                f"draft: {type(model).__name__} has no generate(). Give it a model of transformers."
            )
        self.model = model
        self.assists_all = assists_all
        is_stand_in = stands_for is not None
        self.generation = drafting.DraftGeneration(model, is_stand_in=is_stand_in)
        self.weights: list[torch.Tensor] = list(model.parameters())
        self._ids = set(map(id, self.weights))
        owner = stands_for if is_stand_in else model
        self._with_home = [p for p in owner.parameters() if p in self]
        self._homes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.nbytes = sum(weight.nbytes for weight in self.weights)

    def __contains__(self, parameter: object) -> bool:
        """Tell whether a parameter is a weight of the draft."""
        return id(parameter) in self._ids

    def counted(self, stats: Stats) -> Stats:
        """Return the counters of the model with those of the draft."""
        price = self.generation.price
        return replace(
            stats,
            draft_bytes=self.nbytes,
            num_drafted=price.num_drafted,
            num_accepted=price.num_accepted,
            num_checks=price.num_checks,
        )

    def require_room(self, budget_bytes: int) -> None:
        """Refuse a draft that leaves nothing of a budget to the model.

        Raises:
            PlanInfeasibleError: It does.
        """
        if self.nbytes >= budget_bytes:
            raise PlanInfeasibleError(
                f"the draft {type(self.model).__name__} takes {format_bytes(self.nbytes)} "
                f"({self.nbytes} bytes) of the device; device_budget is {budget_bytes} bytes, and "
                f"the model needs room too. Raise finepage.device_budget or take a smaller draft."
            )

    def move_to(self, device: torch.device) -> int:
        """Copy the weights to a device, also to the CPU, where the budget counts them too.

        Returns:
            The bytes of their homes in host memory.
        """
        self._homes = [(weight, data_of(weight)) for weight in self._with_home]
        for weight, home in self._homes:
            set_data(weight, home.to(device, copy=True))
        for weight in self.weights:  # packed copies live on the device only
            set_data(weight, data_of(weight).to(device))
        return sum(home.nbytes for _, home in self._homes)

    def move_back(self) -> None:
        """Move the weights back, with what was written meanwhile."""
        for weight, home in self._homes:
            now = data_of(weight)
            with torch.inference_mode(home.is_inference()):  # else torch refuses to write there
                set_data(weight, home.copy_(now))
        self._homes = []


def stand_in_of(model: Any, budget_bytes: int, form: PackedForm) -> Any:
    """Make a draft of a model: its own weights as far as there is room, packed copies of the rest.

    Args:
        model: The model, in host memory.
        budget_bytes: The budget of both.
        form: The form of the copies.

    Raises:
        ConfigError: The model has no layers to pack.
        PlanInfeasibleError: The budget has no room for the copies.
    """
    sizes = layers_to_pack(model)
    if not sizes:
        raise ConfigError(f"draft: {type(model).__name__} has no layer that can be packed.")
    itemsize = model.dtype.itemsize
    copies = {name: form.nbytes(n // itemsize, itemsize) for name, n in sizes.items()}
    all_bytes = sum({id(p): p.nbytes for p in model.parameters()}.values())
    weights = [p for name in sizes for p in model.get_submodule(name).parameters()]
    typical = Longest(1, TYPICAL_LENGTH, TYPICAL_LENGTH)
    room_bytes = room_to_share(
        all_bytes - sum(sizes.values()) + sum(copies.values()),
        largest_bytes=max(p.nbytes // (len(p) if p.dim() == 3 else 1) for p in weights),
        cache_bytes=kv_bytes(model.config, model.dtype, typical) or 0,
        vocabulary=model.config.get_text_config().vocab_size,
        budget_bytes=budget_bytes,
    )
    shared = set()
    for at in spread_order(range(len(sizes))):
        name = list(sizes)[at]
        more = sizes[name] - copies[name]
        if more <= room_bytes:
            room_bytes -= more
            shared.add(name)
    made = stand_in_for(model, [name for name in sizes if name not in shared], form)
    made.generation_config = drafting.own_settings(model)
    return made


def room_to_share(
    least_bytes: int, *, largest_bytes: int, cache_bytes: int, vocabulary: int, budget_bytes: int
) -> int:
    """Return the bytes that a stand-in may take beyond the least, to share layers of its model.

    A layer that it shares takes its own bytes instead of those of a packed copy.

    Args:
        least_bytes: Bytes of a stand-in that has packed copies of all layers.
        largest_bytes: Bytes of the largest matrix in a layer.
        cache_bytes: Bytes of the KV cache of the model.
        vocabulary: Tokens that the model knows.
        budget_bytes: The budget of both.

    Raises:
        PlanInfeasibleError: The budget has no room for the copies.
    """

    def bytes_beside(budget_bytes: int) -> int:
        _, logits_bytes = drafting.longest_draft(vocabulary, budget_bytes)
        rows_bytes = min(FULL_SHARE * cache_bytes + 1, budget_bytes // MOST_CACHE_SHARE)
        stream_bytes = max(budget_bytes // STREAM_SHARE, STREAM_MATRICES * largest_bytes)
        return max(stream_bytes, rows_bytes) + logits_bytes

    room_bytes = budget_bytes - bytes_beside(budget_bytes) - least_bytes
    if room_bytes < 0:
        need = budget_bytes
        while need < (found := least_bytes + bytes_beside(need)):
            need = found
        raise PlanInfeasibleError(
            f"a stand-in takes {format_bytes(least_bytes)} and leaves "
            f"{format_bytes(bytes_beside(budget_bytes))} to the model; device_budget is "
            f"{budget_bytes} bytes. Raise finepage.device_budget to >= {need}, or leave out "
            f"finepage.draft.",
            need,
        )
    return room_bytes
