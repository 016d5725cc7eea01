"""Engines of stock DeepSpeed side by side."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def nothing_persisted(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin anew: ZeRO counts over all models of a process, and would stop at one's threshold."""
    from deepspeed.runtime.zero.partition_parameters import Init

    monkeypatch.setattr(Init, "num_persisted_elements", 0)
