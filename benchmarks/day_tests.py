"""Runs the tests that are marked ``gpu`` and hands each result to the report as it comes.

python benchmarks/day_tests.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from day_common import parser_of, report

ROOT = Path(__file__).resolve().parents[1]
MARK = "mark.gpu"
ACCELERATOR = "tests/accelerator/"
"""Its tests are marked by their conftest where there is a GPU."""

THIS_DAY = "test_gpu_day.py"
"""A rehearsal of the day is no part of it."""


class Results:
    """A plugin of pytest that reports each test when it is done."""

    def __init__(self, until: float, passed: Collection[str]) -> None:
        """Report until a time, and then end the run.

        Args:
            until: The time of ``time.perf_counter`` after which no test begins.
            passed: Names of tests that have passed before.
        """
        self._until, self._passed = until, passed

    def pytest_runtest_setup(self, item: Any) -> None:
        """End the run where no time is left, and pass over what has passed before."""
        if _short(item.nodeid) in self._passed:
            pytest.skip("passed in an earlier call")
        if time.perf_counter() > self._until:
            item.session.shouldstop = "no time is left"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report the outcome of a test, or of a part of it that failed."""
        name = _short(report.nodeid)
        if name in self._passed:
            return  # its row is there
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.passed else self._reason(report)
            hand_over("tests", test=name, outcome=report.outcome, seconds=report.duration, why=text)

    @staticmethod
    def _reason(report: Any) -> str:
        if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
            return str(report.longrepr[2])
        crash = getattr(report.longrepr, "reprcrash", None)
        return str(crash.message if crash is not None else report.longrepr).splitlines()[0][:200]


hand_over = report


def _short(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def is_marked(path: Path) -> bool:
    """Tell whether a file may have tests that are marked ``gpu``."""
    if path.name == THIS_DAY:
        return False
    return ACCELERATOR in path.as_posix() or MARK in path.read_text()


def main() -> int:
    """Run the tests; return pytest's status, 0 where none was chosen."""
    arguments = parser_of(__doc__).parse_args()
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if is_marked(path)]
    marked.sort(key=lambda path: ACCELERATOR in path)  # those take longest
    options = ["-m", "gpu", "-o", "addopts=", "--import-mode=importlib", "-W", "default"]
    options += ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    passed = json.loads(os.environ.get("GPU_DAY_PASSED", "[]"))
    plugin = Results(time.perf_counter() + arguments.seconds, passed)
    status = int(pytest.main([*options, *marked], plugins=[plugin]))
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status


if __name__ == "__main__":
    sys.exit(main())
