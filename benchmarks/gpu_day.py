"""One command for a day on a GPU: a small run, tests, sanitiser, link, both engines, enqueue time.

    python benchmarks/gpu_day.py --out FOLDER --stage smoke     at most 3 minutes
    python benchmarks/gpu_day.py --out FOLDER --stage tests     at most 5
    python benchmarks/gpu_day.py --out FOLDER --stage figures   at most 7
    python benchmarks/gpu_day.py --out FOLDER --device cpu --tiny

The smoke stage shows that the package imports, that one model gives equal tokens at 50% of its
weights, holds its budget, and never lets the host wait inside a pass, and that the kernel of packed
weights agrees with its reference. Without ``--stage`` all three run, one after another.

A later call with the same FOLDER goes on where an earlier one ended: steps that ended well are not
run again, and neither are tests that passed. ``--again`` runs them all.

Every step is a process of its own under a time limit. A step that fails, hangs or dies never stops
the next one. FOLDER gets three files, named by date: the report as Markdown and as JSON, and the
output of all steps. The report is written again after each row of a step, so a kill loses nothing.
All limits together are under 14 minutes.

Exit status: 0 if every step ended well, 1 if one did not; a step whose tool is not installed does
not count. 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROW = "gpu_day row: "  # as in day_common.py, which imports torch; this process does not
SANITIZER = "compute-sanitizer"
GRACE_S = 5
"""A step begins nothing new this long before its limit, so that it can end by itself."""

OK, FAILED, KILLED, ABSENT, LATER = "ok", "failed", "over its limit", "not installed", "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One process of the day.

    Attributes:
        name: Of the step.
        limit_s: Seconds after which it is killed.
        words: The script beside this file, and its own options.
        before: A command that runs the script, such as a sanitiser.
        is_tiny: True for a step of rehearsals, False for one of other days, None for both.
        stage: Of the day.
    """

    name: str
    stage: str = ""
    limit_s: int
    words: tuple[str, ...]
    before: tuple[str, ...] = ()
    is_tiny: bool | None = None


STAGES = {"smoke": 180, "tests": 300, "figures": 420}
"""Stages of the day, and the most seconds of each: its steps, and starting them."""

STEPS = (
    Step(stage="smoke", name="machine", limit_s=20, words=("day_machine.py",)),
    Step(stage="smoke", name="small run", limit_s=100, words=("day_small.py",)),
    Step(stage="smoke", name="kernel", limit_s=50, words=("day_kernel.py",)),
    Step(stage="tests", name="tests", limit_s=230, words=("day_tests.py",)),
    Step(
        stage="tests",
        name="sanitiser",
        limit_s=60,
        words=("day_small.py",),
        before=(SANITIZER, "--tool", "racecheck", "--error-exitcode", "1"),
    ),
    Step(stage="figures", name="link", limit_s=25, words=("day_link.py",)),
    Step(
        stage="figures",
        name="engines, tiny",
        limit_s=60,
        words=("day_engines.py",),
        is_tiny=True,
    ),
    Step(
        stage="figures",
        name="engines, 1B",
        limit_s=75,
        words=("day_engines.py", "--model", "1B"),
        is_tiny=False,
    ),
    Step(
        stage="figures",
        name="engines, 7B",
        limit_s=220,
        words=("day_engines.py", "--model", "7B"),
        is_tiny=False,
    ),
    Step(stage="figures", name="enqueue", limit_s=30, words=("enqueue.py",)),
    Step(stage="figures", name="enqueue, graphs", limit_s=28, words=("enqueue.py", "--graphs")),
)
REHEARSAL = 10
"""How many times longer the limits of a rehearsal are; its machine may be busy or slow."""


@dataclass(slots=True)
class Outcome:
    """What became of a step."""

    name: str
    status: str = LATER
    seconds: float = 0.0
    remark: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """The outcomes so far, in files.

    Attributes:
        folder: Of the files.
        name: The beginning of their names.
        title: Of the report.
        day: The date.
        outcomes: Of all steps.
        judge: Makes more rows from those of all steps.
    """

    folder: Path
    name: str
    title: str
    day: str
    outcomes: list[Outcome]
    judge: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all steps, and then the rows that were made from them."""
        found = [row for outcome in self.outcomes for row in outcome.rows]
        return [*found, *self.judge(found)]

    def path(self, suffix: str) -> Path:
        """Return the path of one of the files."""
        return self.folder / f"{self.name}_{self.day}.{suffix}"

    def write(self) -> None:
        """Write both reports; a reader never finds a part of one."""
        document = {
            "title": self.title,
            "date": self.day,
            "steps": [asdict(outcome) for outcome in self.outcomes],
            "judged": self.judge([row for o in self.outcomes for row in o.rows]),
        }
        for suffix, text in (
            ("json", json.dumps(document, indent=1) + "\n"),
            ("md", markdown_of(self)),
        ):
            new = self.path(suffix + ".new")
            new.write_text(text)
            new.replace(self.path(suffix))


# The report as Markdown.


def markdown_of(report: Report) -> str:
    """Return the report as Markdown."""
    steps = [
        {"step": o.name, "status": o.status, "took_s": o.seconds, "remark": o.remark}
        for o in report.outcomes
    ]
    parts = [f"# {report.title}, {report.day}\n", table_of(steps)]
    for name, rows in tables_of(report.rows).items():
        parts += [f"\n## {name.capitalize()}\n", table_of(rows)]
    return "\n".join(parts)


def tables_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells = {key: value for key, value in row.items() if key != "table"}
        found.setdefault(row["table"], []).append(cells)
    return found


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown; columns without a value are left out."""
    keys = list(dict.fromkeys(k for row in rows for k, value in row.items() if value is not None))
    lines = [[key.replace("_", " ") for key in keys], ["---"] * len(keys)]
    lines += [[cell_of(key, row.get(key)) for key in keys] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def cell_of(key: str, value: Any) -> str:
    """Return a figure in few digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key.endswith("bytes") or value >= 1 << 20):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")


def without_paths(text: str) -> str:
    """Cut the folders of this machine from a text; names of files stay."""
    return re.sub(r"(?:/[\w.@+~-]+)+/([\w.@+~-]+)", r"\1", text)


# Steps.


def command_of(step: Step, options: argparse.Namespace) -> list[str]:
    """Return the command of a step."""
    script, *words = step.words
    command = [*step.before, sys.executable, str(HERE / script), *words]
    command += ["--device", options.device, "--seconds", str(step.limit_s - GRACE_S)]
    command += ["--load", options.load] if options.load else []
    return [*command, *(["--tiny"] if options.tiny else [])]


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of all steps."""
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GPU_DAY_FOLDER": str(options.out.resolve()),
        "GPU_DAY_PASSED": json.dumps(options.passed),
    }
    if not options.device.startswith(("cuda", "xpu")):
        found |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return found


def lines_of(stream: IO[str], process: subprocess.Popen[str], until: float) -> Iterator[str]:
    """Yield the lines of a process as they come.

    Args:
        stream: Its output.
        process: The process.
        until: The time of ``time.monotonic`` at which the reading ends.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=min(left, 1))
        except queue.Empty:
            if process.poll() is None:
                continue
            line = None  # it is gone, and a child of it may keep the pipe open
        if line is None:
            return
        yield line


def end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a step, its own children included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_step(
    step: Step, outcome: Outcome, report: Report, options: argparse.Namespace, log: IO[str]
) -> None:
    """Run a step to its end or its limit, and note everything.

    Args:
        step: The step.
        outcome: Takes what happens.
        report: Written after each row.
        options: The options of the day.
        log: Takes the output.
    """
    if step.before and shutil.which(step.before[0]) is None:
        outcome.status, outcome.remark = ABSENT, f"{step.before[0]} is not installed"
        return
    start = time.monotonic()
    outcome.status, outcome.remark, last = "running", "", ""
    outcome.rows = [row for row in outcome.rows if row.get("outcome") == "passed"]
    report.write()
    with subprocess.Popen(
        command_of(step, options),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment_of(options),
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in lines_of(process.stdout, process, start + step.limit_s):
                log.write(line)
                log.flush()
                _, is_row, row = line.partition(ROW)
                if is_row:
                    outcome.rows.append(json.loads(without_paths(row)))
                    outcome.seconds = time.monotonic() - start
                    report.write()
                elif line.strip():
                    last = line.strip()
            try:
                status = process.wait(max(0.1, start + step.limit_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
        finally:
            end(process)
    outcome.seconds = time.monotonic() - start
    outcome.status = {0: OK, None: KILLED}.get(status, FAILED)
    if status == 0 and (faults := faults_of(outcome)):
        outcome.status, outcome.remark = FAILED, faults
    elif status != 0:
        outcome.remark = without_paths(last)[:300] if status else f"killed after {step.limit_s} s"


def faults_of(outcome: Outcome) -> str:
    """Say what is wrong in the rows of a step that ended well; empty if nothing is."""
    wrong = [row for row in outcome.rows if is_wrong(row)]
    return f"{len(wrong)} of {len(outcome.rows)} rows tell of a fault" if wrong else ""


def is_wrong(row: dict[str, Any]) -> bool:
    """Tell whether a row shows wrong tokens, a budget that was exceeded, or an error."""
    is_ours = not str(row.get("engine", "")).startswith("stock")  # which keeps no budget
    return (
        row.get("tokens_equal") is False
        or (row.get("within_budget") is False and is_ours)
        or "Error: " in str(row.get("remark", ""))
    )


def run_day(
    options: argparse.Namespace,
    steps: Sequence[Step],
    *,
    name: str = "gpu_day",
    title: str = "A day",
    judge: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda _: [],
) -> Report:
    """Run all steps, one after another.

    Args:
        options: The options of the day.
        steps: The steps.
        name: The beginning of the names of its files.
        title: The title of the report.
        judge: Makes more rows from those of all steps.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    title += f" on {options.device}" + (", rehearsed in tiny sizes" if options.tiny else "")
    earlier = {} if options.again else earlier_of(options.out, name, title)
    outcomes = [earlier.pop(step.name, Outcome(step.name)) for step in steps]
    options.passed = [r["test"] for o in outcomes for r in o.rows if r.get("outcome") == "passed"]
    day = datetime.date.today().isoformat()
    report = Report(options.out, name, title, day, [*earlier.values(), *outcomes], judge)
    with report.path("log").open("a") as log:
        for step, outcome in zip(steps, outcomes, strict=True):
            if outcome.status == OK:
                print(f"{step.name}: it has ended well before")
                continue
            log.write(f"\n===== {step.name}\n")
            try:
                run_step(step, outcome, report, options, log)
            except Exception as error:  # the next step may still work
                outcome.status, outcome.remark = FAILED, without_paths(f"{error!r}")
            report.write()
            print(f"{step.name}: {outcome.status}, {outcome.seconds:.1f} s {outcome.remark}")
    return report


def earlier_of(folder: Path, name: str, title: str) -> dict[str, Outcome]:
    """Return the outcomes of the last earlier call, by step.

    Args:
        folder: Of the report.
        name: The beginning of its name.
        title: Of the report; one of another device or size is no earlier call.
    """
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}_*.json"))]
    same = [document for document in documents if document["title"] == title]
    return {step["name"]: Outcome(**step) for step in same[-1]["steps"]} if same else {}


def steps_of(options: argparse.Namespace, steps: Sequence[Step] = STEPS) -> list[Step]:
    """Return the steps that are wanted.

    A rehearsal has one model, time enough, and the sanitiser's small run without the sanitiser.

    Args:
        options: The options of the day.
        steps: All steps.

    Raises:
        ValueError: There is no step of a name.
    """
    steps = [s for s in steps if s.is_tiny in (None, options.tiny)]
    steps = [s for s in steps if getattr(options, "stage", None) in (None, s.stage)]
    if options.tiny:
        steps = [replace(s, limit_s=REHEARSAL * s.limit_s, before=()) for s in steps]
    names = [step.name for step in steps]
    wanted = [name.strip() for name in options.only.split(";")] if options.only else names
    for name in wanted:
        if name not in names:
            raise ValueError(f"--only: there is no step {name!r}; the steps are {'; '.join(names)}")
    return [step for step in steps if step.name in wanted]


def parse(
    words: Sequence[str] | None,
    steps: Sequence[Step] = STEPS,
    description: str | None = __doc__,
) -> argparse.Namespace:
    """Read the command line.

    Args:
        words: The arguments; None for those of the process.
        steps: All steps.
        description: Its first line is shown by ``--help``.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the report")
    parser.add_argument("--device", default="cuda", help="%(default)s by default")
    parser.add_argument(
        "--load", metavar="MODULE:FUNCTION", help="each step calls it first; it adds a device"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a rehearsal")
    if stages := list(dict.fromkeys(s.stage for s in steps if s.stage)):
        parser.add_argument("--stage", choices=stages, help="run this stage alone")
    parser.add_argument("--again", action="store_true", help="also what has ended well before")
    parser.add_argument("--only", metavar="LIST", help="names of steps, with ; in between")
    options = parser.parse_args(words)
    try:
        options.steps = steps_of(options, steps)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the day; return the exit status."""
    options = parse(words)
    report = run_day(options, options.steps)
    print(table_of([{"step": o.name, "status": o.status} for o in report.outcomes]), end="")
    print(f"report: {report.path('md').name}, {report.path('json').name}")
    names = {step.name for step in options.steps}
    wanted = [outcome.status for outcome in report.outcomes if outcome.name in names]
    return 0 if all(status in (OK, ABSENT) for status in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
