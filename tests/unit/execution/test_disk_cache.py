"""The cache folder: what survives a process, and everything that may be wrong with a file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.execution import disk_cache, measure
from ds_finepage.execution.disk_cache import (
    Table,
    cache_root,
    open_folder,
    source_digest,
    trim,
)
from ds_finepage.execution.measure import OpMeter
from ds_finepage.files import CACHE_VARIABLE
from ds_finepage.graph.taskgraph import TaskGraph
from tests.unit.execution.graphs import ACTIVATION, INPUT, WEIGHT, Draft

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())


def number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    return value


def product() -> TaskGraph:
    draft = Draft()
    rows, weight = draft.tensor(INPUT, 4, 8), draft.tensor(WEIGHT, 8, 8)
    draft.task("aten.mm.default", rows, weight, out=(draft.tensor(ACTIVATION, 4, 8),))
    return draft.graph((rows,))


def filled(value: Any = 7) -> Path:
    """Write one entry; return its file."""
    table = Table("numbers", CPU)
    assert table.get("a", number) is None
    table.put("a", value)
    table.save()
    (path,) = cache_root().rglob("numbers.json")  # type: ignore[union-attr]
    return path


def test_an_entry_outlives_its_process() -> None:
    code = (
        "import torch; from ds_finepage.execution.disk_cache import Table\n"
        "torch.set_num_threads(1); table = Table('numbers', torch.device('cpu'))\n"
        "table.get('a', int); table.put('a', 7); table.save()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
    assert Table("numbers", CPU).get("a", number) == 7
    assert Table("numbers", CPU).get("b", number) is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b'{"a": ', b"\xff"])
def test_a_file_that_is_no_table_is_passed_over_and_written_again(
    text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled()
    path.write_bytes(text)
    assert Table("numbers", CPU).get("a", number) is None
    assert Table("numbers", CPU).get("a", number) is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]  # once
    filled(8)
    assert Table("numbers", CPU).get("a", number) == 8


def test_an_entry_of_another_form_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    filled("seven")
    assert Table("numbers", CPU).get("a", number) is None
    assert "cannot be used" in caplog.text


def test_another_version_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    monkeypatch.setattr(disk_cache, "version", lambda name: "0.0")
    assert Table("numbers", CPU).get("a", number) is None


def test_cards_of_different_kinds_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {0: "NVIDIA A100", 1: "Tesla T4", 2: "Tesla T4"}
    monkeypatch.setattr(
        disk_cache, "device_of", lambda where: SimpleNamespace(name=names[where.index])
    )
    large, small, other = (disk_cache.environment_of(torch.device("cuda", n)) for n in names)
    assert large != small == other


def test_other_code_of_the_same_version_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled()
    (tmp_path / "other.py").write_text("1")
    monkeypatch.setattr(disk_cache, "PACKAGE", tmp_path)
    assert Table("numbers", CPU).get("a", number) is None


def test_the_digest_of_code_depends_on_names_and_contents(tmp_path: Path) -> None:
    found = set()
    for number, (name, text) in enumerate([("a.py", "1"), ("b.py", "1"), ("a.py", "2")]):
        inner = tmp_path / str(number) / "inner"
        inner.mkdir(parents=True)
        (inner / name).write_text(text)
        (inner / "notes.txt").write_text(str(number))
        found.add(source_digest(inner.parent))
    assert len(found) == 3


def test_two_processes_keep_the_entries_of_each_other() -> None:
    one, other = Table("numbers", CPU), Table("numbers", CPU)
    for table in (one, other):
        table.get("a", number)
    one.put("a", 1)
    other.put("b", 2)
    one.save()
    other.save()
    found = Table("numbers", CPU)
    assert (found.get("a", number), found.get("b", number)) == (1, 2)


def test_a_table_keeps_its_newest_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_ENTRIES", 2)
    table = Table("numbers", CPU)
    table.get("a", number)
    for key in range(3):
        table.put(key, key)
    table.save()
    assert [Table("numbers", CPU).get(key, number) for key in range(3)] == [None, 1, 2]


def test_a_full_disk_costs_a_warning_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    table = Table("numbers", CPU)
    table.get("b", number)
    table.put("b", 2)
    table.save()
    assert "No space left" in caplog.text
    assert len(json.loads(path.read_text())) == 1 and len(list(path.parent.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    table = Table("numbers", CPU)
    assert table.get("a", number) is None
    table.put("a", 1)
    table.save()
    assert open_folder(CPU) is None
    assert len(caplog.records) == 1


def test_a_folder_that_is_not_writable_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert open_folder(CPU) is None
    assert "not writable" in caplog.text


@pytest.mark.parametrize("value", ["", "0"])
def test_the_cache_can_be_switched_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, value)
    assert cache_root() is None and open_folder(CPU) is None


def test_the_cache_lies_where_users_keep_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "ds_finepage"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "ds_finepage"


def test_the_files_that_were_not_used_for_longest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("new", "old", "older")):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    monkeypatch.setattr(disk_cache, "MAX_BYTES", 20)
    trim(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]


def test_an_op_is_measured_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = product()
    first = OpMeter(CPU).with_costs(graph)
    monkeypatch.setattr(measure, "_try", lambda *_: pytest.fail("measured again"))
    again = OpMeter(CPU)
    assert again.with_costs(graph) == first
    assert again.in_place(graph)


def test_a_cost_from_the_disk_does_not_stand_in_for_room() -> None:
    graph = product()
    OpMeter(CPU).with_costs(graph)
    assert all(t.time_ns is None for t in OpMeter(CPU).with_costs(graph, room_bytes=1).tasks)


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        [1, 2, True],
        ["1", 2, True, None],
        [1, -2, True, None],
        [-1, 2, True, None],
        [1, 2, 1, None],
        [1, 2, True, 3],
    ],
)
def test_a_cost_of_another_form_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        measure._parse_cost(value)
