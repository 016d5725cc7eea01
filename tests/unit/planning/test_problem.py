"""Results that the problems of one search share."""

from __future__ import annotations

import dataclasses
import gc
import weakref

from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.problem import Problem
from tests.unit.planning.sketches import chain


def test_the_problems_of_a_search_derive_a_result_once() -> None:
    problem, calls = Problem(chain(4), 1024), []

    def make(graph: TaskGraph) -> str:
        calls.append(graph)
        return f"{graph.name} {len(calls)}"

    other = problem.of(dataclasses.replace(problem.graph, name="other"))
    smaller = dataclasses.replace(problem, arena_bytes=512)
    first = problem.once(("a", 1), make)
    assert smaller.once(("a", 1), make) is first
    assert problem.once(("a", 2), make) != first
    assert other.once(("a", 1), make).startswith("other")
    assert len(calls) == 3


def test_another_search_derives_its_own() -> None:
    one, two = Problem(chain(4), 1024), Problem(chain(4), 1024)
    assert one == two
    assert one.once(("a",), lambda _: 1) == 1
    assert two.once(("a",), lambda _: 2) == 2


def test_a_pass_lives_as_long_as_what_is_derived_from_it() -> None:
    problem = Problem(chain(4), 1024)
    graph = chain(5)
    problem.of(graph).once(("a",), lambda _: 1)
    seen = weakref.ref(graph)
    del graph
    gc.collect()
    assert seen() is not None, "another pass could get its id"
