"""The faults of ``tests/mutation.py`` can still be put in, and the script judges as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutation
from tests.mutation import (
    BROKEN,
    KILLED,
    MUTANTS,
    SLOW,
    SURVIVED,
    Copy,
    Outcome,
    is_enough,
    look,
    main,
    stale,
)
from tests.mutations.mutant import ROOT, Mutant, StaleMutantError, mutants_of


def test_no_fault_is_stale() -> None:
    assert stale(MUTANTS) == []


def test_every_fault_has_a_name_of_its_own_and_tests_that_exist() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 60
    assert all((ROOT / t.partition("::")[0]).exists() for m in MUTANTS for t in m.tests)
    assert all(m.tests and m.old != m.new for m in MUTANTS)


def test_faults_are_read_group_by_group() -> None:
    text = """# Faults of sums.

units.py <- unit/test_a.py unit/test_b.py::test_it
  one-is-two: "a\\n\\"1\\"" -> "2"
  !a-sum-is-left-out: "x" -> ""
api.py <- unit/test_c.py
  no-call: "f()" -> "pass"
"""
    tests = ("tests/unit/test_a.py", "tests/unit/test_b.py::test_it")
    assert list(mutants_of(text)) == [
        Mutant("one-is-two", "ds_finepage/units.py", 'a\n"1"', "2", tests),
        Mutant("a-sum-is-left-out", "ds_finepage/units.py", "x", "", tests, is_named=True),
        Mutant("no-call", "ds_finepage/api.py", "f()", "pass", ("tests/unit/test_c.py",)),
    ]


@pytest.mark.parametrize(
    "line", ['  in-no-group: "a" -> "b"', "units.py <-", "units.py <- a\n  x: a -> b", "x"]
)
def test_a_line_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="no fault, and no group of faults"):
        list(mutants_of(line))


def a_mutant(old: str = "1 + 1", *, is_named: bool = False) -> Mutant:
    tests = ("tests/unit/test_units.py",)
    return Mutant("sum", "ds_finepage/units.py", old, "1 + 2", tests, is_named)


def test_text_that_is_gone_or_there_twice_is_stale() -> None:
    assert a_mutant().applied_to("x = 1 + 1\n") == "x = 1 + 2\n"
    for text in ("x = 2\n", "x = 1 + 1\ny = 1 + 1\n"):
        with pytest.raises(StaleMutantError, match="stale mutation sum: '1 \\+ 1' occurs"):
            a_mutant().applied_to(text)
    assert "stale mutation sum" in stale([a_mutant("no such text")])[0]


def test_a_stale_fault_ends_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutation, "MUTANTS", (a_mutant("no such text"),))
    assert main([]) == 2
    assert "stale mutation sum" in capsys.readouterr().err


def test_a_name_that_nobody_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nothing"]) == 2
    assert "no fault has the name nothing" in capsys.readouterr().err


def outcomes(*verdicts: str, is_named: bool = False) -> list[Outcome]:
    return [Outcome(a_mutant(is_named=is_named), verdict, 1, "") for verdict in verdicts]


def test_one_in_twenty_may_survive_but_no_named_one() -> None:
    killed = outcomes(*[KILLED] * 19)
    assert is_enough(killed + outcomes(SURVIVED))
    assert is_enough(killed + outcomes(SLOW))
    assert not is_enough(killed[1:] + outcomes(SURVIVED))
    assert not is_enough(killed + outcomes(SURVIVED, is_named=True))


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(0, SURVIVED), (1, KILLED), (-11, KILLED), (None, SLOW), (2, BROKEN), (-9, BROKEN)],
)
def test_the_status_of_the_tests_is_the_verdict(
    status: int | None, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while they run the fault is there, before and after it is not."""
    copy = Copy.__new__(Copy)
    copy.folder = tmp_path
    path = tmp_path / "ds_finepage" / "units.py"
    path.parent.mkdir()
    path.write_text("x = 1 + 1\n")
    seen = []

    def run_tests(self: Copy, tests: tuple[str, ...], timeout_s: float) -> tuple[int | None, str]:
        seen.append((path.read_text(), tests, timeout_s))
        return status, ""

    monkeypatch.setattr(Copy, "run_tests", run_tests)
    assert look(copy, a_mutant(), 5.0).verdict == verdict
    assert seen == [("x = 1 + 2\n", ("tests/unit/test_units.py",), 5.0)]
    assert path.read_text() == "x = 1 + 1\n"


def test_a_fault_is_put_into_a_copy_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / "ds_finepage" / "units.py").read_bytes()
    assert main(["--only", "a-kilobyte-is-a-kibibyte"]) == 0
    assert (ROOT / "ds_finepage" / "units.py").read_bytes() == before
    assert "1 faults, 0 survived" in capsys.readouterr().out
