"""Commands in this process, and what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from ds_finepage.cli import main


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

    def __init__(self, capsys: pytest.CaptureFixture[str], *first: object) -> None:
        self._capsys = capsys
        self._first = first

    def of(self, *first: object) -> Cli:
        """Return what calls commands that begin with some words."""
        return Cli(self._capsys, *first)

    def __call__(self, *words: object, status: int = 0) -> Said:
        """Call a command; it ends with a status."""
        self._capsys.readouterr()
        found = main([*map(str, self._first), *map(str, words)])
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
