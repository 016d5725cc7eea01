"""Asks ops how they lay out their results, by running them on scratch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_finepage._compat.torch import _disable_current_modes, tree_leaves, tree_map_only
from ds_finepage.execution.device import fork_rng
from ds_finepage.execution.meter import free_profiler
from ds_finepage.graph.layout import Layout

Strides = tuple[tuple[int, ...], ...]


class LayoutProbe:
    """Remembers how ops lay out their results; runs each once."""

    def __init__(self, *, make_room: Callable[[], int]) -> None:
        """Start knowing nothing.

        Args:
            make_room: Called before an op is run; returns the bytes that there are for it.
        """
        self._make_room = make_room
        self._known: dict[Any, Strides | None] = {}

    def __call__(
        self, op: Any, args: Any, kwargs: Any, results: Sequence[Layout], is_view: bool
    ) -> Strides | None:
        """Return the strides of each result that is a tensor; None where they cannot be found out.

        :data:`ds_finepage.capture.layouts.StridesOf` describes the arguments. Views are made on
        torch's meta device, where they are the same as everywhere and there are no bytes.
        """
        key = repr((str(op), args, kwargs, results, is_view))  # one, true and 1.0 are equal
        if key not in self._known:
            operands = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Layout)]
            nbytes = sum(map(_nbytes, operands)) + 2 * sum(map(_nbytes, results))
            # An op that has no room here has none in a plan: its operands are all there is.
            fits = is_view or nbytes <= self._make_room()
            self._known[key] = _run(op, args, kwargs, results, is_view) if fits else None
        return self._known[key]


def _run(
    op: Any, args: Any, kwargs: Any, results: Sequence[Layout], is_view: bool
) -> Strides | None:
    devices = set() if is_view else {v.device for v in results}

    def scratch(value: Layout) -> torch.Tensor:
        device = "meta" if is_view else value.device
        # Zeros, which are valid indices everywhere.
        flat = torch.zeros(max(1, value.reach), dtype=_dtype(value), device=device)
        return flat.as_strided(value.shape, value.stride)

    with free_profiler(), _disable_current_modes(), fork_rng(devices):
        with torch.inference_mode(False), torch.no_grad():
            given = tree_map_only(Layout, scratch, (args, kwargs))
            try:
                found = op(*given[0], **given[1])
            except RuntimeError:  # one that refuses zeros, such as a draw from a distribution
                return None
            made = [v for v in tree_leaves(found) if isinstance(v, torch.Tensor)]
            if [tuple(v.shape) for v in made] != [layout.shape for layout in results]:
                return None  # what it returns depends on its data
            return tuple(tuple(v.stride()) for v in made)


def _dtype(layout: Layout) -> torch.dtype:
    found: torch.dtype = getattr(torch, layout.dtype)
    return found


def _nbytes(layout: Layout) -> int:
    return layout.reach * _dtype(layout).itemsize
