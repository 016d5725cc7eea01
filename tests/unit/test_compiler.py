"""C that is compiled for this machine."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_finepage import compiler
from ds_finepage.execution import host_attention

TEXT = """
void add(int *to, long more, int times) { *to += more * times; }
"""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Compile in a test, and again behind it."""
    compiler.compiled.cache_clear()
    yield
    compiler.compiled.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    found = tmp_path / "add.c"
    found.write_text(TEXT)
    return found


def add(source: Path) -> Callable[..., Any] | str:
    return compiler.compiled(source, "add", pointers=1, longs=1, ints=1)


@pytest.mark.skipif(host_attention.why_not() is not None, reason="needs a C compiler")
def test_it_returns_the_function(source: Path) -> None:
    found, place = add(source), ctypes.c_int(1)
    assert not isinstance(found, str)
    assert found(ctypes.addressof(place), 20, 2) is None and place.value == 41
    source.unlink()
    assert add(source) is found  # once a process


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "there is no C compiler"),
        ("false", "^false failed: "),
        ("/no/cc", "^/no/cc: .*No such"),
    ],
)
def test_a_machine_that_compiles_nothing_says_why(
    name: str, reason: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", name)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = add(source)
    assert isinstance(found, str) and re.search(reason, found)


def test_a_library_that_cannot_be_loaded_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = tmp_path / "cc"
    empty.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    empty.chmod(0o755)
    monkeypatch.setenv("CC", str(empty))
    assert "add.so" in str(add(source))


def test_a_child_process_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler.num_threads(3) == 3
    monkeypatch.setattr(compiler, "_compiled_in", lambda: 0)
    assert compiler.num_threads(3) == 1
