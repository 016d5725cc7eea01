"""The fixture `device`: import it in a conftest.py, or name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import loading


@pytest.fixture(scope="session")
def slowcard_device() -> torch.device:
    """Load the test device once a session, or skip and say why."""
    if reason := loading.why_not():
        pytest.skip(reason)
    return loading.load()


@pytest.fixture
def device(slowcard_device: torch.device) -> Iterator[torch.device]:
    """Give the test device with all its switches off; turn off what the test turned on."""
    card = torch.get_device_module("slowcard")
    card.reset_switches()
    yield slowcard_device
    card.reset_switches()
