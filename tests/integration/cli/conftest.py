"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.models import small_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a small model."""
    return str(small_model(tmp_path))
