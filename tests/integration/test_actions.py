"""Ordinary actions on an attached model: none crashes, gives a wrong value, or is lost."""

from __future__ import annotations

import pytest

from tests.integration.actions import lives, weights
from tests.integration.actions.runner import NET_ACTIONS, run_in_a_process


def test_there_are_enough_of_them() -> None:
    assert len(NET_ACTIONS) >= 60


ALONE = [name for name in NET_ACTIONS if name not in weights.READS]


@pytest.mark.parametrize("name", [*ALONE, *lives.PLAIN, *lives.LANGUAGE])
def test_action(name: str) -> None:
    run_in_a_process(name, deepspeed=False)


def test_actions_that_change_nothing() -> None:
    run_in_a_process(*weights.READS, deepspeed=False)
