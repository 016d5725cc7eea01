"""Seams go in now or when their module is loaded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ds_finepage.integrations.deepspeed import install as installing

SEAM = """
calls = []
def install(module): calls.append(f"install {module.__name__} {module.VALUE}")
"""


@pytest.fixture
def seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make a package to be changed, ``theirs``, and the seam that changes it."""
    for name, text in (("theirs", "VALUE = 3"), ("its_seam", SEAM)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that it is removed again
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installing, "SEAMS", {"theirs": "its_seam"})
    return importlib.import_module("its_seam")


def test_the_seam_goes_in_when_its_module_is_loaded(seam: ModuleType) -> None:
    installing.install()
    assert seam.calls == []
    importlib.import_module("theirs")
    assert seam.calls == ["install theirs 3"]


def test_the_seam_goes_in_at_once_into_a_loaded_module(seam: ModuleType) -> None:
    importlib.import_module("theirs")
    installing.install()
    assert seam.calls == ["install theirs 3"]


def test_a_module_that_fails_to_load_gets_its_seam_at_the_next_try(
    seam: ModuleType, tmp_path: Path
) -> None:
    installing.install()
    file = tmp_path / "theirs.py"
    file.write_text("raise ImportError('not today')")
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module("theirs")
    file.write_text("VALUE = 'two'  # of another length, so that no compiled file is taken")
    importlib.import_module("theirs")
    assert seam.calls == ["install theirs two"]
