"""transformers' two ways of generating, within the longest context and while the client is there.

Sequences take turns (:class:`Generations`), or several clients share each pass (:class:`Batches`).
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

from ds_finepage._compat.torch import dynamo_config
from ds_finepage.errors import ConfigError, FinepageError, PlanInfeasibleError
from ds_finepage.serving.worth import PAGE, Room, warm_lengths

USUAL_NEW = 1024
"""Tokens that transformers makes room for where a request does not say how many."""

gone: ContextVar[asyncio.Event] = ContextVar("finepage_gone")
"""Set when the client of the request has gone; a request of our own has none."""

HAS_ENDED = "the endpoint has ended before the last token"


class Generations(GenerateManager):
    """Generates one sequence at a time.

    Attributes:
        longest: Tokens of the longest context.
        is_over: Set when the endpoint ends; generations end with an error then.
    """

    def __init__(self, longest: int) -> None:
        """Generate nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest, self.is_over = longest, threading.Event()
        # Else Dynamo traces the first prompt for its length alone. The setting is the thread's.
        self.submit(setattr, dynamo_config, "assume_static_by_default", False)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        """Begin a generation, and return what its tokens come through."""
        return super().generate_streaming(model, processor, self._within(inputs), *args, **kw)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        """Return the text of a generation, and its tokens."""
        inputs = self._within(inputs)
        return await super().generate_non_streaming(model, processor, inputs, *args, **kw)

    def end(self) -> None:
        """End what is generated now, with an error."""
        self.is_over.set()

    def warm_up(self, model: Any, processor: Any) -> Iterator[int]:
        """Capture and plan prompts of all lengths, as requests do, in the thread of the requests.

        Yields:
            The length of each prompt that is done. One that has no room, though it was predicted
            to have some, is left out.

        Raises:
            PlanInfeasibleError: Not even the shortest one has room.
        """
        settings = copy.deepcopy(model.generation_config)
        settings.do_sample = False
        for length in (lengths := warm_lengths(self.longest)):
            ids = torch.ones((1, length - 2), dtype=torch.long)  # a token and a step follow
            settings.max_new_tokens = min(USUAL_NEW, self.longest - length + 2)
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            inputs["stopping_criteria"] = [lambda ids, *_, n=length, **__: ids.shape[1] >= n]
            given = (model, processor, inputs, settings)
            try:
                asyncio.run(self.generate_non_streaming(*given, request_id="warm-up"))
            except PlanInfeasibleError:
                if length == lengths[-1]:
                    raise
            else:
                yield length

    def _within(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a generation that ends when its client has gone.

        Raises:
            ConfigError: The prompt is longer than the longest context.
        """
        refuse_longer(inputs["input_ids"].shape[-1], self.longest)
        client = gone.get(asyncio.Event())

        def has_gone(*_: Any, **__: Any) -> bool:
            if self.is_over.is_set():
                raise FinepageError(HAS_ENDED)
            return client.is_set()

        return {"stopping_criteria": [has_gone], **inputs}


class Batches(CBGenerateManager):
    """Generates a token for each of several clients in a pass: continuous batching.

    Attributes:
        room: What a pass, and the paged KV cache, have room for.
    """

    def __init__(self, room: Room) -> None:
        """Generate nothing yet."""
        self.room, self._is_over, self._ending = room, False, threading.Lock()
        config = ContinuousBatchingConfig(
            num_blocks=room.cached // PAGE,
            max_batch_tokens=room.tokens_a_pass,
            max_requests_per_batch=room.clients,
            page_size=PAGE,
        )
        super().__init__(config)

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Begin with the first request, and again if the passes have ended with an error.

        Raises:
            FinepageError: The endpoint has ended.
        """
        if self._is_over:
            raise FinepageError(HAS_ENDED)
        if not self.is_alive():
            self._cb = None
        super().init_cb(model, gen_config)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kw: Any
    ) -> Any:
        """Begin a generation, and return what its tokens come through."""
        settings = self._within(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, settings, *args, **kw)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Return the text of a generation, and its tokens; none if the client has gone."""
        given = (model, processor, inputs, self._within(inputs, gen_config), request_id)
        passes: Any = self._cb
        answer = asyncio.ensure_future(super().generate_non_streaming(*given))
        left = asyncio.ensure_future(gone.get(asyncio.Event()).wait())
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not answer.done():
            answer.cancel()
            passes.cancel_request(request_id)
            return "", len(inputs["input_ids"]), []
        try:
            return answer.result()
        except RuntimeError as error:
            raise FinepageError(HAS_ENDED if self._is_over else str(error)) from error

    def end(self) -> None:
        """End what is generated now, with an error, and wait for the end of the pass."""
        self._is_over = True
        with self._ending:
            passes, self._cb = self._cb, None
            if passes is not None:
                passes.stop(hard_stop=True)

    def warm_up(self, model: Any, processor: Any) -> Iterator[int]:
        """Capture and plan passes of all sizes: first the largest, which fill the cache.

        Yields:
            The length of the prompts that are done; the first ones came together.

        Raises:
            ConfigError: A pass has no room, or the model has no such passes.
        """
        settings = copy.deepcopy(model.generation_config)
        settings.do_sample, settings.max_new_tokens, settings.eos_token_id = False, 2, -1
        each = min(self.room.longest, max(1, self.room.cached // self.room.clients - 2))

        async def ask(num_clients: int, length: int) -> None:
            given = [[n + 1] * length for n in range(num_clients)]  # they share no prefix
            answer = partial(self.generate_non_streaming, model, processor)
            asked = (answer({"input_ids": ids}, settings, f"warm-up-{ids[0]}") for ids in given)
            answers = await asyncio.gather(*asked, return_exceptions=True)  # the thread tells all
            for error in (each for each in answers if isinstance(each, Exception)):
                raise ConfigError(f"serve: clients cannot share passes: {error}") from error

        self.init_cb(model, settings)
        asyncio.run(ask(self.room.clients, each))
        yield each
        for length in warm_lengths(self.room.tokens_a_pass):
            asyncio.run(ask(1, length - 2))
            yield length - 2
        self.stop()
        self._cb = None  # as in transformers, the first request says how tokens are drawn

    def _within(self, inputs: Mapping[str, Any], gen_config: Any) -> Any:
        """Return settings of a generation that the cache has room for.

        Raises:
            ConfigError: The prompt is longer than the longest context.
        """
        num_tokens = len(inputs["input_ids"])
        refuse_longer(num_tokens, self.room.longest)
        found = copy.copy(gen_config)
        found.max_new_tokens = min(gen_config.max_new_tokens, self.room.longest + 1 - num_tokens)
        return found


def refuse_longer(num_tokens: int, longest: int) -> None:
    """Refuse a prompt that is longer than the longest context.

    Raises:
        ConfigError: It is.
    """
    if num_tokens > longest:
        raise ConfigError(
            f"the prompt has {num_tokens} tokens, and the longest context has {longest}. "
            f"Shorten it; a larger --device-budget allows more where the model does."
        )
