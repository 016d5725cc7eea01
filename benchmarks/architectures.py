"""Whether results under a budget are those of the plain model, architecture by architecture.

    python benchmarks/architectures.py --out benchmarks/architectures_2026-11-22

Tiny models of random weights from transformers and diffusers, beyond the families of families.py:
images, sound, time series, several of them together, state spaces, encoders, newer text models.
Each does one forward, and a short greedy generation where it has one, first by itself, then
attached: with room for everything, where passes are captured, and at each budget, from the least
that those passes can run under to what they need with all weights resident; vacated memory is
poisoned and lanes are delayed at random. A cell is right if all results are the same bit by bit,
nothing ended with an error, and the measured peak is within the budget; where something ran without
a plan the budget is not promised, and the peak is shown beside it.

Each model runs in a process of its own with a time limit, so that one cannot end the sweep. Exit
status 1 if a cell is wrong, 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import logging
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from families import AMPLE_BYTES, BUDGETS, DTYPES, POOL_BYTES, chosen, hardware, num_unplanned
from tiny_media import DIFFUSION, IMAGES, MULTIMODAL, SOUNDS, TIME_SERIES
from tiny_models import Inputs, Tiny, make_inputs, make_model
from tiny_text import DECODERS, ENCODERS, STATE_SPACES

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import ConfigError
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.handle import Handle
from ds_finepage.units import format_bytes

TINY: dict[str, Tiny] = {
    **IMAGES,
    **DIFFUSION,
    **SOUNDS,
    **STATE_SPACES,
    **TIME_SERIES,
    **MULTIMODAL,
    **DECODERS,
    **ENCODERS,
}
LIMIT_S = 300
ALL_BUDGETS = ("ample", *BUDGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model under one budget; None is what a failure left unmeasured.

    ``unplanned`` counts what ran without a plan; ``reasons`` says why. ``skipped`` says why nothing
    was run, "" if it was. ``fault`` says what is wrong, "" if nothing is.
    """

    family: str
    group: str
    dtype: str
    budget: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    unplanned: int = 0
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    skipped: str = ""
    fault: str = ""


def run_model(model: Any, tiny: Tiny, inputs: Inputs) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of a forward, then what is generated, if anything is."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # some draw random numbers
        yield tensors_of(model(**inputs))
        if tiny.tokens:
            prompt = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
            length = {"min_new_tokens": tiny.tokens, "max_new_tokens": tiny.tokens}
            yield tensors_of(model.generate(**prompt, **length, do_sample=False))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in a nested result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def difference(found: list[torch.Tensor], plain: list[torch.Tensor]) -> str:
    """Say how results differ; "" where they are the same. NaN is the same as NaN."""
    if [t.shape for t in found] != [t.shape for t in plain]:
        return f"shapes {[tuple(t.shape) for t in found]}, not {[tuple(t.shape) for t in plain]}"
    for index, (a, b) in enumerate(zip(found, plain, strict=True)):
        if a.dtype != b.dtype or not torch.equal(a.nan_to_num(), b.nan_to_num()):
            apart = (a.double() - b.double()).abs().max().item()
            return f"result {index} of {len(plain)} differs by {apart:.2e}"
    return ""


def measure_model(family: str, dtype: str) -> Iterator[Cell]:
    """Run all cells of a model, with one handle for all of them."""
    tiny = TINY[family]
    cell = Cell(family=family, group=tiny.group, dtype=dtype, budget="ample")
    if importlib.util.find_spec(tiny.library) is None:
        yield replace(cell, skipped=f"{tiny.library} is not installed")
        return
    model, inputs = make_model(tiny, dtype), make_inputs(tiny, dtype)
    try:
        plain = list(run_model(model, tiny, inputs))
    except RuntimeError as error:
        yield replace(cell, skipped=f"the plain model does not run: {one_line(error)}")
        return
    inputs = make_inputs(tiny, dtype)  # anew: BLIP's generate changes its prompt
    handle = attach(model, device_budget=AMPLE_BYTES, device="cpu")
    handle._memory._pool.reserve(POOL_BYTES)  # host memory: kept out of the meter's sight
    try:
        for seed, budget in enumerate(ALL_BUDGETS):
            yield measure(handle, model, inputs, replace(cell, budget=budget), plain, seed)
    finally:
        handle.detach()


def measure(
    handle: Handle,
    model: Any,
    inputs: Inputs,
    cell: Cell,
    plain: list[list[torch.Tensor]],
    seed: int,
) -> Cell:
    """Run one cell."""
    stats = handle.stats
    least, needed = stats.min_budget_bytes, stats.needed_budget_bytes
    shares = {"ample": AMPLE_BYTES, "min": least, "50%": max(least, needed // 2), "100%": needed}
    budget_bytes = shares[cell.budget]
    if cell.budget != "ample":
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed)
        handle.replan(budget_bytes=budget_bytes, debug=debug)
    inputs = {name: x.clone() for name, x in inputs.items()}  # not in the meter's sight
    before, start, fault = num_unplanned(handle), time.perf_counter(), ""
    meter = DeviceMeter(torch.device("cpu"))
    try:
        with meter:
            for expected, found in zip(
                plain, run_model(model, TINY[cell.family], inputs), strict=True
            ):
                fault = fault or difference(found, expected)
                del found  # or it would count while the next is made
    except Exception as error:  # whatever it is, the other cells are run
        fault = f"{type(error).__name__}: {one_line(error)}"
    unplanned = num_unplanned(handle) - before
    if not fault and not unplanned and meter.peak_bytes > budget_bytes:
        fault = f"peak {meter.peak_bytes} bytes, budget {budget_bytes} bytes"
    return replace(
        cell,
        budget_bytes=budget_bytes,
        peak_bytes=meter.peak_bytes,
        unplanned=unplanned,
        reasons=tuple(sorted({one_line(reason) for reason in handle.stats.unplanned_reasons})),
        seconds=time.perf_counter() - start,
        fault=fault,
    )


def one_line(text: Any) -> str:
    """Return the beginning of a message, in one line."""
    return " ".join(str(text).split())[:300]


def run_child(family: str, dtypes: list[str]) -> None:
    """Measure one model and print its cells, one a line."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    for dtype in dtypes:
        torch._dynamo.reset()
        for cell in measure_model(family, dtype):
            print(json.dumps(asdict(cell)), flush=True)


def run_apart(family: str, dtypes: list[str], limit_s: float) -> list[Cell]:
    """Measure one model in a process of its own; what that did not come to is a fault."""
    command = [sys.executable, __file__, "--child", family, "--dtypes", ",".join(dtypes)]
    fault = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        out = done.stdout
        if done.returncode:
            fault = f"exit status {done.returncode}: {one_line(done.stderr[-300:])}"
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
        fault = f"not done after {limit_s:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith('{"family"')]
    cells = [Cell(**{**json.loads(line), "reasons": ()}) for line in lines]
    cells = [
        replace(cell, reasons=tuple(json.loads(line)["reasons"]))
        for cell, line in zip(cells, lines, strict=True)
    ]
    if fault:
        missing = next((d for d in dtypes if sum(c.dtype == d for c in cells) < 4), dtypes[-1])
        last = Cell(family=family, group=TINY[family].group, dtype=missing, budget="ample")
        done_of = [c.budget for c in cells if c.dtype == missing]
        budget = ALL_BUDGETS[min(len(done_of), len(ALL_BUDGETS) - 1)]
        cells.append(replace(last, budget=budget, fault=fault))
    return cells


HEADINGS = ("architecture", "group", "dtype", "unplanned", *ALL_BUDGETS)


def rows(cells: list[Cell]) -> Iterator[list[str]]:
    """Yield a row of text for each model; its budgets side by side."""
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.family, cell.dtype), []).append(cell)
    for (family, dtype), found in grouped.items():
        by_budget = {cell.budget: cell for cell in found}
        unplanned = str(max(cell.unplanned for cell in found))
        texts = [text_of(by_budget.get(budget)) for budget in ALL_BUDGETS]
        yield [family, found[0].group, dtype, unplanned, *texts]


def text_of(cell: Cell | None) -> str:
    """Say what became of a cell, and which share of its budget it took."""
    if cell is None:
        return "-"
    if cell.fault or cell.skipped:
        return "WRONG" if cell.fault else "skipped"
    if cell.budget == "ample" or not cell.budget_bytes:  # 0 where nothing is planned
        return "same"
    assert cell.peak_bytes is not None
    return f"same, {cell.peak_bytes / cell.budget_bytes:.0%} of {format_bytes(cell.budget_bytes)}"


def summary(cells: list[Cell]) -> str:
    """Return the outcome in a few sentences."""
    run = [cell for cell in cells if not cell.skipped]
    wrong = sum(bool(cell.fault) for cell in run)
    whole = {(c.family, c.dtype) for c in run} - {(c.family, c.dtype) for c in run if c.unplanned}
    return (
        f"{len(run) - wrong} of {len(run)} cells are right, {wrong} wrong: "
        f"{len({c.family for c in run})} architectures, {len({(c.family, c.dtype) for c in run})} "
        f"models, {len(whole)} of them planned as a whole; {len(cells) - len(run)} skipped; "
        f"{sum(c.seconds for c in run) / 60:.0f} minutes in the attached models."
    )


def notes(cells: list[Cell]) -> Iterator[str]:
    """Yield a line for each cell that is wrong, was skipped, or has parts without a plan."""
    for cell in cells:
        if cell.fault:
            yield f"- WRONG: {cell.family} {cell.dtype}, {cell.budget}: {cell.fault}"
    for cell in cells:
        if cell.skipped:
            yield f"- skipped: {cell.family} {cell.dtype}: {cell.skipped}"
    reasons = {(c.family, c.reasons[:3]): c for c in cells if c.reasons and c.budget == "ample"}
    for (family, _), cell in reasons.items():
        if cell.dtype == DTYPES[0]:
            shown = "; ".join(reason[:120] for reason in cell.reasons[:3])
            more = f"; {len(cell.reasons) - 3} more" if len(cell.reasons) > 3 else ""
            yield f"- in part without a plan: {family}: {shown}{more}"


def write_report(out: Path, cells: list[Cell]) -> None:
    """Write both files."""
    names = ["torch", "transformers"]
    names += ["diffusers"] if importlib.util.find_spec("diffusers") is not None else []
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in names},
        },
        "summary": summary(cells),
        "cells": [asdict(cell) for cell in cells],
    }
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        f"# Results under a budget beside those of the plain model, {facts['date']}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['summary']} {facts['hardware']}; {versions}.",
        "",
        "Tiny models of random weights: one forward, and a short greedy generation where there is "
        'one. "same": all results are those of the plain model bit by bit, and the measured peak '
        'is within the budget (its share is given). "unplanned": how often something ran without a '
        'plan; the budget is not promised then. "min": the least budget under which the captured '
        "passes can run; 100%: what they need with all weights resident.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---" * len(HEADINGS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows(cells)),
    ]
    found = list(notes(cells))
    text = "\n".join([*lines, *(["", *found] if found else [])]) + "\n"
    Path(f"{out}.md").write_text(text, encoding="utf-8")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the options; lists come out as lists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", default=",".join(TINY), metavar="LIST")
    parser.add_argument("--dtypes", default=",".join(DTYPES), metavar="LIST")
    parser.add_argument("--limit", default=LIMIT_S, type=float, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    found = parser.parse_args(words)
    try:
        found.architectures = chosen(found.architectures, "--architectures", tuple(TINY))
        found.dtypes = chosen(found.dtypes, "--dtypes", DTYPES)
    except ConfigError as error:
        parser.error(str(error))
    return found


def main(words: list[str] | None = None) -> int:
    """Run all cells; exit status 1 if one is wrong."""
    options = parse(words)
    if options.child:
        run_child(options.child, options.dtypes)
        return 0
    cells: list[Cell] = []
    for family in options.architectures:
        found = run_apart(family, options.dtypes, options.limit)
        cells += found
        wrong = sum(bool(cell.fault) for cell in found)
        print(f"{family}: {len(found)} cells, {wrong} wrong", file=sys.stderr, flush=True)
        if options.out is not None:  # so that an interruption loses nothing
            write_report(options.out, cells)
    for line in notes(cells):
        print(line)
    print(summary(cells))
    return 1 if any(cell.fault for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
