"""Lets a draft run beside an attached model, and take part in its generations."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ds_finepage.errors import FinepageError, PlanInfeasibleError
from ds_finepage.execution.stores import WeightTable
from ds_finepage.integrations.transformers.drafting import longest_draft, why_not
from ds_finepage.integrations.transformers.preflight import CacheUse
from ds_finepage.integrations.transformers.price import MOST_ROOM_SHARE
from ds_finepage.runtime.attachment import Attachment
from ds_finepage.runtime.drafts import Draft
from ds_finepage.runtime.interception import PlannedCall
from ds_finepage.runtime.plan_runner import PlanRunner

if TYPE_CHECKING:
    from ds_finepage.runtime.calls import CallTaker

logger = logging.getLogger(__name__)


class Assistance:
    """The draft of a model, if it has one.

    Generations with a draft run one after the other: one of them may need another draft, or end
    the draft because it has no room.

    Attributes:
        draft: The draft.
        attachment: All that is installed in its modules.
        use_alone: How the generation of this turn would use its KV cache without a draft.
    """

    def __init__(self, calls: CallTaker, weights: WeightTable, runner: PlanRunner) -> None:
        """Begin without a draft."""
        self.draft: Draft | None = None
        self.attachment: Attachment | None = None
        self.use_alone = CacheUse()
        self._calls, self._weights, self._runner = calls, weights, runner
        self._said: set[str] = set()  # why generations ran without the draft
        self._lost: weakref.WeakSet[Any] = weakref.WeakSet()  # models that do not pay as drafts
        self._turns = threading.RLock()  # taken before the lock of a call
        self._has_turn = False

    def take(self, draft: Draft) -> None:
        """Let a draft run under the budget of the model, in the place of the one before.

        Raises:
            PlanInfeasibleError: It leaves nothing of the budget to the model.
        """
        settings = self._runner.settings
        draft.require_room(settings.budget_bytes)
        self._lost.discard(draft.model)
        with self._calls.lock:
            self.drop()
            self.draft = draft
            try:
                if self._calls.shares_weights(draft):
                    self._calls.take_weights()  # those that both have are now the draft's
                self._runner.draft_home_bytes = draft.move_to(settings.device)
                self.attachment = Attachment(
                    draft.model, self._weights, self._calls, settings.device, draft.generation
                )
            except BaseException:
                self.drop()
                raise
            if not self._calls.shares_weights(draft):
                missing_bytes = self._calls.weight_bytes + draft.nbytes - settings.budget_bytes
                if missing_bytes > 0:
                    share = min(MOST_ROOM_SHARE, draft.nbytes / missing_bytes)
                    draft.generation.price.room_share = share
                draft.generation.give_up = self._give_up
            draft.generation.num_plans = lambda: self._runner.counters.num_plans
            self._runner.live.note(draft.weights)
            draft.generation.price.most, self._runner.live.caller_bytes = longest_draft(
                draft.generation.vocabulary, settings.budget_bytes
            )

    def remove(self) -> None:
        """Give the draft its own calls back, and its weights their places."""
        draft, self.draft = self.draft, None
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None
        self._runner.live.caller_bytes = self._runner.draft_home_bytes = 0
        if draft is not None:
            self._runner.live.forget(draft.weights)
            draft.move_back()

    def drop(self) -> None:
        """Go on without the draft; the model takes back the weights that both have."""
        draft = self.draft
        if draft is not None:
            with self._calls.lock:
                self.remove()
                if self._calls.shares_weights(draft):
                    self._calls.take_weights()
                else:
                    self._runner.leave_no_room()

    def _give_up(self) -> None:
        """Give the room of a draft that does not pay to the model, amid a generation."""
        assert self.draft is not None
        logger.warning(
            "the draft %s does not pay, so the model goes on without it",
            type(self.draft.model).__name__,
        )
        with self._calls.lock:
            self._lost.add(self.draft.model)
            self._runner.live.forget(self.draft.weights)
            # transformers goes on as if a token were drafted.
            _, self._runner.live.caller_bytes = longest_draft(self.draft.generation.vocabulary, 0)
            self._runner.leave_no_room()
            self._runner.draft_home_bytes = 0
            self._runner.kv_offload.use = self.use_alone
            self.draft.move_back()

    def attachment_of(self, module: torch.nn.Module) -> Attachment | None:
        """Return the attachment of the draft for a module of it; None for any other."""
        if self.attachment is None or all(module is not e for e in self.attachment.entries):
            return None
        return self.attachment

    @contextmanager
    def turn(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Hold while a generation runs; yield its named arguments, with the draft if it assists."""
        if self.draft is None and kwargs.get("assistant_model") is None:
            yield dict(kwargs)
            return
        with self._turns:
            before, self._has_turn = self._has_turn, True
            try:
                yield self._arguments(module, args, kwargs)
            finally:
                self._has_turn = before
                if self.draft is not None and self.draft.model in self._lost:
                    self.drop()

    @contextmanager
    def between_turns(self, what: str) -> Iterator[None]:
        """Hold while no generation with a draft, and no call, runs.

        Args:
            what: Name of the function that needs it.

        Raises:
            FinepageError: This thread runs a call, or generates with a draft.
        """
        with self._calls.lock:
            self._calls.running.refuse(what)  # a hook would wait for itself
        with self._turns, self._calls.lock:
            if self._has_turn:
                raise FinepageError(
                    f"{what}() was called while the model generates with a draft, by a streamer or "
                    f"another callback. Call it when generate() has returned."
                )
            yield

    def _arguments(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        given = kwargs.get("assistant_model")
        if given is not None and given in self._lost:
            return {**kwargs, "assistant_model": None}
        if given is not None and (self.draft is None or given is not self.draft.model):
            if not self._may_take(given):
                return dict(kwargs)
            self.take(Draft(given, assists_all=False))
        if self.draft is not None and given is None and not self.draft.assists_all:
            self.drop()
        if self.draft is None:
            return dict(kwargs)
        self.draft.generation.begin()
        reason = None if given is not None else why_not(module, args, kwargs)
        if reason is None:
            return {**kwargs, "assistant_model": self.draft.model}
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("a generation runs without the draft: %s", reason)
        return dict(kwargs)

    def _may_take(self, model: torch.nn.Module) -> bool:
        """Tell whether a draft of the caller can run here; else it runs as it did without us."""
        ranks = self._runner.ranks
        is_attached = isinstance(vars(model).get("_compiled_call_impl"), PlannedCall)
        is_whole = all(parameter.numel() for parameter in model.parameters())  # not so under ZeRO
        return is_whole and not ranks.share_model and not is_attached

    def see_pass(self, module: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
        """See a call of the model or of the draft."""
        if self.draft is not None and module is not self.draft.model:
            self.draft.generation.see_pass(kwargs)

    def can_repeat(self, kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a refused generation can begin again, without the draft of the model."""
        has_own = self.draft is not None and self.draft.assists_all
        return has_own and kwargs.get("streamer") is None

    def refusal(self, error: PlanInfeasibleError) -> PlanInfeasibleError:
        """Drop the draft after an error, and return one that says what the draft took."""
        if self.draft is None:
            return error
        found = PlanInfeasibleError(
            f"{error} {self.draft.nbytes} bytes of the device are the draft's; the next "
            f"generation runs without it.",
            error.min_budget_bytes,
        )
        self.drop()
        return found
