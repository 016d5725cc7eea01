"""How a tensor lies in memory, without its bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor without its bytes; dtype and device by the names that torch gives them."""

    dtype: str
    device: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def reach(self) -> int:
        """The number of elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
