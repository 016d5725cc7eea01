"""Policy horizon-published: the published algorithm without two of the repairs."""

from __future__ import annotations

import random

from ds_finepage.checker.checker import check
from ds_finepage.planning.horizon import plan_horizon, plan_horizon_published
from ds_finepage.planning.problem import Problem
from tests.property.token_interpreter import run_random_order
from tests.unit.planning.sketches import chain, names, sketch
from tests.unit.planning.test_horizon import vacated

UNIT = 64
AGAIN = sketch("w0:64 w1:64 w2:64", "w0 ->", "w1 ->", "w2 ->", "w0 ->", "w1 ->")


def test_the_published_algorithm_copies_clean_weights_to_the_host() -> None:
    problem = Problem(AGAIN, 2 * UNIT, UNIT)
    repaired, published = check(plan_horizon(problem)), check(plan_horizon_published(problem))
    assert repaired.offloaded_bytes == repaired.host_bytes == 0
    assert published.policy == "horizon-published"
    assert published.offloaded_bytes == published.host_bytes == UNIT
    assert published.reloaded_bytes == repaired.reloaded_bytes
    copied = [n for n in names(published) if n.startswith("offload")]
    assert copied == [n.replace("drop", "offload") for n in vacated(repaired)[: len(copied)]]


def test_the_published_algorithm_copies_a_buffer_each_time() -> None:
    """The repaired one has its host copy since the first time."""
    graph = sketch(
        "w0:64 w1:64 a:64", *("-> a", "w0 ->", "w1 ->", "a ->", "w0 ->", "w1 ->", "a ->")
    )
    problem = Problem(graph, 2 * UNIT, UNIT)
    repaired, published = check(plan_horizon(problem)), check(plan_horizon_published(problem))
    assert repaired.offloaded_bytes == UNIT
    assert published.offloaded_bytes > repaired.offloaded_bytes
    for seed in range(20):
        run_random_order(published, random.Random(seed))


def test_the_published_algorithm_does_not_copy_what_the_pass_needs_no_more() -> None:
    published = check(plan_horizon_published(Problem(chain(9), 3 * UNIT, UNIT)))
    assert published.offloaded_bytes == 0
