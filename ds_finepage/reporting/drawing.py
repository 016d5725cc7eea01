"""Pictures by matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ds_finepage.errors import ConfigError
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Timeline
from ds_finepage.reporting.findings import BudgetLine
from ds_finepage.reporting.memory import MemoryKind, MemorySeries, stalls
from ds_finepage.units import BYTE_UNITS, NS_PER_S, TIME_UNITS, format_bytes, format_ns, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXTRA = "report"
PACKAGES = ("jinja2", "matplotlib")
DPI = 130
WIDTH = 9.6  # inches

MOST_LEVEL_LABELS = 10

# The colours of Okabe and Ito, which people with any kind of colour vision can tell apart.
BLUE, SKY, ORANGE, GREEN, VERMILION, PURPLE, YELLOW, GREY, INK = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
    "#9A9A9A",
    "#222222",
)
KIND_COLOURS = {
    MemoryKind.RESIDENT: BLUE,
    MemoryKind.STREAMED: SKY,
    MemoryKind.KV: ORANGE,
    MemoryKind.ACTIVATION: GREEN,
    MemoryKind.WORKSPACE: PURPLE,
    MemoryKind.OTHER: GREY,
}
LANE_COLOURS = {
    Lane.COMPUTE: GREEN,
    Lane.H2D: BLUE,
    Lane.D2H: PURPLE,
    Lane.RANKS: ORANGE,
    Lane.DISK: YELLOW,
    Lane.HOST: SKY,
}
LANES = (Lane.D2H, Lane.H2D, Lane.COMPUTE)  # from below; those that few plans use are above
LANE_LABELS = {
    Lane.COMPUTE: "compute",
    Lane.H2D: "to the device",
    Lane.D2H: "to the host",
    Lane.RANKS: "between ranks",
    Lane.DISK: "from the disk",
    Lane.HOST: "on the host",
}
LINES = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, GREY, INK)
MARKERS = "osD^vP*X"
STALL_COLOUR = "#F7D9C8"
FAINT = "#CFCFCF"


def require_packages(purpose: str) -> None:
    """Refuse to go on without the packages of the extra "report".

    Args:
        purpose: The option or command that needs them.

    Raises:
        ConfigError: One of them is not installed.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{purpose} needs {' and '.join(missing)}, which {verb} not installed. "
            f"Run: pip install 'ds_finepage[{EXTRA}]'"
        )


def png(figure: Figure) -> bytes:
    """Return a picture as a file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def draw_memory(
    rows: Sequence[tuple[str, MemorySeries | None, str]], budget_bytes: int | None, title: str
) -> Figure:
    """Draw the device memory over time for several policies, one below the other.

    Args:
        rows: The name of each, its bytes over time, and a remark, such as why there is no plan.
        budget_bytes: The limit on all device bytes; None draws none.
        title: Stands above.
    """
    figure, all_axes = _figure(title, len(rows), height=1.0 + 2.1 * len(rows))
    known = [series for _, series, _ in rows if series is not None]
    unit, name = unit_for(max([budget_bytes or 0, *(s.peak_bytes for s in known)]), BYTE_UNITS)
    last_ns = max((s.at[-1] for s in known), default=1)
    time_unit, time_name = unit_for(last_ns, TIME_UNITS)
    for axes, (label, series, remark) in zip(all_axes, rows, strict=True):
        _caption(axes, f"{label}: {remark}" if remark else label)
        axes.set_ylabel(name)
        axes.set_xlim(0, last_ns / time_unit)
        if series is None:
            axes.set_yticks([])
            continue
        _stack(axes, [x / time_unit for x in series.at], series, unit)
        _budget_line(axes, budget_bytes, unit, max(s.peak_bytes for s in known))
        axes.axvline(series.at[-1] / time_unit, color=INK, linewidth=1)
        axes.set_xlim(0, last_ns / time_unit * 1.01)
    all_axes[-1].set_xlabel(f"time in {time_name}")
    first = next((a for a, row in zip(all_axes, rows, strict=True) if row[1] is not None), None)
    if first is not None:
        handles, labels = first.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_lanes(rows: Sequence[tuple[str, Timeline]], title: str) -> Figure:
    """Draw the lanes of timelines over the same time, with the stalls of the compute lane.

    Args:
        rows: The name of each timeline, and the timeline.
        title: Stands above.
    """
    figure, all_axes = _figure(title, len(rows), height=0.9 + 1.45 * len(rows))
    width = max([1, *(timeline.total_ns for _, timeline in rows)])
    unit, name = unit_for(width, TIME_UNITS)
    for axes, (label, timeline) in zip(all_axes, rows, strict=True):
        waits = f"{format_ns(timeline.total_ns)}, waits {_share(timeline.stall_ns, timeline)}"
        _caption(axes, f"{label}: {waits}")
        used = {span.lane for span in timeline.spans}
        lanes = (*LANES, *(lane for lane in Lane if lane in used and lane not in LANES))
        for row, lane in enumerate(lanes):
            spans = [(s.start_ns, s.end_ns) for s in timeline.spans if s.lane is lane]
            _bars(axes, row, _joined(spans, width), unit, color=LANE_COLOURS[lane])
        waiting = _joined(stalls(timeline), width)
        _bars(axes, LANES.index(Lane.COMPUTE), waiting, unit, color=STALL_COLOUR)
        axes.axvline(timeline.total_ns / unit, color=INK, linewidth=1)
        axes.set_yticks(range(len(lanes)), [LANE_LABELS[lane] for lane in lanes])
        axes.set_ylim(-0.6, len(lanes) - 0.4)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, width / unit * 1.005)
        axes.grid(axis="y", visible=False)
    all_axes[-1].set_xlabel(f"time in {name}")
    _lane_legend(figure)
    return figure


def draw_layers(layers: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Draw the bytes of each layer that stay on the device, and those that each pass reloads.

    Args:
        layers: Both by the name of the layer, in the order of the model.
        title: Stands above.
    """
    figure, (axes,) = _figure(title, 1, height=3.4)
    most = max([1, *map(sum, layers.values())])
    unit, name = unit_for(most, BYTE_UNITS)
    at = list(range(len(layers)))
    kept = [nbytes / unit for nbytes, _ in layers.values()]
    missing = [nbytes / unit for _, nbytes in layers.values()]
    labels = [name.rpartition(".")[2] for name in layers]
    axes.bar(at, kept, color=BLUE, label="stays on the device", width=0.8)
    axes.bar(at, missing, bottom=kept, color=SKY, hatch="///", label="missing", width=0.8)
    for container in axes.containers[1]:
        container.set_edgecolor("white")
        container.set_linewidth(0)
    step = max(1, -(-len(layers) // 36))
    shown = [i for i, label in enumerate(labels) if not label.isdecimal() or i % step == 0]
    axes.set_xticks(shown, [labels[i] for i in shown])
    rotates = len(shown) > MOST_LEVEL_LABELS
    axes.tick_params(axis="x", labelrotation=90 if rotates else 0, length=0)
    axes.set_xlabel("layer")
    axes.set_ylabel(f"weights in {name}")
    axes.grid(axis="x", visible=False)
    _legend(axes)
    return figure


def draw_arms(
    arms: Sequence[tuple[str, float | None, float | None, str]],
    bounds: tuple[float | None, float | None],
    names: tuple[str, str],
    title: str,
) -> Figure:
    """Draw the bytes that each arm copies a step, beside the time of the step.

    Args:
        arms: The name of each arm, its bytes, its nanoseconds, and a remark where it did not run.
        bounds: The least bytes and the least time of any plan; None draws none.
        names: Labels of the two axes, which get their units.
        title: Stands above.
    """
    figure, all_axes = _figure(title, 1, columns=2, height=1.3 + 0.36 * len(arms), share="y")
    best_ns = min((ns for _, _, ns, remark in arms if ns and not remark), default=None)
    at = list(range(len(arms)))
    of_columns = ([copied for _, copied, _, _ in arms], [ns for _, _, ns, _ in arms])
    for column, (axes, values) in enumerate(zip(all_axes, of_columns, strict=True)):
        largest = max([1.0, *(value for value in values if value is not None)])
        unit, unit_name = unit_for(int(largest), (BYTE_UNITS, TIME_UNITS)[column])
        form = (format_bytes, format_ns)[column]
        colours = [
            FAINT if remark else VERMILION if ns == best_ns else SKY for _, _, ns, remark in arms
        ]
        axes.barh(at, [(value or 0) / unit for value in values], color=colours, height=0.7)
        for row, value in enumerate(values):
            text = "" if value is None else form(int(value))
            if column == 1 and arms[row][3]:
                text = f"{text}, {arms[row][3]}" if text else arms[row][3]
            axes.annotate(f" {text}", ((value or 0) / unit, row), va="center", fontsize=8)
        bound = bounds[column]
        if bound is not None:
            axes.axvline(bound / unit, color=INK, linestyle="--", linewidth=1)
            axes.annotate(
                "least possible ",
                (bound / unit, -0.75),
                ha="left" if bound < largest / 2 else "right",
                va="bottom",
                fontsize=8,
                annotation_clip=False,
            )
        axes.set_xlim(0, largest / unit * (1.3, 1.6)[column])
        axes.set_xlabel(f"{names[column]} in {unit_name}")
        axes.grid(axis="y", visible=False)
    all_axes[0].set_yticks(at, [arm[0] for arm in arms])
    all_axes[0].invert_yaxis()
    return figure


def draw_budgets(lines: Mapping[str, BudgetLine], compared: Sequence[int], title: str) -> Figure:
    """Draw the time of a decode step against the budget.

    Args:
        lines: A line for each policy.
        compared: Budgets to mark, in bytes.
        title: Stands above.
    """
    figure, (axes,) = _figure(title, 1, height=4.2)
    budgets = [b for points in lines.values() for b, _ in points] + list(compared)
    times = [ns for points in lines.values() for _, ns in points if ns is not None]
    unit, name = unit_for(max(budgets, default=1), BYTE_UNITS)
    time_unit, time_name = unit_for(max([1, *times]), TIME_UNITS)
    for number, (policy, points) in enumerate(lines.items()):
        axes.plot(
            [budget / unit for budget, _ in points],
            [float("nan") if ns is None else ns / time_unit for _, ns in points],
            color=LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            label=policy,
            linewidth=2.4 if policy == "finepage" else 1.4,
        )
    for budget in compared:
        axes.axvline(budget / unit, color=INK, linestyle="--", linewidth=1)
        text = f" compared: {format_bytes(budget)}"
        axes.annotate(
            text,
            (budget / unit, 1.0),
            xycoords=axes.get_xaxis_transform(),
            va="bottom",
            ha="center",
            fontsize=8,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"device budget in {name}")
    axes.set_ylabel(f"decode step in {time_name}")
    _legend(axes)
    return figure


def draw_batches(
    points: Sequence[tuple[int, float, int, int]], best: tuple[int, float], title: str
) -> Figure:
    """Draw speed against the batch, and below it how long a user waits.

    Args:
        points: Batch, tokens a second, and nanoseconds of the prefill and of a step.
        best: Batch and tokens a second of the one that is marked.
        title: Stands above.
    """
    figure, (speed, waits) = _figure(title, 2, height=5.4)
    batches = [point[0] for point in points]
    speed.plot(batches, [point[1] for point in points], color=BLUE, label="at most")
    speed.plot(*best, color=VERMILION, marker=MARKERS[0], linestyle="", label="best, by plan")
    speed.set_ylabel("tokens a second")
    speed.annotate(f"batch {best[0]}: {best[1]:.4g} ", best, fontsize=8.5, ha="right")
    for column, (name, color) in enumerate((("first token", ORANGE), ("a step", GREEN)), 2):
        seconds = [point[column] / NS_PER_S for point in points]
        waits.plot(batches, seconds, color=color, label=f"{name}, at least")
    waits.set_yscale("log")
    waits.set_ylabel("seconds")
    waits.set_xscale("log", base=2)
    waits.xaxis.set_major_formatter("{x:.0f}")
    waits.set_xlabel("sequences in a batch")
    for axes in (speed, waits):
        axes.axvline(best[0], color=INK, linestyle="--", linewidth=1)
        _legend(axes)
    return figure


# Parts of pictures.


def _figure(
    title: str, rows: int, *, height: float, columns: int = 1, share: str = "x"
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    found = figure.subplots(
        rows, columns, squeeze=False, sharex=share == "x", sharey=share == "y"
    ).flatten()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    for axes in found:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8.5)
        axes.xaxis.label.set_size(9.5)
        axes.yaxis.label.set_size(9.5)
    return figure, list(found)


def _stack(axes: Axes, at: Sequence[float], series: MemorySeries, unit: int) -> None:
    """Draw the kinds that have bytes, one upon the other, each value until the next position."""
    kinds = [kind for kind in MemoryKind if any(series.nbytes[kind])]
    below = [0.0] * len(at)
    for kind in kinds:
        top = [low + nbytes / unit for low, nbytes in zip(below, series.nbytes[kind], strict=True)]
        axes.fill_between(
            at,
            below,
            top,
            step="post",
            color=KIND_COLOURS[kind],
            linewidth=0,
            label=kind.value,
        )
        below = top


def _budget_line(axes: Axes, budget_bytes: int | None, unit: int, peak_bytes: int) -> None:
    axes.set_ylim(0, max(budget_bytes or 0, peak_bytes, 1) / unit * 1.14)
    if budget_bytes is not None:
        line = axes.axhline(budget_bytes / unit, color=INK, linestyle="--", linewidth=1.3)
        line.set_label("budget")
        right = axes.get_yaxis_transform()
        text = f"budget {format_bytes(budget_bytes)} "
        axes.annotate(
            text, (1, budget_bytes / unit), xycoords=right, ha="right", va="bottom", fontsize=8
        )


def _joined(spans: Sequence[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """Return spans; those that are too close to be seen apart in a picture are joined."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= width // 20_000 and end > start:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def _bars(axes: Axes, row: int, spans: Sequence[tuple[int, int]], unit: int, *, color: str) -> None:
    bars = [(start / unit, (end - start) / unit) for start, end in spans]
    # Without snapping, many thin bars look as dense as they are.
    axes.broken_barh(bars, (row - 0.4, 0.8), color=color, linewidth=0, snap=False)


def _lane_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=LANE_COLOURS[Lane.COMPUTE], label="computes"),
        Patch(color=STALL_COLOUR, label="waits"),
        Patch(color=LANE_COLOURS[Lane.H2D], label="copies to the device"),
        Patch(color=LANE_COLOURS[Lane.D2H], label="copies to the host"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def _legend(axes: Axes) -> None:
    """Put the legend to the right, in the order in which things are stacked."""
    handles, labels = axes.get_legend_handles_labels()
    handles, labels = handles[::-1], labels[::-1]
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8.5
    )


def _caption(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9.5, color=INK)


def _share(ns: int, timeline: Timeline) -> str:
    return f"{ns / timeline.total_ns:.0%}" if timeline.total_ns else "0%"
