"""Plans for fixed rates, so that no plan depends on how busy this machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from ds_finepage import api
from ds_finepage.execution.measure import OpMeter
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.ranks import RankGroup

RATES = HardwareProfile(
    name="fixed",
    source="written down for tests",
    capacity_bytes=1 << 40,
    h2d_bytes_per_s=8e9,
    d2h_bytes_per_s=8e9,
    memory_bytes_per_s=1e10,
    flops_per_s={"default": 2e10},
    launch_ns=20_000,
    transfer_latency_ns=500,
    rank_bytes_per_s=4e9,
    rank_latency_ns=20_000,
)
"""Ops take long beside copies, so a pass has time for the fewest bytes."""


@contextmanager
def fixed_rates() -> Iterator[None]:
    """Plan models that are attached meanwhile for ``RATES``, and for times of ops from them."""
    measured = OpMeter.with_costs

    def untimed(meter: OpMeter, graph: TaskGraph, **options: Any) -> TaskGraph:
        found = measured(meter, graph, **options)
        tasks = (replace(task, time_ns=None) for task in found.tasks)
        return replace(found, tasks=tuple(tasks))

    with (
        mock.patch.object(api, "probe", return_value=RATES),
        mock.patch.object(RankGroup, "with_link", lambda self, profile, *args: profile),
        mock.patch.object(OpMeter, "with_costs", untimed),
    ):
        yield
