"""``serve --continuous-batching``: several clients share each pass of an attached model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finepage.errors import CaptureError, FinepageError
from ds_finepage.runtime.handle import handle_in
from ds_finepage.serving.worth import Room
from tests.commands import Cli
from tests.integration.cli.endpoints import (
    POSITIONS,
    asked,
    asked_at_once,
    client_of,
    error_of_the_end,
    leave_one,
    num_runs,
    plain_answer,
    running,
    wait_until,
)
from tests.integration.cli.test_serve import (
    test_a_client_that_reads_slowly_holds_up_nobody,
    test_a_prompt_beyond_the_longest_context_is_refused,
    test_a_stream_ends_with_the_last_token,
)

__all__ = [
    "test_a_client_that_reads_slowly_holds_up_nobody",
    "test_a_prompt_beyond_the_longest_context_is_refused",
    "test_a_stream_ends_with_the_last_token",
]

TEXTS = ["hello", "def main(): " * 9, "one two three", "a", "hello hello"]


@pytest.fixture(scope="module")
def served(served_folder: Path) -> Iterator[SimpleNamespace]:
    """An endpoint whose clients share passes."""
    words = ("--device-budget", "150%weights", "--continuous-batching", 4)
    with running(served_folder, *words) as found:
        yield found


def test_clients_share_passes_and_get_the_tokens_of_the_model(served: Any) -> None:
    before = num_runs(served)
    assert asked_at_once(served, TEXTS) == {text: plain_answer(served, text) for text in TEXTS}
    assert num_runs(served) - before < 8 * len(TEXTS)
    stats = handle_in(served.model).stats
    assert stats.reloaded_bytes and not stats.unplanned_reasons


def test_a_generation_ends_with_the_longest_context(served: Any) -> None:
    with client_of(served) as client:
        found = client.completions.create(
            model=served.name, prompt="hello", temperature=0, max_tokens=10_000
        )
    assert found.usage.total_tokens <= POSITIONS + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_ends_when_its_client_goes(served: Any, stream: bool) -> None:
    before = num_runs(served)
    leave_one(served, stream=stream)
    batches = batches_of(served)
    wait_until(lambda: not batches.scheduler.has_pending_requests())
    assert num_runs(served) - before < 100


def test_passes_begin_again_behind_an_error(served: Any) -> None:
    batches = batches_of(served)
    passes = batches._cb
    passes.stop(hard_stop=True)
    passes.background_thread_status.record_fatal_error(RuntimeError("a pass has failed"))
    assert asked(served, "hello").choices[0].message.content == plain_answer(served, "hello")


def test_a_signal_lets_a_generation_end_with_an_error(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last test here that asks, since the endpoint ends."""
    batches = batches_of(served)
    assert error_of_the_end(served, monkeypatch).status_code == 503
    with pytest.raises(FinepageError, match="ended before the last token"):
        batches.init_cb(served.model, served.model.generation_config)


def batches_of(served: Any) -> Any:
    return served.server._end.function.__self__


# What is refused.


def test_what_is_not_predicted_is_refused(
    served_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise CaptureError("its forward is unknown")

    monkeypatch.setattr("ds_finepage.serving.worth.worth_of", unknown)
    given = (served_folder, "--port", 0, "--device", "cpu", "--continuous-batching")
    cli.of("serve").refuses(*given, says="needs a prediction: its forward is unknown")


def test_passes_without_room_are_refused_with_both_numbers(
    served_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)  # one that is served ends
    room = Room(POSITIONS, clients=4, cached=1 << 16, tokens_a_pass=64)
    predicted = ({"weights_bytes": 1, "budget_bytes": 2}, room)
    monkeypatch.setattr("ds_finepage.serving.worth.worth_of", lambda *_, **__: predicted)
    given = (served_folder, "--port", 0, "--device", "cpu", "--device-budget", "4MiB")
    numbers = ["cannot share passes", "min_budget_bytes", f"device_budget is {4 << 20}"]
    found = cli("serve", *given, "--continuous-batching", status=2)  # transformers logs a traceback
    assert all(each in found.err for each in numbers)


def test_a_model_that_cannot_share_is_refused(
    served_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)  # one that is served ends
    monkeypatch.setattr(
        "transformers.cli.serving.utils.GenerationState.use_continuous_batching", lambda *_: False
    )
    given = (served_folder, "--port", 0, "--device", "cpu", "--device-budget", "64MiB")
    refused = "no --continuous-batching of a LlamaForCausalLM"
    cli.of("serve").refuses(*given, "--continuous-batching", says=refused)
