"""Published ZeRO-Inference throughput, reproduced by the simulated ``zero``.

OPT-30B, prompt 4, 10 new tokens, V100 with 32 GB (ZeRO-Inference, 2022). All three rows fit a step
that takes as long as the bytes that are not pinned at 10.1e9 bytes/s, which is less than what the
shipped profile says of the link: that is the rate to simulate with.
"""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.capture.from_config import capture_config
from ds_finepage.capture.models import load_model_config
from ds_finepage.checker.checker import check
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.zero import (
    EVERY_PARAMETER,
    ZeroSettings,
    authors_settings,
    plan_zero_with,
)
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import simulate

LINK_BYTES_PER_S = 10.1e9
CARD = dataclasses.replace(load_profile("v100-32gb"), h2d_bytes_per_s=LINK_BYTES_PER_S)
ALIGNMENT = 512
PROMPT_AND_HALF = 4 + 5  # rows of the KV cache at the middle of the ten tokens

ROWS = [  # batch, elements that are pinned, tokens/s
    (256, 0, 43),
    (128, 10 * 10**9, 32),
    (64, 12 * 10**9, 18),
]


def decode(batch: int) -> TaskGraph:
    config = load_model_config("opt-30b")
    return capture_config(config, phase="decode", batch=batch, seq=PROMPT_AND_HALF)


def step_seconds(graph: TaskGraph, settings: ZeroSettings, num_pinned: int) -> float:
    if num_pinned:
        settings = dataclasses.replace(
            settings,
            param_persistence_threshold=EVERY_PARAMETER,
            model_persistence_threshold=num_pinned,
        )
    arena_bytes = CARD.capacity_bytes - non_arena_bytes(graph, ALIGNMENT)
    memgraph = plan_zero_with(Problem(graph, arena_bytes, ALIGNMENT), settings)
    return simulate(check(memgraph), CARD).total_ns / 1e9


@pytest.mark.parametrize("by_authors", [False, True])
@pytest.mark.parametrize(("batch", "num_pinned", "tokens_per_s"), ROWS)
def test_published_throughput(
    batch: int, num_pinned: int, tokens_per_s: float, by_authors: bool
) -> None:
    graph = decode(batch)
    settings = authors_settings(graph) if by_authors else ZeroSettings()
    predicted = batch / step_seconds(graph, settings, num_pinned)
    assert predicted == pytest.approx(tokens_per_s, rel=0.05)


def test_pinning_pays_as_published_at_equal_batch() -> None:
    """60 of 60 GB against 36 of 60 GB a step: 1.67."""
    graph = decode(64)
    settings = authors_settings(graph)
    full = step_seconds(graph, settings, 0)
    pinned = step_seconds(graph, settings, 12 * 10**9)
    assert full / pinned == pytest.approx(1.67, rel=0.05)
