"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.endpoints import save_model
from tests.integration.cli.models import small_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a small model."""
    return str(small_model(tmp_path))


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model with a tokenizer."""
    return save_model(tmp_path_factory.mktemp("served"))
