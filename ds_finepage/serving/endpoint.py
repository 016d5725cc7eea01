"""transformers' serving stack around one attached model.

The handlers, the streaming and the routes are transformers'. Ours are: the model is attached, a
request that has no room is refused, and a generation ends when its client has gone.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, FinepageError, PlanInfeasibleError
from ds_finepage.runtime.stats import Stats
from ds_finepage.serving.worth import warm_lengths

SECONDS_TO_END = 2
"""Generations that run when a signal comes have so long."""

USUAL_NEW = 1024
"""Tokens that transformers makes room for where a request does not say how many."""

NEVER = threading.Event()

_gone: ContextVar[threading.Event] = ContextVar("finepage_gone", default=NEVER)
"""Set when the client of the request has gone."""


class AttachedModel(ModelManager):
    """Loads one model and attaches it; no request takes its place or ends it.

    Attributes:
        model: The model.
        processor: Its tokenizer, or what has one.
        handle: Its handle.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        """Load a model, and attach it with these settings of :func:`ds_finepage.attach`.

        Raises:
            ConfigError: transformers cannot load it, or it has no tokenizer or generates nothing.
        """
        try:
            super().__init__(device="cpu", force_model=name)
        except (AttributeError, OSError, TypeError, ValueError) as error:
            raise ConfigError(f"serve: transformers cannot serve {name!r}: {error}") from None
        (loaded,) = self.loaded_models.values()
        self.model, self.processor = loaded.model, loaded.processor
        if not self.model.can_generate():
            kind = type(self.model).__name__
            raise ConfigError(f"serve: {name!r} is a {kind}, which generates no tokens.")
        tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one
            raise ConfigError(f"serve: {name!r} has no tokenizer.")
        self.handle = attach(self.model, **settings)

    def shutdown(self) -> None:
        """Keep the model: one that is loaded again would not be attached."""


class Generations(GenerateManager):
    """Generates as transformers does, within the longest context and while the client is there.

    Attributes:
        longest: Tokens of the longest context.
        is_over: Set when the endpoint ends; generations end with an error then.
    """

    def __init__(self, longest: int) -> None:
        """Generate nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest, self.is_over = longest, threading.Event()

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

    def _within(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a generation that ends when its client has gone.

        Raises:
            ConfigError: The prompt is longer than the longest context.
        """
        num_tokens = inputs["input_ids"].shape[-1]
        if num_tokens > self.longest:
            raise ConfigError(
                f"the prompt has {num_tokens} tokens, and the longest context has {self.longest}. "
                f"Shorten it; a larger --device-budget allows more where the model does."
            )
        gone = _gone.get()

        def has_gone(*_: Any, **__: Any) -> bool:
            if self.is_over.is_set():
                raise FinepageError("the endpoint has ended before the last token")
            return gone.is_set()

        return {"stopping_criteria": [has_gone], **inputs}


class _WatchClients:
    """Notes when the client of a request goes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone, messages = threading.Event(), asyncio.Queue[Any]()
        _gone.set(gone)

        async def listen() -> None:
            while not gone.is_set():
                message = await receive()
                if message["type"] == "http.disconnect":
                    gone.set()
                messages.put_nowait(message)

        listening = asyncio.create_task(listen())
        try:
            await self._app(scope, messages.get, send)
        finally:
            listening.cancel()


class Server(uvicorn.Server):
    """Runs the endpoint until a signal comes, and lets running generations end."""

    def __init__(self, app: FastAPI, generations: Generations) -> None:
        """Serve an application."""
        limit = SECONDS_TO_END + 1
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=limit))
        self._end = threading.Timer(SECONDS_TO_END, generations.is_over.set)
        self._end.daemon = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to end, at the first signal."""
        if not self.should_exit:
            self._end.start()
        super().handle_exit(sig, frame)


def app_of(served: AttachedModel, generations: Generations) -> FastAPI:
    """Return the application that answers requests to an attached model."""
    state: Any = GenerationState()
    state.get_manager = lambda *_, **__: generations
    given: dict[str, Any] = {"model_manager": served, "generation_state": state}
    app: FastAPI = build_server(
        chat_handler=ChatCompletionHandler(**given),
        completion_handler=CompletionHandler(**given),
        response_handler=ResponseHandler(**given),
        transcription_handler=TranscriptionHandler(**given),
        systemone_handler=SystemOneHandler(**given),
        **given,
    )

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        is_request = isinstance(error, ConfigError | PlanInfeasibleError)
        content = {"error": {"message": str(error), "type": type(error).__name__}}
        return JSONResponse(content, status_code=400 if is_request else 503)

    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(served.handle.stats))

    app.add_exception_handler(FinepageError, refuse)
    app.add_api_route("/metrics", metrics)
    app.add_middleware(_WatchClients)
    return app


def metrics_text(stats: Stats) -> str:
    """Return the counters of a model in the text format of Prometheus."""
    numbers = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return "".join(f"ds_finepage_{n} {v}\n" for n, v in numbers.items() if isinstance(v, int))


def warm_up(served: AttachedModel, generations: Generations) -> Iterator[int]:
    """Capture and plan prompts of all lengths, as requests do, in the thread that generates later.

    Yields:
        The length of each prompt that is done. One that has no room, though it was predicted to
        have some, is left out.

    Raises:
        PlanInfeasibleError: Not even the shortest one has room.
    """
    settings = copy.deepcopy(served.model.generation_config)
    settings.do_sample = False
    for length in (lengths := warm_lengths(generations.longest)):
        ids = torch.ones((1, length - 2), dtype=torch.long)  # behind them come a token and a step
        settings.max_new_tokens = min(USUAL_NEW, generations.longest - length + 2)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["stopping_criteria"] = [lambda ids, *_, n=length, **__: ids.shape[1] >= n]
        given = (served.model, served.processor, inputs, settings)
        try:
            asyncio.run(generations.generate_non_streaming(*given, request_id="warm-up"))
        except PlanInfeasibleError:
            if length == lengths[-1]:
                raise
        else:
            yield length
