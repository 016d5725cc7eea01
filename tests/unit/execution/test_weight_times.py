"""Ops on weights have two times: weights from memory, and weights that were just written."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ds_finepage.execution import weight_times
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.ops import BoundTask
from ds_finepage.execution.trial import Tiles, Trial, scratch_bytes
from ds_finepage.execution.weight_times import WeightTimes, is_timed_later, reads_mostly_weights
from ds_finepage.graph.taskgraph import Task, TaskGraph
from tests.unit.execution.graphs import ACTIVATION, INPUT, WEIGHT, Draft

CPU = torch.device("cpu")
WIDTH = 256


def products(num: int = 1) -> TaskGraph:
    """Return products of one row with a matrix each, and a sum that reads no weight."""
    draft = Draft()
    x = draft.tensor(INPUT, 1, WIDTH)
    for number in range(num):
        w = draft.tensor(WEIGHT, WIDTH, WIDTH + number, name=f"w{number}")
        draft.task("aten.mm.default", x, w, out=(draft.tensor(ACTIVATION, 1, WIDTH + number),))
    draft.task("aten.neg.default", x, out=(draft.tensor(ACTIVATION, 1, WIDTH),))
    return draft.graph()


def given(graph: TaskGraph) -> dict[Any, tuple[Task, bool]]:
    return {task.index: (task, True) for task in graph.tasks if reads_mostly_weights(graph, task)}


class Journal:
    """Records what happens to the caches, and how long an op is said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, took_ns: list[int]) -> None:
        self.events: list[str] = []
        self.flush = torch.zeros(8, dtype=torch.uint8)
        write_again, took = Trial.write_again, iter(took_ns)
        main = threading.get_ident()

        monkeypatch.setattr(weight_times, "Trial", self._trial)

        def written(trial: Trial, buffers: Any) -> None:
            assert threading.get_ident() != main  # as the h2d lane does it
            self.events.append(f"write {buffers}")
            write_again(trial, buffers)

        def timed(bound: BoundTask) -> int:
            size = int(self.flush.sum())  # of the bytes that were flushed since the last op
            self.flush.zero_()
            self.events.append(f"op behind {size}")
            bound.call(*bound.args, **bound.kwargs)
            return next(took)

        monkeypatch.setattr(Trial, "write_again", written)
        monkeypatch.setattr(weight_times, "call_ns", timed)
        monkeypatch.setattr(weight_times, "_wake", self._wake)
        monkeypatch.setattr(weight_times, "CORE_BYTES", 2)

    def _wake(self, dtypes: Any) -> None:
        assert {*dtypes} == {"float32"} and self.flush.all()  # the caches were flushed before
        self.events.append("wake")

    def _trial(self, *given: Any, **more: Any) -> Trial:
        assert more == {"is_timed": True}  # rows for as many experts as there can be
        return Trial(*given, **more)

    def measure(self, graph: TaskGraph, room_bytes: int | None = None) -> dict[Any, Any]:
        times = WeightTimes(graph, Tiles(CPU), frozenset(), self.flush)
        return times.measure(given(graph), room_bytes)


def test_one_flush_serves_all_ops_of_a_round_and_each_warm_run_follows_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = Journal(monkeypatch, [90, 80, 70, 95, 99, 60, 50, 40, 30, 45, 55, 35])
    found = journal.measure(products(2))
    assert found == {0: (70, 30), 1: (60, 35)}
    weights = [b.id for b in products(2).buffers if b.kind is WEIGHT]
    cold = ["wake", "op behind 8", "op behind 0"] * 3
    warm = [event for w in weights for event in (f"write [{w}]", "op behind 2")] * 3
    assert journal.events == cold + warm


def test_products_wake_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_times, "WAKE_NS", 1_000_000)
    made = []
    monkeypatch.setattr(torch, "mm", lambda a, b: made.append((a.dtype, a.shape, b.shape)))
    weight_times._wake({"bfloat16", "int64", "float64"})
    square = (weight_times.WAKE_ROWS, weight_times.WAKE_ROWS)
    assert {*made} == {(torch.bfloat16, square, square)}


def test_slow_ops_run_once_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = weight_times.REPEAT_BELOW_NS + 1
    journal = Journal(monkeypatch, [slow, slow + 5])
    assert journal.measure(products()) == {0: (slow, slow)}  # warm weights cost nothing more
    assert [event for event in journal.events if event.startswith("op")] == [
        "op behind 8",
        "op behind 2",
    ]


def test_scratch_of_a_batch_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = products(3)
    journal = Journal(monkeypatch, [9] * 18)
    most = max(scratch_bytes(graph, task) for task in graph.tasks)
    assert len(journal.measure(graph, room_bytes=2 * most)) == 3
    assert journal.events.count("op behind 8") == 2 * 3  # two batches of three rounds
    journal = Journal(monkeypatch, [9] * 18)
    journal.measure(graph, room_bytes=1)  # each op had room by itself before
    assert journal.events.count("op behind 8") == 3 * 3


def test_weights_that_no_cache_holds_are_never_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = products()
    monkeypatch.setattr(weight_times, "LEAST_FLUSHED_BYTES", 4 * WIDTH * WIDTH - 1)
    assert not is_timed_later(graph, graph.tasks[0])
    journal = Journal(monkeypatch, [9] * 3)
    assert journal.measure(graph) == {0: (9, 9)}
    assert not any(event.startswith("write") for event in journal.events)


def test_only_ops_on_weights_get_a_second_time() -> None:
    product, other = OpMeter(CPU).with_costs(products()).tasks
    assert product.time_ns is not None and product.warm_ns is not None
    assert 0 < product.warm_ns <= product.time_ns
    assert other.time_ns is not None and other.warm_ns is None


def test_rows_are_spread_over_experts_for_timing_and_not_for_the_workspace() -> None:
    draft = Draft()
    rows = draft.tensor(INPUT, 3, 32, dtype="bfloat16")
    matrices = draft.tensor(WEIGHT, 6, 32, 128, dtype="bfloat16")
    ends = draft.tensor(INPUT, 6, dtype="int32")
    out = draft.tensor(ACTIVATION, 3, 128, dtype="bfloat16")
    draft.task("aten._grouped_mm.default", rows, matrices, ends, out=(out,))
    graph = draft.graph()
    found = []
    for is_timed in (False, True):
        trial = Trial(graph, graph.tasks[0], Tiles(CPU), is_timed=is_timed)
        trial.bind(into_place=False)
        found.append(trial._tensor(ends.tensor).tolist())
    assert found == [[3] * 6, [0, 1, 1, 2, 2, 3]]
