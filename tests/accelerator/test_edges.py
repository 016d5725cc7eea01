"""Leave out one kind of wait, and the test device shows it every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.edges import EDGES, Edge, is_right

SEEDS = range(4)

DOCUMENT = Path(__file__).parents[2] / "docs" / "negative_proofs.md"


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_results_are_right_with_an_edge_and_wrong_without_it(
    edge: Edge, device: torch.device, card: Any
) -> None:
    assert all(is_right(edge, device, seed, omit=False) for seed in SEEDS)
    assert not any(is_right(edge, device, seed, omit=True) for seed in SEEDS)


def test_the_document_has_every_edge() -> None:
    text = DOCUMENT.read_text()
    for edge in EDGES:
        assert f"| {edge.first} | {edge.then} | {edge.by} |" in text
