"""Lets Dynamo trace a step of transformers' continuous batching as one graph.

transformers keeps compilers out of ``PagedAttentionCache.update``, because Inductor and CUDA graphs
do not go well with views of one block of memory. Plans do: such a block is one buffer. Without this
each layer would be a graph of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from ds_finepage._compat.torch import tree_leaves
from ds_finepage.capture.dynamo_graph import SHARES_MEMORY

PAGED_CACHE = "PagedAttentionCache"
"""The class of transformers."""


def open_paged_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare the paged KV caches among the arguments of a call, before it is traced."""
    for value in _paged_caches(args, kwargs):
        if "update" not in vars(value):
            update = type(value).update
            value.update = MethodType(inspect.unwrap(update), value)  # as torch may trace it
            for tensor in _tensors_of(value):
                setattr(tensor, SHARES_MEMORY, True)


def has_paged_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call is a step of continuous batching; the arguments are as above."""
    return any(_paged_caches(args, kwargs))


def _paged_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    return (v for v in (*args, *kwargs.values()) if type(v).__name__ == PAGED_CACHE)


def _tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    allocators = getattr(cache, "cache_allocators", {})
    for holder in (cache, *allocators.values()):
        yield from (leaf for leaf in tree_leaves(vars(holder)) if isinstance(leaf, torch.Tensor))
