"""Endpoints that run in a thread, and clients of theirs."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import transformers as hf

from ds_finepage.cli import make_parser, serve
from ds_finepage.runtime.handle import handle_in
from tests.integration.families import make_model
from tests.integration.vocabularies import byte_pairs

POSITIONS = 128
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ tools | tojson if tools }}<assistant>"
)


def save_model(folder: Path) -> Path:
    """Save a small model with a tokenizer."""
    tokenizer = byte_pairs()
    tokenizer.chat_template = TEMPLATE
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    make_model("llama", num_hidden_layers=2, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def options(*words: object) -> argparse.Namespace:
    return make_parser(["serve"]).parse_args(["serve", *map(str, words), "--device", "cpu"])


@contextmanager
def running(folder: Path, *words: object) -> Iterator[SimpleNamespace]:
    """Run an endpoint: its address, its server, its model and the name of that."""
    torch._dynamo.reset()
    found: queue.Queue[Any] = queue.Queue()
    listening = serve.listen("localhost", 0)

    def go(server: Any) -> None:
        found.put(server)
        server.run(sockets=[listening])

    given = options(folder, *words)
    thread = threading.Thread(target=serve.serve, args=(given, listening, go))
    thread.start()
    server = found.get(timeout=60)
    url, port = serve.url_of(listening), listening.getsockname()[1]
    yield SimpleNamespace(
        url=url, port=port, server=server, name=str(folder), model=served_model(server)
    )
    server.should_exit = True
    thread.join()
    listening.close()


def served_model(server: Any) -> Any:
    (route,) = [r for r in server.config.app.routes if getattr(r, "path", "") == "/metrics"]
    return route.endpoint.__closure__[0].cell_contents.model


def client_of(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def asked(served: Any, text: str, **settings: Any) -> Any:
    given: dict[str, Any] = {"model": served.name, "temperature": 0, "max_tokens": 8, **settings}
    messages: Any = [{"role": "user", "content": text}]
    with client_of(served) as client:
        found = client.chat.completions.create(messages=messages, **given)
        return list(found) if settings.get("stream") else found


def plain_answer(served: Any, text: str, num_new: int = 8, **settings: Any) -> str:
    """Return what transformers itself generates."""
    tokenizer = hf.AutoTokenizer.from_pretrained(served.name)
    model = hf.AutoModelForCausalLM.from_pretrained(served.name)
    messages = [{"role": "user", "content": text}]
    given = {"return_tensors": "pt", "return_dict": True, **settings}
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)
    found = model.generate(**inputs, max_new_tokens=num_new, do_sample=False)
    new = found[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def num_runs(served: Any) -> int:
    return sum(p.num_runs for p in handle_in(served.model).stats.passes)


def leave_one(served: Any, *, stream: bool) -> None:
    """Ask for a hundred tokens, and go after a few."""
    before = num_runs(served)
    body = {"model": served.name, "messages": [{"role": "user", "content": "hi"}]}
    body |= {"max_tokens": 100, "temperature": 0, "stream": stream}
    client = http.client.HTTPConnection("localhost", served.port)
    kind = {"Content-Type": "application/json"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), kind)
    wait_until(lambda: num_runs(served) > before + 2)
    client.close()


def asked_at_once(served: Any, texts: list[str]) -> dict[str, str]:
    """Return the answers to clients who ask at the same time."""
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        found[text] = asked(served, text).choices[0].message.content

    clients = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return found


def held_back(served: Any, text: str, ask_meanwhile: Callable[[], Any]) -> str:
    """Return the stream of a client that takes nothing before another one has its answer."""
    body = {"model": served.name, "messages": [{"role": "user", "content": text}], "stream": True}
    body |= {"max_tokens": 8, "temperature": 0}
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    scope |= {"headers": [(b"content-type", b"application/json")], "query_string": b""}
    given = [{"type": "http.request", "body": json.dumps(body).encode()}]
    taken: list[bytes] = []

    async def read_late() -> None:
        reads = asyncio.Event()

        async def receive() -> Any:
            return given.pop() if given else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await reads.wait()
            taken.append(message.get("body", b""))

        stream = asyncio.create_task(served.server.config.app(scope, receive, send))
        await asyncio.to_thread(ask_meanwhile)
        assert not stream.done()
        reads.set()
        await stream

    asyncio.run(read_late())
    events = (line[len("data: ") :] for line in b"".join(taken).decode().splitlines() if line)
    chunks = (json.loads(event) for event in events if event != "[DONE]")
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def error_of_the_end(served: Any, monkeypatch: pytest.MonkeyPatch) -> openai.InternalServerError:
    """Return what a client gets whose generation a signal ends."""
    monkeypatch.setattr(served.server, "_end", threading.Timer(0, served.server._end.function))
    errors = []

    def ask() -> None:
        try:
            asked(served, "hello", max_tokens=100)
        except openai.InternalServerError as error:
            errors.append(error)

    before = num_runs(served)
    client = threading.Thread(target=ask)
    client.start()
    wait_until(lambda: num_runs(served) > before)
    served.server.handle_exit(signal.SIGTERM, None)
    client.join()
    (error,) = errors
    assert "ended before the last token" in str(error)
    return error
