"""Commands in this process, and what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli import main
from tests.integration.cli.models import small_model


@dataclass
class Said:
    """The exit status of a command, and what it has written."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The standard output, however its lines are broken."""
        return " ".join(self.out.split())


class Cli:
    """Calls commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> Said:
        """Call a command; it ends with a status."""
        self._capsys.readouterr()
        found = main(list(map(str, words)))
        said = Said(found, *self._capsys.readouterr())
        assert found == status, said.err
        return said

    def json(self, *words: object) -> Any:
        """Call a command with ``--json``; return what that says."""
        return json.loads(self(*words, "--json").out)

    def refuses(self, *words: object, says: str | list[str], status: int = 2) -> None:
        """Call a command that is to be refused with some words."""
        said = self(*words, status=status)
        for each in [says] if isinstance(says, str) else says:
            assert each in said.err, said.err
        assert "Traceback" not in said.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a small model."""
    return str(small_model(tmp_path))
