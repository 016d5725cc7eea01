"""Taskgraphs that are kept beside the traces of their graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage.capture.dynamo_graph import SHARES_MEMORY, DynamoGraph
from ds_finepage.capture.recording import record
from ds_finepage.errors import CaptureError
from ds_finepage.graph.codec import dumps
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime import kept_taskgraphs
from ds_finepage.runtime.kept_taskgraphs import keep_taskgraphs, record_or_read
from tests.unit.capture.replay import traced

Changed = Callable[[list[Any]], None]


def product(x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    return torch.mm(x, weight).relu() * count


def call() -> list[Any]:
    weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    return [torch.ones(6, 4)[:3], weight, 2]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[DynamoGraph]:
    """The graphs that were recorded."""
    found = list[DynamoGraph]()

    def noting(graph: DynamoGraph, *args: Any, **kwargs: Any) -> TaskGraph:
        found.append(graph)
        return record(graph, *args, **kwargs)

    monkeypatch.setattr(kept_taskgraphs, "record", noting)
    return found


def graph_of(folder: Path, args: list[Any], *, weight: str = "w", digest: str = "d") -> DynamoGraph:
    graph = traced(product, *args, weights={1: weight})
    keep_taskgraphs(graph.module, folder, digest)
    return graph


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_a_call_is_recorded_once(tmp_path: Path, recorded: list[DynamoGraph]) -> None:
    args = call()
    first, second = graph_of(tmp_path / "new", args), graph_of(tmp_path / "new", args)
    second.name = "another"
    found = record_or_read(first, args)
    again = record_or_read(second, args)
    assert recorded == [first]
    assert again == dataclasses.replace(found, name="another")
    (path,) = kept(tmp_path / "new")
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_folder_every_call_is_recorded(recorded: list[DynamoGraph]) -> None:
    args = call()
    graph = traced(product, *args)
    assert record_or_read(graph, args) == record_or_read(graph, args)
    assert recorded == [graph, graph]


def more_rows(args: list[Any]) -> None:
    args[0] = torch.ones(6, 4)[:5]


def other_dtype(args: list[Any]) -> None:
    weight = torch.nn.Parameter(args[1].int(), requires_grad=False)
    args[:2] = [torch.ones(6, 4).int()[:3], weight]


def other_stride(args: list[Any]) -> None:
    args[0] = torch.ones(4, 6).t()[:3]


def other_offset(args: list[Any]) -> None:
    args[0] = torch.ones(6, 4)[1:4]


def larger_block(args: list[Any]) -> None:
    args[0] = torch.ones(7, 4)[:3]


def with_gradients(args: list[Any]) -> None:
    args[1].requires_grad_()


def other_number(args: list[Any]) -> None:
    args[2] = 3


@pytest.mark.parametrize(
    "change",
    [
        more_rows,
        other_dtype,
        other_stride,
        other_offset,
        larger_block,
        with_gradients,
        other_number,
    ],
)
def test_another_call_is_recorded(
    change: Changed, tmp_path: Path, recorded: list[DynamoGraph]
) -> None:
    args, others = call(), call()
    change(others)
    for given in (args, others, args, others):
        record_or_read(graph_of(tmp_path, given), given)
    assert len(recorded) == len(kept(tmp_path)) == 2


def test_another_weight_or_graph_is_recorded(tmp_path: Path, recorded: list[DynamoGraph]) -> None:
    args = call()
    for names in ({}, {"weight": "v"}, {"digest": "e"}):
        record_or_read(graph_of(tmp_path, args, **names), args)
    assert len(recorded) == len(kept(tmp_path)) == 3


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def without_flash() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    before = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before[0])


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def without_fast_paths() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(not before)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(
    "setting",
    [
        without_flash,
        without_mkldnn,
        lambda: torch.backends.cudnn.flags(enabled=False),
        deterministic,
        double_by_default,
        without_fast_paths,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
)
def test_other_settings_of_torch_are_recorded(
    setting: Callable[[], Any], tmp_path: Path, recorded: list[DynamoGraph]
) -> None:
    args = call()
    record_or_read(graph_of(tmp_path, args), args)
    with setting():
        record_or_read(graph_of(tmp_path, args), args)
    assert len(recorded) == 2


def test_a_number_that_no_tensor_depends_on_is_left_out(
    tmp_path: Path, recorded: list[DynamoGraph]
) -> None:
    for number in (2, 3):
        args = [*call()[:2], number]
        graph = graph_of(tmp_path, args)
        graph.key_positions = ()
        record_or_read(graph, args)
    assert len(recorded) == 1


def test_what_cannot_be_recorded_is_not_read(tmp_path: Path) -> None:
    args = call()
    args[0] = args[0].to_sparse()
    with pytest.raises(CaptureError, match="argument 0 is torch.sparse_coo"):
        record_or_read(graph_of(tmp_path, args), args)
    assert not kept(tmp_path)


def test_arguments_in_one_block_are_recorded_every_time(
    tmp_path: Path, recorded: list[DynamoGraph]
) -> None:
    args = call()
    setattr(args[0], SHARES_MEMORY, True)
    for _ in range(2):
        record_or_read(graph_of(tmp_path, args), args)
    assert len(recorded) == 2 and not kept(tmp_path)


def without_text(text: str) -> bytes:
    return b""


def of_another_version(text: str) -> bytes:
    return text.replace('"format":', '"format":9', 1).encode()


def of_no_text(text: str) -> bytes:
    return b"\xff"


@pytest.mark.parametrize("damage", [without_text, of_another_version, of_no_text])
def test_a_damaged_file_costs_a_recording(
    damage: Callable[[str], bytes],
    tmp_path: Path,
    recorded: list[DynamoGraph],
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = call()
    found = record_or_read(graph_of(tmp_path, args), args)
    (path,) = kept(tmp_path)
    path.write_bytes(damage(dumps(found)))
    with caplog.at_level(logging.WARNING):
        assert record_or_read(graph_of(tmp_path, args), args) == found
    assert f"{path} cannot be used" in caplog.text
    assert record_or_read(graph_of(tmp_path, args), args) == found  # it was written again
    assert len(recorded) == 2


def test_a_file_that_others_can_write_is_not_read(
    tmp_path: Path, recorded: list[DynamoGraph], caplog: pytest.LogCaptureFixture
) -> None:
    args = call()
    record_or_read(graph_of(tmp_path, args), args)
    kept(tmp_path)[0].chmod(0o620)
    record_or_read(graph_of(tmp_path, args), args)
    assert len(recorded) == 2
    assert "is not read: others can write it" in caplog.text


def test_a_file_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(kept_taskgraphs, "write_own_file", fails)
    args = call()
    assert record_or_read(graph_of(tmp_path, args), args).tasks
    assert "a taskgraph cannot be kept: no space left" in caplog.text


def test_a_graph_has_at_most_so_many_files(
    tmp_path: Path, recorded: list[DynamoGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_taskgraphs, "MAX_TASKGRAPHS", 2)
    for number in range(4):
        args = [*call()[:2], number]
        for digest in ("d", "e"):
            record_or_read(graph_of(tmp_path, args, digest=digest), args)
    assert len(kept(tmp_path)) == 4
