"""The files of kept traces, and where none are kept."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage._compat.traces import CAN_KEEP_TRACES
from ds_finepage.runtime import kept_traces

if not CAN_KEEP_TRACES:
    pytest.skip("traces are kept in other releases of torch", allow_module_level=True)

from ds_finepage.capture.traces import Trace

CPU = torch.device("cpu")


def trace(number: int) -> Trace:
    return Trace(b"%d" % number, None, {}, "", b"", {})


def opened(model: torch.nn.Module, captured: Callable[..., Any] | None = None) -> Any:
    calls: Any = SimpleNamespace(running=None)
    return kept_traces.open_traces(captured or model._call_impl, model, calls, CPU)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS_FINEPAGE_CACHE", str(tmp_path))
    return tmp_path


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    kept_traces._keep(tmp_path / "new", trace(1))
    (path,) = kept_traces._files_in(tmp_path / "new")
    assert path.stat().st_mode & 0o777 == 0o600
    os.utime(path, (1, 1))
    assert kept_traces._read(path) == trace(1)
    assert path.stat().st_mtime > 1  # files that are used stay


def test_the_newest_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_traces, "MAX_TRACES", 2)
    for number in range(3):
        kept_traces._keep(tmp_path, trace(number))
        newest = max(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)
        os.utime(newest, (number + 1, number + 1))
    found = [kept_traces._read(path) for path in kept_traces._files_in(tmp_path)]
    assert found == [trace(2), trace(1)]


@pytest.mark.parametrize("content", [b"", pickle.dumps(None), pickle.dumps("a trace")])
def test_what_is_no_trace_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.pickle"
    path.write_bytes(content)
    path.chmod(0o600)
    assert kept_traces._read(path) is None
    assert kept_traces._read(tmp_path / "none.pickle") is None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_read(mode: int, tmp_path: Path) -> None:
    kept_traces._keep(tmp_path, trace(1))
    (path,) = kept_traces._files_in(tmp_path)
    path.chmod(mode)
    assert kept_traces._read(path) is None


def test_a_file_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_traces._keep(tmp_path, trace(1))
    (path,) = kept_traces._files_in(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert kept_traces._read(path) is None


def test_each_model_has_a_folder_of_its_own(cache: Path) -> None:
    folders = [
        opened(model).folder
        for model in (
            torch.nn.Linear(2, 3),
            torch.nn.Linear(2, 4),
            torch.nn.Linear(2, 3).double(),
            torch.nn.Bilinear(2, 2, 3),
        )
    ]
    assert len({*folders}) == 4
    assert opened(torch.nn.Linear(2, 3)).folder == folders[0]
    assert all(cache in folder.parents for folder in folders)


def test_the_traced_function_is_found(cache: Path) -> None:
    model = torch.nn.Linear(2, 3)
    found = opened(model)
    assert found.function is torch.nn.Linear.forward and found.owner == (model,)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    found = opened(model, plain)
    assert found.function is plain and found.owner == ()
    model.forward = plain
    assert opened(model).owner == ()
    model.forward = torch.relu  # a function without bytecode
    assert opened(model) is None


def test_without_a_folder_nothing_is_kept() -> None:
    assert opened(torch.nn.Linear(2, 3)) is None  # the tests switch the cache off


def test_several_ranks_keep_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for num_ranks in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda n=num_ranks: n)
        assert (opened(torch.nn.Linear(2, 3)) is None) == (num_ranks == 2)


def test_a_call_of_the_model_runs_in_its_thread() -> None:
    class Calls:
        running = SimpleNamespace(thread=None)

    calls: Any = Calls()

    def is_running(found: Any) -> bool:
        return kept_traces._is_running(lambda: found, None)  # type: ignore[arg-type]

    assert not is_running(calls)
    calls.running.thread = get_ident() + 1
    assert not is_running(calls)
    calls.running.thread = get_ident()
    assert is_running(calls)
    assert not is_running(None)
