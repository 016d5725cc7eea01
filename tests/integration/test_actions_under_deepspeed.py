"""Ordinary actions on a model that DeepSpeed runs: no crash, no wrong value, nothing lost."""

from __future__ import annotations

import pytest

from tests.integration.actions import lives, weights
from tests.integration.actions.runner import run_in_a_process

ACTIONS = [*weights.ACTIONS, *lives.DEEPSPEED_ACTIONS, *lives.LANGUAGE_ACTIONS]
"""Those that touch what DeepSpeed changes: the weights, and the calls of a language model."""


@pytest.mark.parametrize("name", ACTIONS)
def test_action(name: str) -> None:
    run_in_a_process(name, deepspeed=True)
