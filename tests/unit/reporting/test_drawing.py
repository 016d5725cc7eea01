"""The pictures have the right data in the right units; how they look is not tested."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from ds_finepage.errors import ConfigError
from ds_finepage.graph.memgraph import Lane
from ds_finepage.reporting import drawing
from ds_finepage.reporting.memory import memory_over_time, stalls
from ds_finepage.units import KIB, MIB
from tests.unit.reporting.folders import planned

MS = 10**6


def texts(axes: Any) -> list[str]:
    """All texts in a picture: titles, labels, ticks, annotations."""
    found = [axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")]
    found += [t.get_text() for t in (*axes.texts, *axes.get_yticklabels())]
    return [text.strip() for text in found if text]


def bars(axes: Any, row: int) -> float:
    """The summed length of the bars of a row of lanes."""
    total = 0.0
    for collection in axes.collections:
        for path in collection.get_paths():
            x, y = path.vertices[:4].T
            if abs(y.mean() - row) < 0.3:
                total += x.max() - x.min()
    return total


def test_memory_is_stacked_below_the_budget() -> None:
    found = planned()
    series = memory_over_time(found.memgraph, found.timeline)
    figure = drawing.draw_memory([("finepage", series, "1 ms")], 2 * KIB, "memory of a pass")
    (axes,) = figure.axes
    assert figure.get_suptitle() == "memory of a pass"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["resident weights", "streamed weights", "activations", "budget"]
    top = max(c.get_datalim(axes.transData).y1 for c in axes.collections)
    assert top == pytest.approx(series.peak_bytes / KIB)
    assert {"finepage: 1 ms", "KiB", "budget 2.00 KiB"} <= set(texts(axes))
    assert axes.lines[0].get_ydata()[0] == 2 and axes.get_ylim()[1] > 2


def test_the_bars_of_the_lanes_are_as_long_as_the_work() -> None:
    found = planned("horizon").timeline
    slower = replace(found, total_ns=2 * found.total_ns)
    figure = drawing.draw_lanes([("predicted", found), ("measured", slower)], "lanes")
    first, second = figure.axes
    compute = drawing.LANES.index(Lane.COMPUTE)
    waiting = sum(end - begin for begin, end in stalls(found))
    assert bars(first, compute) == pytest.approx((found.compute_ns + waiting) / 1000, rel=0.01)
    assert 0 < bars(first, drawing.LANES.index(Lane.H2D)) <= found.total_ns / 1000
    assert first.get_xlim() == second.get_xlim()  # so that the lengths can be compared
    assert first.get_xlim()[1] >= slower.total_ns / 1000
    assert texts(first)[0].startswith("predicted: ") and "waits" in texts(first)[0]
    assert second.get_xlabel() == "time in us"


def test_a_policy_without_a_plan_says_why() -> None:
    found = planned()
    series = memory_over_time(found.memgraph, found.timeline)
    rows = [("finepage", series, "1 ms"), ("lru", None, "no plan. Too small.")]
    drawn, empty = drawing.draw_memory(rows, 2 * KIB, "").axes
    assert drawn.collections and not empty.collections
    assert "lru: no plan. Too small." in texts(empty)


def test_layers_are_bars_of_two_parts() -> None:
    layers = {"m.embed": [0, MIB], "m.0": [2 * MIB, MIB]}
    (axes,) = drawing.draw_layers(layers, "").axes
    kept, missing = axes.containers
    assert [bar.get_height() for bar in kept] == [0, 2]
    assert [(bar.get_y(), bar.get_height()) for bar in missing] == [(0, 1), (2, 1)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["embed", "0"]


def test_the_fastest_arm_within_the_budget_stands_out() -> None:
    arms = [
        ("plain", 0, MS, "above the budget"),
        ("zero", 8 * MIB, 9 * MS, ""),
        ("finepage", 4 * MIB, 5 * MS, ""),
        ("other", None, None, "needs a package"),
    ]
    figure = drawing.draw_arms(arms, (3 * MIB, 4 * MS), ("copied", "step"), "")
    copied, time = figure.axes
    assert [bar.get_width() for bar in copied.patches] == [0, 8, 4, 0]
    assert [bar.get_width() for bar in time.patches] == [1, 9, 5, 0]
    colours = [bar.get_facecolor() for bar in time.patches]
    assert len(set(colours)) == 3 and colours[0] == colours[3]
    assert {"1.00 ms, above the budget", "5.00 ms", "needs a package"} <= set(texts(time))
    assert [axes.lines[0].get_xdata()[0] for axes in figure.axes] == [3, 4]


def test_a_line_has_a_gap_where_there_is_no_plan() -> None:
    lines = {"finepage": [(MIB, None), (2 * MIB, 3 * MS)]}
    (axes,) = drawing.draw_budgets(lines, [2 * MIB], "").axes
    line, compared = axes.lines
    (low, high), (x, y) = line.get_ydata(), (line.get_xdata()[1], line.get_ydata()[1])
    assert low != low and high == 3 and (x, y) == (2, 3)
    assert compared.get_xdata()[0] == 2 and "compared: 2.00 MiB" in texts(axes)


@pytest.mark.parametrize("name", drawing.PACKAGES)
def test_a_missing_package_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    drawing.require_packages("report")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"report needs {name}.*'ds_finepage\[report\]'"):
        drawing.require_packages("report")


def test_batches_show_speed_above_and_waiting_below() -> None:
    points = [(1, 2.0, MS, MS), (2, 3.5, 2 * MS, 3 * MS), (8, 3.0, 8 * MS, 20 * MS)]
    speed, waits = drawing.draw_batches(points, (2, 3.4), "").axes
    at_most, best = speed.get_lines()[:2]
    assert at_most.get_xydata().tolist() == [[1, 2.0], [2, 3.5], [8, 3.0]]
    assert best.get_xydata().tolist() == [[2, 3.4]] and "batch 2: 3.4" in texts(speed)
    first, step = waits.get_lines()[:2]
    assert list(first.get_ydata()) == [0.001, 0.002, 0.008]
    assert list(step.get_ydata()) == [0.001, 0.003, 0.02]
    assert (waits.get_ylabel(), waits.get_xlabel()) == ("seconds", "sequences in a batch")
