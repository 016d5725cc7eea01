"""Modules whose ops lay out their results otherwise than torch's descriptions of them say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.integration.parity import same_at_every_budget


class PatchNorm(nn.Module):
    """Batch normalization of a transposed sequence, as a time series model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.before(x).transpose(1, 2)).transpose(1, 2)
        return self.after((normed * x).sum(1))


class ImageNorm(nn.Module):
    """Group normalization of an image whose channels lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(memory_format=torch.channels_last))
        return self.norm(self.second(self.norm(x)) + x)


class ReshapedRows(nn.Module):
    """Rows that become an image as they lie: torch gives the batch of one another stride."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Linear(16, 16), nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.rows(x).transpose(1, 2).reshape(x.shape[0], 16, 8, -1)
        return self.norm(image + image.contiguous())


SHAPES = {
    PatchNorm: [(3, 8, 64), (3, 12, 64), (3, 10, 64)],
    ImageNorm: [(1, 16, 8, 8), (1, 16, 12, 8), (1, 16, 10, 8)],
    ReshapedRows: [(1, 64, 16), (1, 96, 16), (1, 80, 16)],
}


@pytest.mark.parametrize(
    ("num_sizes", "dtype"), [(1, torch.bfloat16), (3, torch.float32)], ids=["one size", "sizes"]
)
@pytest.mark.parametrize("kind", SHAPES)
def test_results_are_laid_out_as_the_ops_do_it(
    kind: Callable[[], nn.Module], num_sizes: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = kind().eval().to(dtype)
    inputs = [torch.randn(shape).to(dtype) for shape in SHAPES[kind][:num_sizes]]

    def run() -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        with torch.no_grad():
            found = [model(x) for x in inputs]
        return found, [tuple(y.stride()) for y in found]

    same_at_every_budget(model, run)
