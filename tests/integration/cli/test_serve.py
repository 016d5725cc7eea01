"""``serve`` and ``chat``: transformers' endpoint around an attached model."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import transformers as hf

from ds_finepage.cli import serve
from ds_finepage.errors import CaptureError
from ds_finepage.runtime.handle import handle_in
from tests.commands import Cli
from tests.integration.cli.endpoints import (
    POSITIONS,
    asked,
    asked_at_once,
    error_of_the_end,
    held_back,
    leave_one,
    num_runs,
    plain_answer,
    running,
)
from tests.integration.families import SLOW_LINK, make_model
from tests.integration.vocabularies import byte_pairs

pytest.importorskip("transformers.cli.serving.systemone")  # transformers 5.24

BUDGET = "70%weights"
FAST_HOST = replace(SLOW_LINK, host_bytes_per_s=4e8, host_flops_per_s=1e12)
"""A machine whose host computes faster than its link copies."""


@pytest.fixture(scope="module")
def served(served_folder: Path) -> Iterator[SimpleNamespace]:
    """An endpoint whose clients take turns."""
    with running(served_folder, "--device-budget", BUDGET) as found:
        yield found


def fetched(served: Any, method: str, path: str) -> str:
    with closing(http.client.HTTPConnection("localhost", served.port)) as client:
        client.request(method, path)
        return client.getresponse().read().decode()


def test_answers_are_those_of_the_model(served: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = handle_in(served.model).stats
    assert before.num_captures == 2  # a prompt and a step, of any length
    texts = ["hello", "def main(): " * 9, "one two three"]
    assert asked_at_once(served, texts) == {text: plain_answer(served, text) for text in texts}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    answer = asked(served, "add", tools=tools).choices[0].message.content
    assert answer == plain_answer(served, "add", tools=tools)
    after = handle_in(served.model).stats
    assert after.num_captures == before.num_captures  # each kind of call was warm
    assert after.reloaded_bytes > before.reloaded_bytes and not after.unplanned_reasons
    lines = [line for line in capfd.readouterr().err.splitlines() if "[transformers]" not in line]
    assert lines == []


def test_a_stream_ends_with_the_last_token(served: Any) -> None:
    chunks = asked(served, "hello", stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text and plain_answer(served, "hello").startswith(text)  # half a letter is not sent
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_longest_context_is_refused(served: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=f"longest context has {POSITIONS}"):
        asked(served, "x " * POSITIONS, stream=stream)
    assert asked(served, "hello").choices


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


def test_a_client_that_reads_slowly_holds_up_nobody(served: Any) -> None:
    answers: list[Any] = []
    text = held_back(served, "hello", lambda: answers.append(asked(served, "one two three")))
    half = "\N{REPLACEMENT CHARACTER}"  # of a letter: it is not sent
    assert text == plain_answer(served, "hello").rstrip(half)
    assert answers[0].choices[0].message.content == plain_answer(served, "one two three")


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_ends_when_its_client_goes(served: Any, stream: bool) -> None:
    before = num_runs(served)
    leave_one(served, stream=stream)
    assert asked(served, "hello").choices[0].message.content  # waits for its turn
    assert num_runs(served) - before < 100


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
    assert error_of_the_end(served, monkeypatch).status_code == 503


@pytest.mark.parametrize("why", (None, "no compiler"))
def test_the_host_computes_where_it_can(
    served_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    why: str | None,
) -> None:
    monkeypatch.setattr("ds_finepage.execution.probe.probe", lambda *_, **__: SLOW_LINK)
    monkeypatch.setattr(
        "ds_finepage.execution.probe.with_measured_host", lambda *_, **__: FAST_HOST
    )
    monkeypatch.setattr("ds_finepage.execution.host_attention.why_not", lambda: why)
    budget = ("--device-budget", "50%weights")
    with running(served_folder, *budget, "--host-compute", "auto") as found:
        handle = handle_in(found.model)
        assert handle.profile.has_host == (why is None)
        assert ("read by the host" in capsys.readouterr().out) == (why is None)
        assert asked(found, "hello").choices[0].message.content == plain_answer(found, "hello")


# What is refused.


def test_what_cannot_be_served_is_refused(
    served_folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)  # one that is served ends
    refuses = cli.of("serve").refuses
    any_port = ("--port", 0)  # the usual one may be taken
    refuses(tmp_path / "nothing", *any_port, says="cannot be read")
    for words in ((0,), ("--draft", "stand-in")):
        shares = (served_folder, *any_port, "--continuous-batching", *words)
        refuses(*shares, says="takes a number from 1, and no --draft")
    refuses(served_folder, "--port", 70_000, says="--port 70000 is no port")
    tiny = ("--device", "cpu", "--device-budget", "1KiB", *any_port)
    refuses(served_folder, *tiny, says="device_budget is 1024")
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        refuses(served_folder, "--port", port, says=f"cannot listen at localhost, port {port}")
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
    served_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ds_finepage.serving.endpoint", None)
    monkeypatch.delattr("ds_finepage.serving.endpoint")
    cli.of("serve").refuses(served_folder, "--port", 0, says="pip install 'ds_finepage[serve]'")


def test_an_address_of_others_is_said(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    serve.listen("127.0.0.1", 0).close()
    assert capsys.readouterr().err == ""
    with serve.listen("0.0.0.0", 0) as listening:
        assert serve.url_of(listening).startswith("http://0.0.0.0:")
    assert "other machines can reach it" in capsys.readouterr().err


def test_chat_is_transformers_own(
    served_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def talk(model: str, url: str) -> None:
        served = SimpleNamespace(url=url, name=model)
        said.append(asked(served, "hello").choices[0].message.content)
        raise EOFError  # as at the end of the input

    def unknown(*_: Any, **__: Any) -> None:
        raise CaptureError("its forward is unknown")

    monkeypatch.setattr("transformers.cli.chat.Chat", talk)
    monkeypatch.setattr("ds_finepage.serving.worth.worth_of", unknown)
    found = cli("chat", served_folder, "--device", "cpu", "--device-budget", BUDGET)
    assert "nothing is predicted: its forward is unknown" in found.err
    assert said == [plain_answer(SimpleNamespace(name=str(served_folder)), "hello")]
