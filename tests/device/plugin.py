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
    return loading.load(0)


@pytest.fixture
def device(slowcard_device: torch.device) -> Iterator[torch.device]:
    """Give the test device with all its switches off; turn off what the test turned on.

    Outside such tests there are 0 devices: what asks torch for an accelerator finds none.
    """
    card = torch.get_device_module("slowcard")
    card.set_num_devices(1)
    card.reset_switches()
    yield slowcard_device
    card.reset_switches()
    card.set_num_devices(0)
