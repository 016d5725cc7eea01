"""The pictures of a report, each with a sentence that says how to read it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_finepage.reporting import drawing
from ds_finepage.reporting.findings import Findings, MemoryRow, memory_row
from ds_finepage.reporting.layers import bytes_by_layer
from ds_finepage.reporting.memory import MemoryKind
from ds_finepage.reporting.results import ObservedPass, Results, Run
from ds_finepage.units import format_bytes, format_ns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture.

    Attributes:
        name: The name of its file, without the suffix.
        title: Stands above it.
        sentence: Says how to read it.
        png: The picture.
    """

    name: str
    title: str
    sentence: str
    png: bytes

    @property
    def base64(self) -> str:
        """The picture as text."""
        return base64.b64encode(self.png).decode("ascii")


def picture_of_arms(results: Results, batch: int) -> Iterator[Picture]:
    """Draw the bytes and the time of a decode step of each arm; nothing for a single run."""
    modelled = results.is_modelled
    runs = [run for run in results.runs if run.batch == batch]
    arms = []
    for run in runs:
        ns = results.time_of(run.decode)
        arms.append((run.arm, run.decode.h2d_bytes, None if run.reason else ns, _why_not(run)))
    if len(arms) < 2 or all(ns is None for _, _, ns, _ in arms):
        return
    within = [run.decode for run in runs if not _why_not(run)]
    least_bytes = [b for step in within if (b := step.lower_bound_bytes) is not None]
    least_ns = [ns for step in within if (ns := step.lower_bound_ns) is not None]
    kind = "modelled" if modelled else "measured"
    title = f"Why: the bytes that a decode step copies, and its time (batch {batch})"
    yield _picture(
        f"arms_b{batch}",
        title,
        (
            "Left: the bytes that each engine copies to the device in a decode step. Right: the "
            f"time of that step, {kind}. Shorter is better, and the fastest engine that keeps to "
            "the budget is red; grey ones do not keep to it. Where copies take most of the time, "
            "an engine that copies less is faster. No plan of one batch at a time gets below the "
            "dashed lines."
        ),
        drawing.draw_arms(
            arms,
            (min(least_bytes, default=None), min(least_ns, default=None) if modelled else None),
            ("copied to the device", f"decode step, {kind},"),
            title,
        ),
    )


def picture_of_budgets(results: Results, batch: int, findings: Findings) -> Iterator[Picture]:
    """Draw the time of a decode step under several budgets; nothing where none was planned."""
    lines = findings.curves.get(batch, {})
    if not any(ns is not None for points in lines.values() for _, ns in points):
        return
    runs = [run for run in results.runs if run.batch == batch]
    budgets = dict.fromkeys(run.budget_bytes for run in runs if run.budget_bytes is not None)
    title = f"Time of a decode step against the budget (batch {batch})"
    yield _picture(
        f"budgets_b{batch}",
        title,
        (
            f"Each line is one policy, simulated on {findings.hardware} under several budgets. "
            "Lower is better. A line begins at the smallest of these budgets under which the "
            "policy can run. The dashed line is the budget of this comparison."
        ),
        drawing.draw_budgets(lines, list(budgets), title),
    )


def pictures_of_pass(
    run: Run, found: ObservedPass, others: Sequence[MemoryRow], hardware: str
) -> Iterator[Picture]:
    """Draw one pass of a run.

    Args:
        run: The run.
        found: The pass.
        others: The same pass by its own policy and by others, simulated.
        hardware: The machine that ``others`` are simulated on.
    """
    name, where = f"{run.name}_{found.name}", f"{run.arm}, batch {run.batch}, {found.name}"
    yield _memory(run, found, name, where)
    yield _lanes(found, name, where)
    layers = bytes_by_layer(found.memgraph)
    if layers:
        title = f"Weights of each layer ({where})"
        missing = sum(nbytes for _, nbytes in layers.values())
        sentence = (
            "The dark part of a bar stays on the device from pass to pass. The light part is "
            f"missing, and each pass copies it: {format_bytes(missing)} in all."
        )
        yield _picture(f"{name}_layers", title, sentence, drawing.draw_layers(layers, title))
    if len(others) > 1:
        yield _beside(run, others, name, where, hardware)


def _picture(name: str, title: str, sentence: str, figure: Figure) -> Picture:
    return Picture(name=name, title=title, sentence=sentence, png=drawing.png(figure))


def _memory(run: Run, found: ObservedPass, name: str, where: str) -> Picture:
    row = memory_row(found.memgraph, found.predicted)
    series = row[1]
    assert series is not None
    title = f"Device memory over time ({where})"
    resident = format_bytes(max(series.nbytes[MemoryKind.RESIDENT], default=0))
    sentence = (
        f"The bytes on the device by their kind, predicted. {resident} of the weights stay there; "
        "the others stream through the part above them. "
    )
    if run.budget_bytes is not None:
        crossed = series.peak_bytes > run.budget_bytes
        verb = "cross" if crossed else "never cross"
        sentence += (
            f"They {verb} the dashed line, the budget; the free part below it is room for tensors "
            "of the calling program and for gaps between buffers. "
        )
    if not any(series.nbytes[MemoryKind.KV]):
        sentence += "A KV cache that grows is one of the inputs and outputs."
    figure = drawing.draw_memory([row], run.budget_bytes, title)
    return _picture(f"{name}_memory", title, sentence.strip(), figure)


def _lanes(found: ObservedPass, name: str, where: str) -> Picture:
    rows = [("predicted", found.predicted)]
    if found.measured is not None:
        rows.append(("measured", found.measured))
    title = f"The lanes over time ({where})"
    last = rows[-1][1]
    sentence = (
        "Green: the device computes. Pale: it waits for a copy, or for the host to issue work. "
        "Blue: the link copies weights to the device. "
        f"The pass takes {format_ns(last.total_ns)}, {rows[-1][0]}, and waits "
        f"{format_ns(last.stall_ns)} of it."
    )
    if found.measured is not None and found.measured.total_ns:
        error = found.predicted.total_ns / found.measured.total_ns - 1
        sentence += f" The prediction is {abs(error):.1%} {'above' if error > 0 else 'below'} that."
    return _picture(f"{name}_lanes", title, sentence, drawing.draw_lanes(rows, title))


def _beside(run: Run, others: Sequence[MemoryRow], name: str, where: str, hardware: str) -> Picture:
    """Draw the memory of one pass by several policies, one below the other."""
    title = f"Device memory over time, beside other policies ({where})"
    sentence = (
        f"The same ops under the same budget by several policies, simulated on {hardware}. "
        "Dark blue weights stay, light blue ones are copied again in every pass. Demand paging "
        "(lru) evicts most weights just before they come round again."
    )
    figure = drawing.draw_memory(others, run.budget_bytes, title)
    return _picture(f"{name}_policies", title, sentence, figure)


def _why_not(run: Run) -> str:
    if run.out_of_memory:
        return "out of memory"
    if run.reason is not None:
        return "did not run"
    if run.peak_bytes is None or run.budget_bytes is None:
        return ""
    return "above the budget" if run.peak_bytes > run.budget_bytes else ""
