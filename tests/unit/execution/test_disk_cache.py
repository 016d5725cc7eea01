"""The cache folder: which one it is, when there is none, and what goes when it is full."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_finepage.execution import disk_cache
from ds_finepage.execution.disk_cache import cache_root, open_plan_folder, source_digest, trim
from ds_finepage.files import CACHE_VARIABLE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def test_another_version_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_plan_folder(CPU)
    assert before is not None and before.is_dir() and before == open_plan_folder(CPU)
    monkeypatch.setattr(disk_cache, "version", lambda name: "0.0")
    assert open_plan_folder(CPU) != before


def test_other_code_of_the_same_version_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_plan_folder(CPU)
    (tmp_path / "other.py").write_text("1")
    monkeypatch.setattr(disk_cache, "PACKAGE", tmp_path)
    assert open_plan_folder(CPU) != before


def test_cards_of_different_kinds_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {0: "NVIDIA A100", 1: "Tesla T4", 2: "Tesla T4"}
    monkeypatch.setattr(
        disk_cache, "device_of", lambda where: SimpleNamespace(name=names[where.index])
    )
    large, small, other = (disk_cache.environment_of(torch.device("cuda", n)) for n in names)
    assert large != small == other


def test_the_digest_of_code_depends_on_names_and_contents(tmp_path: Path) -> None:
    found = set()
    for number, (name, text) in enumerate([("a.py", "1"), ("b.py", "1"), ("a.py", "2")]):
        inner = tmp_path / str(number) / "inner"
        inner.mkdir(parents=True)
        (inner / name).write_text(text)
        (inner / "notes.txt").write_text(str(number))
        found.add(source_digest(inner.parent))
    assert len(found) == 3


def test_a_folder_that_cannot_be_made_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert open_plan_folder(CPU) is None
    assert len(caplog.records) == 1


def test_a_folder_that_is_not_writable_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert open_plan_folder(CPU) is None
    assert "not writable" in caplog.text


@pytest.mark.parametrize("value", ["", "0"])
def test_the_cache_can_be_switched_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, value)
    assert cache_root() is None and open_plan_folder(CPU) is None


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
