"""The codec's files: written as a whole, and named in every error."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from tests.unit.graph.examples import GRAPH, STANDALONE, make_memgraph, make_timeline, with_task


def test_save_and_load(tmp_path: Path) -> None:
    for position, obj in enumerate((*STANDALONE, make_memgraph(GRAPH))):
        path = tmp_path / f"{position}.json"
        codec.save(obj, path)
        assert codec.load(path, type(obj)) == codec.load(str(path), expect=type(obj)) == obj


def test_errors_of_files_begin_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    codec.save(make_timeline(), path)
    for expect in (TaskGraph, MemGraph):
        with pytest.raises(InvalidPlanError, match=f"^{re.escape(str(path))}: kind: .*'timeline'"):
            codec.load(path, expect)


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPlanError, match=r"plan\.json: Invalid JSON"):
        codec.load(path, TaskGraph)


@pytest.mark.parametrize("name", ["missing.json", ".", "null\0byte"])
def test_unreadable_file_is_the_users_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        codec.load(tmp_path / name, TaskGraph)


@pytest.mark.parametrize("name", ["missing/plan.json", "null\0byte"])
def test_unwritable_file_is_the_users_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        codec.save(GRAPH, tmp_path / name)


def test_save_replaces_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old" * 100_000)
    codec.save(GRAPH, path)
    assert path.read_text() == codec.dumps(GRAPH)
    assert os.listdir(tmp_path) == ["graph.json"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failed_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def fail(fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    expected = ConfigError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        codec.save(GRAPH, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["graph.json"]


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlanError):
        codec.save(with_task(GRAPH, args=([],)), tmp_path / "graph.json")
    assert os.listdir(tmp_path) == []


def test_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    codec.save(GRAPH, tmp_path / "graph.json")
    usual, saved = ((tmp_path / name).stat().st_mode for name in ("usual", "graph.json"))
    assert usual == saved


@pytest.mark.parametrize("text", ["hello", '{\n "model_type": "llama"\n}', ""])
def test_a_file_of_another_program_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidPlanError, match=r"config\.json: .*'ds-finepage plan --out'"):
        codec.load(path, MemGraph)
