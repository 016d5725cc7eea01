"""Ordinary actions on a model that DeepSpeed runs: no crash, no wrong value, nothing lost."""

from __future__ import annotations

import pytest

from tests.integration.actions import lives
from tests.integration.actions.runner import NET_ACTIONS, run_in_a_process


@pytest.mark.parametrize("name", [*NET_ACTIONS, *lives.DEEPSPEED_ACTIONS, *lives.LANGUAGE_ACTIONS])
def test_action(name: str) -> None:
    run_in_a_process(name, deepspeed=True)
