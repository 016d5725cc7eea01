"""Cells of grids and points of curves."""

from __future__ import annotations

from typing import Any

from ds_finepage.cli.grid import Point


def point(**figures: Any) -> Point:
    """Return a point; figures that are not given are small."""
    small: dict[str, Any] = {
        "budget_bytes": 1,
        "weight_bytes": 1,
        "tokens_per_s": 1.0,
        "decode_ns": 10,
        "decode_bound_ns": 10,
        "decode_reloaded_bytes": 1,
        "first_token_ns": 10,
        "first_token_bound_ns": 10,
        "prefill_reloaded_bytes": 1,
        "prefill_kv_on_host": False,
        "decode_kv_on_host": False,
        "kv_copied_bytes": 0,
        "prefill_settings": None,
        "decode_settings": None,
    }
    return Point(**{**small, **figures})
