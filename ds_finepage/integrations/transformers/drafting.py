"""Lets a draft that runs under the model's budget take part in transformers' assisted generation.

transformers calls ``generate`` of the draft once a round, and checks what it returns. So all that a
round decides happens here: how many tokens are drafted (``price``), and in which KV cache. A
stand-in writes its rows behind those of the model, in the model's own cache, and takes them back at
the end; the pass that checks the tokens writes the model's rows there.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ds_finepage._compat.transformers import CACHE_NAMES, cache_name, given_cache
from ds_finepage.integrations.transformers.preflight import setting_of
from ds_finepage.integrations.transformers.price import LENGTHS, Price
from ds_finepage.integrations.transformers.replaced import ReplacedMethod

logger = logging.getLogger(__name__)

OTHER_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "custom_generate")
"""Settings of ``generate`` that bring a draft, or a loop, of their own."""


def why_not(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why transformers cannot assist a call of ``generate``; None where it can."""
    inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if not isinstance(inputs, torch.Tensor) or inputs.dim() != 2:
        return "its prompt is no table of tokens"
    if inputs.shape[0] != 1:
        return f"it has {inputs.shape[0]} sequences, and transformers assists one"
    for name in ("num_beams", "num_return_sequences"):
        if (setting_of(module, args, kwargs, name) or 1) > 1:
            return f"{name} is above 1"
    if not setting_of(module, args, kwargs, "use_cache"):
        return "it has no KV cache"
    if given_cache(kwargs) is not None:
        return "it goes on with a KV cache, which transformers' assistance reads wrongly"
    if setting_of(module, args, kwargs, "cache_implementation") is not None:
        return "its KV cache cannot be cropped"
    for name in OTHER_DRAFTS:
        if setting_of(module, args, kwargs, name):
            return f"it has {name}"
    return None


def is_assisted(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether tokens of a call of ``generate`` are drafted."""
    names = ("assistant_model", *OTHER_DRAFTS)
    return any(setting_of(module, args, kwargs, name) for name in names)


NUM_COPIES = 6
"""Tables of logits in float32 that transformers makes, with a row for each checked token: the
draft's scores, one by one and together, and their chances; the model's, a copy, and theirs."""

LOGITS_SHARE = 16
"""Of a budget, one part in so many is what these tables may take."""


def longest_draft(vocabulary: int, budget_bytes: int) -> tuple[int, int]:
    """Return the most tokens to draft so that these tables are a small part of a budget.

    Returns:
        The tokens, and the bytes of the tables.
    """
    row_bytes = 4 * NUM_COPIES * vocabulary
    num_rows = budget_bytes // LOGITS_SHARE // row_bytes
    most = max(k for k in LENGTHS if k <= max(1, num_rows - 1))
    return most, (most + 1) * row_bytes


class _Sequence(threading.local):
    """The state of the sequence that a thread generates.

    Attributes:
        cache: Refers weakly to the KV cache of the model's last pass.
        num_tokens: Tokens that the last round began with.
        num_drafted: Those that it drafted.
        left_ns: When it was handed over; None before the first round.
        num_plans: Plans that were made by then.
        num_rounds: Rounds so far.
    """

    cache: Any = None
    num_tokens = 0
    num_drafted = 0
    left_ns: int | None = None
    num_plans = 0
    num_rounds = 0


class DraftGeneration(ReplacedMethod):
    """``generate`` of a draft, once a round.

    Attributes:
        price: What was seen of the draft.
        give_up: Called where the draft does not pay, once.
        num_plans: Returns how many plans were made so far.
        vocabulary: Tokens that the draft knows.
    """

    def __init__(self, module: Any, *, is_stand_in: bool) -> None:
        super().__init__(module, "generate")
        self.price = Price()
        self.give_up: Callable[[], None] | None = None
        self.num_plans: Callable[[], int] = lambda: 0
        self._is_stand_in = is_stand_in
        self._sequence = _Sequence()
        self._has_failed = False
        self._is_first = True
        self.vocabulary: int = module.config.get_text_config().vocab_size

    def begin(self) -> None:
        """Begin a sequence, or forget the last one."""
        vars(self._sequence).clear()

    def see_pass(self, kwargs: Mapping[str, Any]) -> None:
        """See a call of the model."""
        cache = given_cache(kwargs)
        self._sequence.cache = None if cache is None else weakref.ref(cache)

    @property
    def _model_cache(self) -> Any:
        return None if self._sequence.cache is None else self._sequence.cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draft some tokens, or none where that does not pay.

        The first sequence has one round without a draft, behind its prompt. transformers drafts
        nothing for the last token of a sequence: so the pass for it is planned by then.

        A call that is no round of transformers' assistance is left alone.
        """
        is_round = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if not is_round or "input_ids" not in kwargs:
            return self._original(*args, **kwargs)
        sequence, ids = self._sequence, kwargs["input_ids"]
        sequence.num_rounds += 1
        self._note(ids.shape[1])
        # At the end of a generation too, or each number of rows would be planned.
        most = min(kwargs["max_new_tokens"], self.price.length())
        length = max(length for length in LENGTHS if length <= most)
        if self._is_stand_in and self._model_cache is None:
            length = 0  # before the model's first pass there are no rows
        elif self._is_first and sequence.num_rounds == 2:
            self._is_first, length = False, 0
        if self.give_up is not None and self.price.has_lost:
            self.give_up()
            self.give_up = None
            self.price.most = length = 0
        sequence.num_drafted, sequence.num_tokens = 0, ids.shape[1]
        begin_ns, num_plans = time.perf_counter_ns(), self.num_plans()
        found = self._drafted(kwargs, length) if length else None
        sequence.left_ns, sequence.num_plans = time.perf_counter_ns(), self.num_plans()
        if found is None:
            return _nothing(self.vocabulary, kwargs)
        sequence.num_drafted = len(found.scores)
        if sequence.num_plans == num_plans:
            self.price.note_steps(sequence.num_drafted, sequence.left_ns - begin_ns)
        return found

    def _note(self, num_tokens: int) -> None:
        """Learn from the length of the sequence what the model made of the last round."""
        sequence = self._sequence
        if sequence.left_ns is None:
            return
        if sequence.num_plans == self.num_plans():  # planning tells nothing of later passes
            self.price.note_pass(time.perf_counter_ns() - sequence.left_ns)
        if sequence.num_drafted:
            num_accepted = num_tokens - sequence.num_tokens - 1
            self.price.note_check(
                sequence.num_drafted, min(max(num_accepted, 0), sequence.num_drafted)
            )

    def _drafted(self, kwargs: dict[str, Any], length: int) -> Any:
        """Let the draft make tokens; None where it fails."""
        least = min(kwargs.get("min_new_tokens") or 0, length)
        given = {**_with_whole_mask(kwargs), "max_new_tokens": length, "min_new_tokens": least}
        cache = self._model_cache if self._is_stand_in else None
        num_rows = 0
        if cache is not None:
            num_rows = cache.get_seq_length()
            given = {n: v for n, v in given.items() if n not in CACHE_NAMES}
            given[cache_name(self._module.forward)] = cache
        try:
            found = self._original(**given)
        except Exception as error:
            if not self._has_failed:
                logger.warning("the draft has failed, so the model goes on without it: %s", error)
            self._has_failed = True
            return None
        finally:
            if cache is not None and (num_new := cache.get_seq_length() - num_rows):
                cache.crop(-num_new)
        return found if cache is None else _output(found.sequences, found.scores, None)


def _nothing(vocabulary: int, kwargs: Mapping[str, Any]) -> Any:
    """Return no token; where transformers samples it needs one, so the last one with all chance."""
    ids: torch.Tensor = kwargs["input_ids"]
    scores = torch.full((1, vocabulary), -torch.inf, device=ids.device)
    scores[0, ids[0, -1]] = 0.0
    if kwargs["generation_config"].do_sample:
        ids = torch.cat([ids, ids[:, -1:]], dim=1)
    return _output(ids, (scores,), given_cache(kwargs))


def _output(sequences: torch.Tensor, scores: tuple[torch.Tensor, ...], cache: Any) -> Any:
    caches = dict.fromkeys(CACHE_NAMES, cache)
    return SimpleNamespace(sequences=sequences, scores=scores, **caches)


def _with_whole_mask(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a mask as long as the sequence.

    transformers makes it longer only where the draft had a KV cache of its own in the last round.
    """
    given = {n: v for n, v in kwargs.items() if n not in ("position_ids", "token_type_ids")}
    mask = given.get("attention_mask")
    if mask is not None and (more := kwargs["input_ids"].shape[1] - mask.shape[1]) > 0:
        given["attention_mask"] = torch.cat([mask, mask.new_ones((1, more))], dim=1)
    return given


def own_settings(module: Any) -> Any:
    """Return the settings of a draft: as many tokens as a round may have, whatever it thinks."""
    config = copy.deepcopy(module.generation_config)
    config.num_assistant_tokens = max(LENGTHS)
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return config
