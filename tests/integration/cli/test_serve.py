"""``serve`` and ``chat``: transformers' endpoint around an attached model."""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import transformers as hf

from ds_finepage.cli import make_parser, serve
from ds_finepage.errors import CaptureError
from ds_finepage.runtime.handle import handle_in
from tests.commands import Cli
from tests.integration.families import make_model
from tests.integration.vocabularies import byte_pairs

pytest.importorskip("transformers.cli.serving.systemone")  # transformers 5.24

POSITIONS = 128
BUDGET = "70%weights"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ tools | tojson if tools }}<assistant>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer."""
    found = tmp_path_factory.mktemp("served")
    tokenizer = byte_pairs()
    tokenizer.chat_template = TEMPLATE
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    make_model("llama", num_hidden_layers=2, **sizes).save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


def options(*words: object) -> argparse.Namespace:
    return make_parser(["serve"]).parse_args(["serve", *map(str, words), "--device", "cpu"])


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[SimpleNamespace]:
    """An endpoint that runs: its address, its server, its model and the name of that."""
    torch._dynamo.reset()
    found: queue.Queue[Any] = queue.Queue()
    listening = serve.listen("localhost", 0)

    def go(server: Any) -> None:
        found.put(server)
        server.run(sockets=[listening])

    given = options(folder, "--device-budget", BUDGET)
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
    return client_of(served).chat.completions.create(messages=messages, **given)


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


def fetched(served: Any, method: str, path: str) -> str:
    with closing(http.client.HTTPConnection("localhost", served.port)) as client:
        client.request(method, path)
        return client.getresponse().read().decode()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_answers_are_those_of_the_model(served: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = handle_in(served.model).stats
    texts = ["hello", "def main(): " * 9, "one two three"]
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        found[text] = asked(served, text).choices[0].message.content

    clients = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert found == {text: plain_answer(served, text) for text in texts}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    answer = asked(served, "add", tools=tools).choices[0].message.content
    assert answer == plain_answer(served, "add", tools=tools)
    after = handle_in(served.model).stats
    assert after.num_captures == before.num_captures  # each kind of call was warm
    assert after.reloaded_bytes > before.reloaded_bytes and not after.unplanned_reasons
    lines = [line for line in capfd.readouterr().err.splitlines() if "[transformers]" not in line]
    assert lines == []


def test_a_stream_ends_with_the_last_token(served: Any) -> None:
    chunks = list(asked(served, "hello", stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text and plain_answer(served, "hello").startswith(text)  # half a letter is not sent
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_longest_context_is_refused(served: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=f"longest context has {POSITIONS}"):
        asked(served, "x " * POSITIONS, stream=stream)


def test_a_request_without_room_is_refused_with_both_numbers(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = handle_in(served.model)
    budget = handle.stats.budget_bytes
    handle.replan(budget_bytes=handle.stats.min_budget_bytes // 4)
    with pytest.raises(openai.BadRequestError, match="min_budget_bytes .* device_budget is"):
        asked(served, "hello")
    handle.replan(budget_bytes=budget)
    assert asked(served, "hello").choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_ends_when_its_client_goes(served: Any, stream: bool) -> None:
    def num_runs() -> int:
        return sum(p.num_runs for p in handle_in(served.model).stats.passes)

    before = num_runs()
    body = {"model": served.name, "messages": [{"role": "user", "content": "hi"}]}
    body |= {"max_tokens": 100, "temperature": 0, "stream": stream}
    client = http.client.HTTPConnection("localhost", served.port)
    kind = {"Content-Type": "application/json"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), kind)
    wait_until(lambda: num_runs() > before + 2)
    client.close()
    assert asked(served, "hello").choices[0].message.content  # waits for its turn
    assert num_runs() - before < 100


def test_metrics_have_the_counters(served: Any) -> None:
    text = fetched(served, "GET", "/metrics")
    budget = handle_in(served.model).stats.budget_bytes
    assert f"ds_finepage_budget_bytes {budget}" in text.splitlines()
    assert "unplanned_reasons" not in text


def test_the_model_stays(served: Any) -> None:
    assert "ok" in fetched(served, "POST", "/reset")
    before = handle_in(served.model).stats.reloaded_bytes
    assert asked(served, "hello").choices
    assert handle_in(served.model).stats.reloaded_bytes > before


def test_a_signal_lets_a_generation_end_with_an_error(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last test here, since the endpoint ends."""
    monkeypatch.setattr(served.server, "_end", threading.Timer(0, served.server._end.function))
    errors = []

    def ask() -> None:
        try:
            asked(served, "hello", max_tokens=100)
        except openai.InternalServerError as error:
            errors.append(error)

    stats = handle_in(served.model).stats
    client = threading.Thread(target=ask)
    client.start()
    wait_until(lambda: handle_in(served.model).stats.reloaded_bytes > stats.reloaded_bytes)
    served.server.handle_exit(signal.SIGTERM, None)
    client.join()
    (error,) = errors
    assert error.status_code == 503 and "ended before the last token" in str(error)


# What is refused.


def test_what_cannot_be_served_is_refused(
    folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)  # one that is served ends
    refuses = cli.of("serve").refuses
    any_port = ("--port", 0)  # the usual one may be taken
    refuses(tmp_path / "nothing", *any_port, says="cannot be read")
    refuses(folder, "--port", 70_000, says="--port 70000 is no port")
    tiny = ("--device", "cpu", "--device-budget", "1KiB", *any_port)
    refuses(folder, *tiny, says="device_budget is 1024")
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        refuses(folder, "--port", port, says=f"cannot listen at localhost, port {port}")
    make_model("qwen2", num_hidden_layers=1).save_pretrained(tmp_path)
    ample = ("--device", "cpu", "--device-budget", "64MiB", *any_port)
    refuses(tmp_path, *ample, says="has no tokenizer")
    encoder = hf.BertConfig(
        vocab_size=400, hidden_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    hf.BertModel(encoder).save_pretrained(tmp_path)
    byte_pairs().save_pretrained(tmp_path)
    refuses(tmp_path, *ample, says="is a BertModel, which generates no tokens")


def test_a_missing_package_is_named(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ds_finepage.serving.endpoint", None)
    monkeypatch.delattr("ds_finepage.serving.endpoint")
    cli.of("serve").refuses(folder, "--port", 0, says="pip install 'ds_finepage[serve]'")


def test_an_address_of_others_is_said(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    serve.listen("127.0.0.1", 0).close()
    assert capsys.readouterr().err == ""
    with serve.listen("0.0.0.0", 0) as listening:
        assert serve.url_of(listening).startswith("http://0.0.0.0:")
    assert "other machines can reach it" in capsys.readouterr().err


def test_chat_is_transformers_own(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def talk(model: str, url: str) -> None:
        served = SimpleNamespace(url=url, name=model)
        said.append(asked(served, "hello").choices[0].message.content)
        raise EOFError  # as at the end of the input

    def unknown(*_: Any, **__: Any) -> None:
        raise CaptureError("its forward is unknown")

    monkeypatch.setattr("transformers.cli.chat.Chat", talk)
    monkeypatch.setattr("ds_finepage.serving.worth.worth_of", unknown)
    found = cli("chat", folder, "--device", "cpu", "--device-budget", BUDGET)
    assert "nothing is predicted: its forward is unknown" in found.err
    assert said == [plain_answer(SimpleNamespace(name=str(folder)), "hello")]
