"""A base for engines that work by the hooks of another package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ds_finepage.compare.engine import Engine


class CopyCounter(Protocol):
    """Counts the bytes of fetches while it is entered, and lets each one copy."""

    nbytes: int

    def __enter__(self) -> None:
        """Begin to count."""

    def __exit__(self, *_: object) -> None:
        """Stop."""


class HookedEngine(Engine):
    """A model under the hooks of another package, which copy nothing back to the host."""

    def __init__(self, model: Any, device: torch.device, counter: CopyCounter) -> None:
        """Take a model.

        Args:
            model: The model, with its weights in host memory.
            device: Where it computes.
            counter: Counts what the hooks fetch.
        """
        super().__init__(model, device)
        self._counter = counter

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, a fetch is a copy and counts."""
        with self._counter:
            yield

    def begin_forward(self) -> None:
        """Start to count again."""
        self._counter.nbytes = 0

    def copied(self) -> tuple[int, int]:
        """Return the bytes of all fetches since then. Nothing is copied back."""
        return self._counter.nbytes, 0


def drop_own_forwards(model: torch.nn.Module) -> None:
    """Delete the attribute ``forward`` of modules where it is the method of their class again."""
    for module in model.modules():
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is type(module).forward:
            del module.forward
