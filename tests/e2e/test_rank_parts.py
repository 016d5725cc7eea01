"""Ranks on one machine that hold each weight together, over gloo: see ``part_worker.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ranks import found_on, test_an_exception_on_one_rank_ends_the_others

__all__ = ["test_an_exception_on_one_rank_ends_the_others"]

WORKER = Path(__file__).with_name("part_worker.py")


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> list[dict[str, Any]]:
    return found_on(2, "all", tmp_path_factory.mktemp("parts"), environment, WORKER)


@pytest.fixture(scope="module")
def four(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> list[dict[str, Any]]:
    return found_on(4, "more", tmp_path_factory.mktemp("four"), environment, WORKER)


def check_family(found: list[dict[str, Any]], rel: float) -> None:
    """Hold what the ranks have found about one family against the plain model."""
    for each in found:
        assert each["equal"] == {"0.7": True, "0.0": True, "1.0": True}
        assert each["unplanned"] == []
        assert min(each["link"]) > 0
        assert each["share of host memory"] == pytest.approx(1 / len(found), rel=rel)
    assert len({each["reloaded"] for each in found}) == 1


@pytest.mark.parametrize("name", ("llama", "gpt2", "qwen3"))
def test_results_are_those_of_the_plain_model_under_every_budget(
    ranks: list[dict[str, Any]], name: str
) -> None:
    check_family([each[name] for each in ranks], 0.01)


@pytest.mark.parametrize("name", ("odd llama", "mixtral"))
def test_four_ranks_run_under_every_budget(four: list[dict[str, Any]], name: str) -> None:
    check_family([each[name] for each in four], 0.02)


def test_four_ranks_run_a_checkpoint_that_stock_has_partitioned(four: list[dict[str, Any]]) -> None:
    for found in (each["loaded"] for each in four):
        assert found["equal"] and found["unplanned"] == []
        assert found["share of host memory"] == pytest.approx(1 / 4, rel=0.01)
        assert found["reloaded"] > 0


def test_a_rank_that_stops_early_does_not_stall_the_others(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["early stop"] and each["after it"]


def test_weights_that_change_while_they_are_gathered_are_seen(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["changed"]["inside"].startswith("StoreError: parameter ")
        assert each["changed"]["equal"]
        assert each["changed"]["shapes"] == [[0]]


def test_ranks_that_differ_before_a_pass_go_on_afterwards(ranks: list[dict[str, Any]]) -> None:
    for found in (each["out of step"] for each in ranks):
        assert found["other lengths"].startswith("RankError: The ranks differ in shapes of inputs:")
        assert "rank 0 has '2x7" in found["other lengths"]
        assert "rank 1 has '2x8" in found["other lengths"]
        assert found["no room"].startswith("PlanInfeasibleError: ")
        assert (found["in step before"], found["in step"]) == ("", "")
        assert "cannot run without a plan on 2 ranks" in found["without a plan"]
    assert ranks[0]["out of step"]["no room"].startswith("PlanInfeasibleError: Rank 1 failed: ")
