"""The best batch is found by few looks, and is as good as an exhaustive search finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_finepage import batches
from ds_finepage.batches import BatchPoint, Search, costs_between, find_best
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.modeller import Costs
from tests.unit.planning.finepage.test_search import machine

MOST = 300
PROFILE = machine(h2d=1e9)
PROMPT, NEW = 96, 33


def growing(**changed: float) -> Callable[[int], Costs]:
    """Costs that grow in proportion; a batch of 40 leaves no byte of the budget."""
    kv, ns = changed.get("kv", 2e7), changed.get("ns", 1e7)

    def look(batch: int) -> Costs:
        return Costs(
            prefill_ns=100 * ns * batch,
            prefill_missing_bytes=kv * (batch - 40),
            step_ns=ns * (changed.get("wait", 5) + batch / 10),
            step_missing_bytes=kv * (batch - 40),
            least_bytes=changed.get("least", 1e6) * batch,
            kv_bytes=kv * batch,
            host_bytes=2e8 + 1.25 * kv * batch,  # with room behind the rows
        )

    return look


class Made:
    """Makes modellers with given costs; their plans have room up to a batch of ``room``."""

    def __init__(
        self, look: Callable[[int], Costs], host: int | None = None, room: int = MOST
    ) -> None:
        self._look, self._host, self._room = look, host, room
        self.asked: list[tuple[int, str]] = []
        self.planned: list[tuple[int, str]] = []

    def __call__(self, batch: int, kv_cache: str) -> Any:
        self.asked.append((batch, kv_cache))

        def planned(policy: str) -> Any:
            self.planned.append((batch, kv_cache))
            if batch > self._room:
                raise PlanInfeasibleError("no room", 7)
            figures = SimpleNamespace(predicted_ns=10**9)
            return SimpleNamespace(figures=figures), SimpleNamespace(figures=figures)

        return SimpleNamespace(
            costs=lambda: self._look(batch),
            planned=planned,
            profile=PROFILE,
            budget_bytes=10**9,
            weight_bytes=2 * 10**8,
            host_memory_bytes=self._host,
            new_tokens=NEW,
            decode=SimpleNamespace(seq=PROMPT + NEW - 1),
        )


def all_points(made: Made, kv_cache: str = "auto", most: int = MOST) -> list[BatchPoint]:
    """Look at every batch."""
    search = Search(made, kv_cache)
    for batch in range(1, most + 1):
        search._look(batch)
    search.look_around(most)
    return search.points


@given(
    kv=st.floats(1e5, 1e9),
    ns=st.floats(1e4, 1e9),
    least=st.floats(1e5, 1e9),
    host=st.none() | st.integers(10**9, 10**11),
)
def test_few_looks_find_what_all_would(
    kv: float, ns: float, least: float, host: int | None
) -> None:
    look = growing(kv=kv, ns=ns, least=least)
    search = Search(Made(look, host), "auto")
    search.look_around(MOST)
    points = search.points
    assert len(search.looks) <= 8 and search.batch in search.looks
    assert [p.batch for p in points] == list(range(1, MOST + 1))
    best = max(p.tokens_per_s for p in all_points(Made(look, host)))
    assert points[search.batch - 1].tokens_per_s >= 0.98 * best


@pytest.mark.parametrize("wait", [5, 0.5])
def test_of_batches_that_are_about_as_good_the_smallest_is_the_best(wait: float) -> None:
    look = growing(kv=1e4, wait=wait)  # tokens a second hardly grow from some batch on
    search = Search(Made(look), "auto")
    search.look_around(MOST)
    speeds = [p.tokens_per_s for p in search.points]
    assert speeds[-1] == max(speeds) and search.batch < MOST // 2
    nearly = [p.batch for p in search.points if p.tokens_per_s >= batches.NEARLY * max(speeds)]
    assert nearly[0] <= search.batch <= batches.NEAR * nearly[0]


def test_costs_lie_on_the_line_between_the_looks_beside_a_batch() -> None:
    one, eight, twenty = (Costs(*[n] * 7) for n in (10, 24, 60))
    looks = {1: one, 8: eight, 20: twenty}
    found = {n: costs_between(looks, n)[0] for n in (1, 2, 8, 14, 20, 24)}
    assert found == {1: 10, 2: 12, 8: 24, 14: 42, 20: 60, 24: 72}
    assert costs_between({1: one}, 9) == one


def test_a_batch_without_room_makes_no_tokens() -> None:
    points = all_points(Made(growing(least=1e8)))
    assert points[9].tokens_per_s > 0 == points[10].tokens_per_s


def test_host_memory_counts_the_rows_of_a_cache_that_is_there() -> None:
    enough = int(2e8 + 1.25 * 2e9)  # for a batch of 100
    for host, kv_cache, fits in (
        (enough, "auto", True),
        (enough - 1, "auto", False),
        (enough - 1, "host", False),
        (enough - 1, "device", True),
        (None, "auto", True),
    ):
        found = all_points(Made(growing(), host), kv_cache)[99]
        assert bool(found.tokens_per_s) is fits, (host, kv_cache)


@pytest.mark.parametrize(("host", "fits"), [(0.0, True), (1e9, False)])
def test_a_disk_has_weights_but_none_of_a_host_that_computes(
    host: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"host_bytes_per_s": host, "host_flops_per_s": host}
    profile = dataclasses.replace(PROFILE, disk_bytes_per_s=1e9, **rates)
    monkeypatch.setitem(globals(), "PROFILE", profile)
    found = all_points(Made(growing(), 10**8), "device")[0]
    assert bool(found.tokens_per_s) is fits


def test_a_pass_takes_the_time_of_its_tasks_or_of_its_copies() -> None:
    costs, found = growing()(50), all_points(Made(growing()))[49]
    assert found.step_ns == costs.step_missing_bytes  # a byte takes a nanosecond
    assert found.first_token_ns == costs.prefill_ns
    total_ns = found.first_token_ns + (NEW - 1) * found.step_ns
    assert found.tokens_per_s == pytest.approx(50 * NEW * 1e9 / total_ns)


@pytest.mark.parametrize(
    ("kv", "kv_cache", "looked", "planned"),
    [
        (1e8, "auto", "host", "host"),  # a cache that competes
        (1e4, "auto", "host", "auto"),
        (2e7, "device", "device", "device"),
        (1e4, "host", "host", "host"),
    ],
)
def test_a_plan_has_the_cache_where_a_run_has_it(
    kv: float, kv_cache: str, looked: str, planned: str
) -> None:
    made = Made(growing(kv=kv))
    find_best(made, kv_cache=kv_cache, most=MOST)
    assert [place for _, place in made.planned] == [planned]
    assert {place for _, place in made.asked} == {looked, planned}


def test_a_batch_whose_plan_has_no_room_is_followed_by_smaller_ones() -> None:
    made = Made(growing(), room=30)
    found, tried = find_best(made), [batch for batch, _ in made.planned]
    assert found.batch == tried[-1] <= 30 < tried[-2] and tried == sorted(tried, reverse=True)
    assert max(p.batch for p in found.curve) < tried[-2]
    assert len(made.asked) == len(set(made.asked))  # no batch is captured twice
    assert found.planned.tokens_per_s == pytest.approx(found.batch)


def test_a_curve_has_four_significant_bits() -> None:
    found = [p.batch for p in find_best(Made(growing(least=1e7)), most=MOST).curve]
    assert found == [*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 101, 8)]


def test_one_sequence_without_room_is_refused_with_the_least_budget() -> None:
    with pytest.raises(PlanInfeasibleError) as caught:
        find_best(Made(growing(), room=0))
    assert caught.value.min_budget_bytes == 7


def test_the_number_of_sequences_has_a_limit() -> None:
    assert find_best(Made(growing()), most=5).batch == 5
    assert find_best(Made(growing()), most=1).batch == 1
    with pytest.raises(ConfigError, match="the most sequences: 0"):
        find_best(Made(growing()), most=0)
