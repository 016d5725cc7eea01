"""Ordinary actions on an attached model: none crashes, gives a wrong value, or is lost."""

from __future__ import annotations

import pytest

from tests.integration.actions import lives
from tests.integration.actions.runner import NET_ACTIONS, run_in_a_process


def test_there_are_enough_of_them() -> None:
    assert len(NET_ACTIONS) >= 60


@pytest.mark.parametrize("name", [*NET_ACTIONS, *lives.PLAIN_ACTIONS, *lives.LANGUAGE_ACTIONS])
def test_action(name: str) -> None:
    run_in_a_process(name, deepspeed=False)
