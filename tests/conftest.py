"""What every test starts from: no network, seeded generators, one compute thread."""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import settings

# Before anything imports Hugging Face libraries, and inherited by every process that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests leave the user's cache alone, and find nothing in it.
os.environ["DS_FINEPAGE_CACHE"] = "0"

# The same examples in every run, however slow the machine is.
# "pytest --hypothesis-profile=explore" looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Seed the generators; leave torch alone where nobody has imported it."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        if torch.get_num_threads() != 1:  # tests run side by side, and sums must not depend on it
            torch.set_num_threads(1)
