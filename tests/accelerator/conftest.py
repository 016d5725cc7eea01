"""The accelerator of these tests: a CUDA device where there is one, else the test device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.device import loading
from tests.device.plugin import slowcard_device
from tests.integration.detaching import detached

__all__ = ["detached", "slowcard_device"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if "tests/accelerator" in item.path.as_posix():
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The accelerator, for a whole module, so that its tests can share an attached model."""
    torch.set_num_threads(1)  # for fixtures of a whole module, too
    torch._dynamo.reset()
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    found = request.getfixturevalue("slowcard_device")
    assert isinstance(found, torch.device)
    switches = torch.get_device_module(found)
    switches.set_num_devices(1)
    switches.reset_switches()
    torch.get_device_module.cache_clear()  # torch remembers that there was no accelerator
    yield found
    switches.set_num_devices(0)
    torch.get_device_module.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def card(device: torch.device) -> Iterator[Any]:
    """The switches of the test device; they are off before and after."""
    if device.type != loading.NAME:
        pytest.skip("only the test device has these switches")
    module = torch.get_device_module(device)
    module.reset_switches()
    yield module
    module.reset_switches()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # transformers asks for torch's version inside the experts' forward.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield
