"""Put small faults into a copy of the program, one at a time, and see whether tests notice.

    python -m tests.mutation [--only NAME ...] [--jobs N] [--timeout SECONDS]

Each fault is one line (``tests/mutations``), and the tests nearest to it alone look for it. The
repository itself is never changed. A fault that the tests notice is killed; one that they do not
notice survives, and asks for a test.

Exit status: 0; 1 if a named fault survives, or more than 5% of all; 2 if a fault cannot be put in
any more, or if the tests fail without one.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutations.mutant import ROOT, Mutant, StaleMutantError, all_mutants

MUTANTS = all_mutants()

MOST_SURVIVORS = 0.05
"""Share of all faults that may survive."""

COPIED = ("ds_finepage", "tests", "examples", "configs", "benchmarks", "docs", ".ci")
"""Folders that the tests need, beside the files at the root."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers", "deepspeed"])
"""Starts processes in which the packages that take seconds to import are there already."""

KILLED, SURVIVED, SLOW, BROKEN = "killed", "survived", "killed (too slow)", "BROKEN"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said of one fault.

    Attributes:
        mutant: The fault.
        verdict: Killed, survived, killed because the tests did not end, or broken: the tests could
            not be run at all.
        seconds: How long they took.
        tail: The end of what they printed.
    """

    mutant: Mutant
    verdict: str
    seconds: float
    tail: str


class Copy:
    """A copy of the repository in a folder of its own, to put faults into."""

    def __init__(self, folder: Path) -> None:
        """Copy what the tests need."""
        self.folder = folder
        unwanted = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy2(file, folder / file.name)

    @contextmanager
    def with_fault(self, mutant: Mutant) -> Iterator[None]:
        """Put a fault in, and take it out again."""
        path = self.folder / mutant.file
        text = path.read_text()
        self._write(path, mutant.applied_to(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Two versions of one length and one second would share what was compiled of the first.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run_tests(self, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        """Run tests in a process; return its status, None if it did not end, and its last lines."""
        with tempfile.NamedTemporaryFile(suffix=".txt") as output:
            process = FORKS.Process(target=run_pytest, args=(self.folder, tests, output.name))
            process.start()
            process.join(timeout_s)
            if process.is_alive():
                os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
                return None, ""
            lines = Path(output.name).read_text(errors="replace").strip().splitlines()
        return process.exitcode, "\n".join(lines[-15:])


def run_pytest(folder: Path, tests: Sequence[str], output: str) -> None:
    """Run tests of a copy in this process, which others are ended with, and exit with the status.

    Args:
        folder: The copy.
        tests: Files, or tests in them.
        output: The file that gets what is printed.
    """
    os.setsid()
    with open(output, "w") as file, open(os.devnull) as nothing:
        for stream, number in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(stream.fileno(), number)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:0] = [str(folder)]
    for name in [n for n in sys.modules if n.partition(".")[0] in COPIED]:
        del sys.modules[name]  # this script came from the repository
    command = [
        "--assert=plain",
        "-n",
        "0",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
        *tests,
    ]
    sys.exit(int(pytest.main(command)))


def look(copy: Copy, mutant: Mutant, timeout_s: float) -> Outcome:
    """Put a fault into a copy and see what its tests say."""
    start = time.perf_counter()
    with copy.with_fault(mutant):
        status, tail = copy.run_tests(mutant.tests, timeout_s)
    verdicts = {0: SURVIVED, 1: KILLED, None: SLOW}
    verdicts |= {-signal.SIGABRT: KILLED, -signal.SIGSEGV: KILLED}  # the fault ended the process
    return Outcome(mutant, verdicts.get(status, BROKEN), time.perf_counter() - start, tail)


def look_at_all(mutants: Sequence[Mutant], num_jobs: int, timeout_s: float) -> list[Outcome]:
    """Look at every fault, some at a time, each job in a copy of its own; print as they come."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def job(mutant: Mutant) -> Outcome:
        copy = copies.get()
        try:
            found = look(copy, mutant, timeout_s)
        finally:
            copies.put(copy)
        print(f"{found.verdict:18} {found.seconds:6.1f} s  {mutant.name}", flush=True)
        if found.verdict == BROKEN:
            print(found.tail, flush=True)
        return found

    with tempfile.TemporaryDirectory(prefix="ds-finepage-mutation-") as name:
        for number in range(num_jobs):
            copies.put(Copy(Path(name) / str(number)))
        with ThreadPoolExecutor(max_workers=num_jobs) as pool:
            return list(pool.map(job, mutants))


def passes_without(mutants: Sequence[Mutant], timeout_s: float) -> bool:
    """Tell whether the tests of some faults pass as long as there is no fault."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = [t for t in tests if "::" not in t or t.partition("::")[0] not in tests]
    with tempfile.TemporaryDirectory(prefix="ds-finepage-mutation-") as name:
        status, tail = Copy(Path(name) / "0").run_tests(files, timeout_s)
    if status != 0:
        print(f"without any fault the tests end with status {status}:\n{tail}")
    return status == 0


def stale(mutants: Sequence[Mutant]) -> list[str]:
    """List the faults that cannot be put in any more, in words."""
    found = []
    for mutant in mutants:
        try:
            mutant.applied_to((ROOT / mutant.file).read_text())
        except (StaleMutantError, OSError) as error:
            found.append(str(error))
    return found


def is_enough(outcomes: Sequence[Outcome]) -> bool:
    """Tell whether the tests notice enough: every named fault, and nearly all of the others."""
    survivors = [o.mutant for o in outcomes if o.verdict == SURVIVED]
    return not any(m.is_named for m in survivors) and (
        len(survivors) <= MOST_SURVIVORS * len(outcomes)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="look at this one alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="look at N at a time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="a fault")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only is None or m.name in options.only]
    unknown = set(options.only or ()) - {m.name for m in chosen}
    problems = [f"no fault has the name {name}" for name in sorted(unknown)] + stale(chosen)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    start = time.perf_counter()
    if not passes_without(chosen, options.timeout * 4):
        return 2
    outcomes = look_at_all(chosen, options.jobs, options.timeout)
    survivors = [o.mutant.name for o in outcomes if o.verdict == SURVIVED]
    print(f"{len(outcomes)} faults, {len(survivors)} survived, {time.perf_counter() - start:.0f} s")
    for name in survivors:
        print(f"  survived: {name}")
    if any(o.verdict == BROKEN for o in outcomes):
        return 2
    return 0 if is_enough(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
