"""Small faults to put into the program, and the tests that have to notice them.

They lie in the text files of this folder. A line ``file <- tests`` begins a group; files are named
from the package, tests from the folder of the tests. Each further line is a fault:

    name: "old text" -> "new text"

Texts are written as in JSON. A name behind ``!`` makes the script fail by itself where its fault
survives. A line that begins with ``#`` says what a file is about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent

_TEXT = r'("(?:[^"\\]|\\.)*")'
_GROUP = re.compile(r"(\S+\.py) <- (\S.*)")
_FAULT = re.compile(rf"  (!?)([a-z0-9-]+): {_TEXT} -> {_TEXT}")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line of the program that is changed.

    Attributes:
        name: What is wrong then, in a few words with hyphens.
        file: The file, from the root of the repository.
        old: Text that occurs once in it.
        new: What stands there instead.
        tests: The nearest tests: files, or tests in them as pytest names them.
        is_named: Whether this one alone makes the script fail where it survives.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    is_named: bool = False

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault in it.

        Raises:
            StaleMutantError: The old text does not occur exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise StaleMutantError(
                f"stale mutation {self.name}: {self.old!r} occurs {count} times in {self.file}"
            )
        return text.replace(self.old, self.new)


class StaleMutantError(Exception):
    """The program has changed, so that a fault cannot be put into it any more."""


def mutants_of(text: str) -> Iterator[Mutant]:
    """Go over the faults of a file.

    Raises:
        ValueError: A line has another form.
    """
    group: re.Match[str] | None = None
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _GROUP.fullmatch(line)
        fault = None if found or group is None else _FAULT.fullmatch(line)
        if found:
            group = found
        elif fault and group:
            mark, name, old, new = fault.groups()
            tests = tuple(f"tests/{test}" for test in group[2].split())
            file = f"ds_finepage/{group[1]}"
            yield Mutant(name, file, json.loads(old), json.loads(new), tests, bool(mark))
        else:
            raise ValueError(f"no fault, and no group of faults: {line!r}")


def all_mutants() -> tuple[Mutant, ...]:
    """Return every fault, in the order of the files' names."""
    files = sorted(FOLDER.glob("*.txt"))
    return tuple(m for file in files for m in mutants_of(file.read_text(encoding="utf-8")))
