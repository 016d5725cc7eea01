"""Predicts what a draft gains on a machine: tokens a second with it and without, by budget.

A model's config and a hardware profile in, figures for each budget out. Neither the weights nor the
machine are needed. A round is ``k`` steps of the draft and one pass of the model. All weights of
the draft are on the device, so a step takes as long as a pass that copies nothing. The model's pass
is planned in the rest of the budget, with as many rows as the longest draft needs: it streams the
same weights for fewer, and of a mixture of experts at most as many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from transformers import PretrainedConfig

from ds_finepage.capture.models import load_model_config, positions_of
from ds_finepage.errors import ConfigError, FinepageError, PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.taskgraph import BufferKind
from ds_finepage.integrations.transformers.drafting import longest_draft
from ds_finepage.integrations.transformers.price import (
    LENGTHS,
    PRIOR_ACCEPTANCE,
    best_length,
    tokens_a_round,
)
from ds_finepage.packing.form import PackedForm
from ds_finepage.planning.budget import FULL_SHARE, competes
from ds_finepage.reporting.tabular import table_of
from ds_finepage.runtime.drafts import STAND_IN, STAND_IN_FORM, TYPICAL_LENGTH, room_to_share
from ds_finepage.units import NS_PER_S, format_bytes, format_ns
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured, plan_resident

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedPoint:
    """A model with a draft under one budget.

    Attributes:
        budget_bytes: The limit on all device bytes of both.
        draft_bytes: Weights of the draft, which stay on the device.
        shared_bytes: Those of them that are the model's own.
        most: The longest draft whose logits have room.
        step_ns: Nanoseconds of a step of the draft.
        pass_ns: Of a pass of the model.
        plain_ns: Of a pass under the whole budget, without a draft.
        reloaded_bytes: Bytes that a pass copies to the device.
        plain_reloaded_bytes: The same without a draft.
    """

    budget_bytes: int
    draft_bytes: int
    shared_bytes: int
    most: int
    step_ns: int
    pass_ns: int
    plain_ns: int
    reloaded_bytes: int
    plain_reloaded_bytes: int

    def length(self, acceptance: float) -> int:
        """Return how many tokens to draft where each is accepted with this chance."""
        return best_length(acceptance, self.step_ns, self.pass_ns, self.most)

    def tokens_per_s(self, acceptance: float) -> float:
        """Return the tokens a second where each drafted one is accepted with this chance."""
        length = self.length(acceptance)
        round_ns = length * self.step_ns + self.pass_ns
        return tokens_a_round(acceptance, length) * NS_PER_S / round_ns

    def gain(self, acceptance: float) -> float:
        """Return the tokens a second over those without a draft."""
        return self.tokens_per_s(acceptance) * self.plain_ns / NS_PER_S


def with_draft(
    model: str | PretrainedConfig,
    draft: str,
    *,
    seq: int,
    profile: HardwareProfile,
    weights: str | None = None,
    weights_group: int = GROUP,
    fused: bool = True,
    **shared: Any,
) -> Drafted:
    """Capture a decode step of a model and of its draft.

    Args:
        model: A shipped name, a directory, a transformers config.json, or a config.
        draft: "stand-in", or the name, directory or config.json of another model.
        seq: Tokens in the KV cache after the step.
        profile: The machine.
        weights: "bf16", "int8" or "int4" for both; by default they are as the configs say.
        weights_group: Numbers that share a scale in a packed form, also in that of a stand-in.
        fused: Packed products of few rows unpack in registers, as a stand-in's do on a GPU.
        **shared: Further arguments of :func:`capture_model`.

    Raises:
        ConfigError: The model or its draft cannot be used, or a stand-in of packed weights is
            asked for.
        CaptureError: A forward cannot be written as a taskgraph.
    """
    given: dict[str, Any] = {"phase": "decode", "batch": 1, "seq": seq, "profile": profile}
    given |= {"weights_group": weights_group, **shared}
    captured = capture_model(model, weights=weights, **given)
    check = capture_model(model, weights=weights, num_new=LENGTHS[-1] + 1, **given)
    vocabulary = load_model_config(model).get_text_config().vocab_size
    if draft != STAND_IN:
        other = capture_model(draft, weights=weights, **given)
        return Drafted(captured, check, other, profile, vocabulary)
    if captured.weights is not None:
        raise ConfigError(
            f'draft: "stand-in" packs layers, and those of {captured.model} are packed already. '
            f"Name a smaller model, or leave out the form of the weights."
        )
    packed = capture_model(model, weights=STAND_IN_FORM, fused_unpacking=fused, **given)
    return Drafted(captured, check, packed, profile, vocabulary, is_stand_in=True)


def wins(module: Any, budget_bytes: int, profile: HardwareProfile, form: PackedForm) -> bool:
    """Tell whether a stand-in is predicted to make a model faster by a tenth.

    Args:
        module: Any model; of one that cannot be captured from its config nothing is predicted.
        budget_bytes: The budget of both.
        profile: The machine.
        form: How the stand-in packs.
    """
    given: dict[str, Any] = {"profile": profile, "weights_group": form.group, "fused": form.fused}
    try:
        seq = min(TYPICAL_LENGTH, positions_of(module.config) or TYPICAL_LENGTH)
        dtype = str(module.dtype).removeprefix("torch.")
        drafted = with_draft(module.config, STAND_IN, seq=seq, dtype=dtype, **given)
        (point,) = drafted.at([budget_bytes])
    except (AttributeError, FinepageError) as error:
        logger.info("nothing is known of a draft of %s: %s", type(module).__name__, error)
        return False
    return point is not None and point.gain(PRIOR_ACCEPTANCE) >= 1.1


@dataclass(frozen=True, slots=True)
class Drafted:
    """A model and its draft, to be planned under many budgets.

    Attributes:
        model: A decode step of the model.
        check: A pass of it that checks the longest draft.
        draft: One of the draft.
        profile: The machine.
        vocabulary: Tokens that the model knows.
        is_stand_in: The draft is the model with its layers packed.
    """

    model: CapturedModel
    check: CapturedModel
    draft: CapturedModel
    profile: HardwareProfile
    vocabulary: int
    is_stand_in: bool = False

    def at(self, budgets: Iterable[int]) -> Iterator[DraftedPoint | None]:
        """Plan under each budget; None where there is no room for the draft."""
        draft_ns, model_ns = (
            plan_resident(c, self.profile).figures.predicted_ns for c in (self.draft, self.model)
        )
        planned = partial(plan_captured, profile=self.profile)
        for budget_bytes in budgets:
            most, logits_bytes = longest_draft(self.vocabulary, budget_bytes)
            plain = planned(self.model, budget_bytes=budget_bytes).figures
            try:
                shared_bytes, own_bytes = self._divided(budget_bytes)
                beside = own_bytes + logits_bytes + self._table_bytes
                found = planned(self.check, budget_bytes=budget_bytes - beside).figures
            except PlanInfeasibleError:
                yield None
                continue
            weight_bytes, kv_bytes = self.model.graph.weight_bytes, self.model.kv_bytes
            share, room_bytes = shared_bytes / weight_bytes, budget_bytes - shared_bytes - own_bytes
            step_ns = share * model_ns + (1 - share) * draft_ns
            if self.is_stand_in and competes(kv_bytes, weight_bytes, room_bytes, share=FULL_SHARE):
                step_ns += kv_bytes / self.profile.h2d_bytes_per_s * NS_PER_S
            yield DraftedPoint(
                budget_bytes=budget_bytes,
                draft_bytes=shared_bytes + own_bytes,
                shared_bytes=shared_bytes,
                most=most,
                step_ns=round(step_ns),
                pass_ns=found.predicted_ns,
                plain_ns=plain.predicted_ns,
                reloaded_bytes=found.reloaded_bytes,
                plain_reloaded_bytes=plain.reloaded_bytes,
            )

    def _divided(self, budget_bytes: int) -> tuple[int, int]:
        """Return the bytes that the draft shares with the model, and those that only it has."""
        graph, draft = self.model.graph, self.draft.graph
        if not self.is_stand_in:
            return 0, draft.weight_bytes + self.draft.kv_bytes
        kept = {b.name for b in draft.buffers if b.kind is BufferKind.WEIGHT}
        weights = [b for b in graph.buffers if b.kind is BufferKind.WEIGHT]
        layers = {b.name: b.nbytes for b in weights if b.name not in kept}
        layers_bytes = sum(layers.values())
        other_bytes = graph.weight_bytes - layers_bytes
        copies_bytes = draft.weight_bytes - other_bytes
        num_matrices = {name: e.num_matrices for name, e in graph.experts_by_name.items()}
        room_bytes = room_to_share(
            draft.weight_bytes,
            largest_bytes=max(n // num_matrices.get(name, 1) for name, n in layers.items()),
            cache_bytes=self.model.kv_bytes,
            vocabulary=self.vocabulary,
            budget_bytes=budget_bytes,
        )
        share = min(1.0, room_bytes / (layers_bytes - copies_bytes))
        return other_bytes + int(share * layers_bytes), int((1 - share) * copies_bytes)

    @property
    def _table_bytes(self) -> int:
        """Bytes of tables that a pass reads by rows, and that a stand-in has on the device."""
        if not self.is_stand_in:
            return 0
        whole, rows = (
            self.model.needs_if(cuts_weights=False, looks_up_rows=by_rows).needed_budget_bytes
            for by_rows in (False, True)
        )
        return whole - rows


def draft_table(title: str, points: Sequence[DraftedPoint], acceptances: Sequence[float]) -> Table:
    """Return the figures for the terminal, a line for each budget.

    Args:
        title: Stands above.
        points: The figures.
        acceptances: Chances of a drafted token.
    """
    columns: list[tuple[str, Callable[[DraftedPoint], str]]] = [
        ("budget", lambda p: format_bytes(p.budget_bytes)),
        ("draft", lambda p: format_bytes(p.draft_bytes)),
        ("the model's", lambda p: format_bytes(p.shared_bytes)),
        ("a step", lambda p: format_ns(p.step_ns)),
        ("a pass", lambda p: format_ns(p.pass_ns)),
        ("reloaded a pass", lambda p: format_bytes(p.reloaded_bytes)),
        ("tok/s alone", lambda p: f"{NS_PER_S / p.plain_ns:.2f}"),
        *((f"at {a:g}", partial(_speed, a)) for a in acceptances),
    ]
    return table_of(title, columns, points, is_narrow=True)


def _speed(acceptance: float, point: DraftedPoint) -> str:
    return f"{point.tokens_per_s(acceptance):.2f} ({point.length(acceptance)})"
