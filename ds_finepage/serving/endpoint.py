"""transformers' serving stack around one attached model.

The handlers, the streaming and the routes are transformers'. Ours are: the model is attached, a
request that has no room is refused, and a generation ends when its client has gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

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
from transformers.cli.serving.utils import GenerationState

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, FinepageError, PlanInfeasibleError
from ds_finepage.runtime.stats import Stats
from ds_finepage.serving.generations import Batches, Generations, gone

SECONDS_TO_END = 1
"""Generations that run when a signal comes have so long."""


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


class _WatchClients:
    """Notes when the client of a request goes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client, messages = asyncio.Event(), asyncio.Queue[Any]()
        gone.set(client)

        async def listen() -> None:
            while not client.is_set():
                message = await receive()
                if message["type"] == "http.disconnect":
                    client.set()
                messages.put_nowait(message)

        listening = asyncio.create_task(listen())
        try:
            await self._app(scope, messages.get, send)
        finally:
            listening.cancel()


class Server(uvicorn.Server):
    """Runs the endpoint until a signal comes, and lets running generations end."""

    def __init__(self, app: FastAPI, end: Callable[[], None]) -> None:
        """Serve an application, whose generations end by ``end``."""
        limit = SECONDS_TO_END + 1
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=limit))
        self._end = threading.Timer(SECONDS_TO_END, end)
        self._end.daemon = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to end, at the first signal."""
        if not self.should_exit:
            self._end.start()
        super().handle_exit(sig, frame)


def app_of(served: AttachedModel, generations: Generations, batches: Batches | None) -> FastAPI:
    """Return the application that answers requests to an attached model.

    Args:
        served: Has the model.
        generations: For requests that take turns.
        batches: For those that share passes; None if all take turns.

    Raises:
        ConfigError: Requests to this model cannot share passes.
    """
    state: Any = GenerationState(continuous_batching=batches is not None)
    state.get_manager = lambda *_, use_cb=False, **__: batches if use_cb else generations
    modality = served.get_model_modality(served.model, served.processor)
    if batches is not None and not state.use_continuous_batching(served.model, modality):
        kind = type(served.model).__name__
        raise ConfigError(f"serve: transformers has no --continuous-batching of a {kind}.")
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
