"""One small fault to put into the program, and the tests that have to notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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


def mutant(name: str, file: str, old: str, new: str, *tests: str, is_named: bool = False) -> Mutant:
    """Describe a fault; files are named from the package, tests from the folder of the tests."""
    return Mutant(
        name,
        f"ds_finepage/{file}",
        old,
        new,
        tuple(f"tests/{test}" for test in tests),
        is_named,
    )
