"""Continuous batching of transformers under a budget.

Its paged KV cache is as large as the free memory of the device allows. Here it is as large as its
part of the budget allows, and weights stream through the rest.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

from ds_finepage._compat.transformers import batching_memory_bytes
from ds_finepage.integrations.transformers.replaced import ReplacedMethod

logger = logging.getLogger(__name__)

BATCHING = "init_continuous_batching"

CACHE_SHARE = 0.5
"""The part of the budget for the paged KV cache and the tensors of a step, where the caller does
not choose it by ``max_memory_percent`` or ``num_blocks``."""


class BudgetedBatching(ReplacedMethod):
    """``init_continuous_batching`` of one model: its paged KV cache counts in the budget."""

    def __init__(self, module: Any, budget_bytes: Callable[[], int]) -> None:
        super().__init__(module, BATCHING)
        self._budget_bytes = budget_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a manager of transformers, whose cache fits its part of the budget."""
        bound = inspect.signature(self._original).bind(*args, **kwargs)
        name = "continuous_batching_config"
        config = bound.arguments.get(name)
        generation = bound.arguments.get("generation_config") or self._module.generation_config
        if config is None:
            config = getattr(generation, name, None)
        bound.arguments[name] = within_budget(config, self._budget_bytes())
        return self._original(*bound.args, **bound.kwargs)


def within_budget(config: Any, budget_bytes: int) -> Any:
    """Return a configuration of continuous batching that holds a budget.

    Args:
        config: A ``ContinuousBatchingConfig``, which stays as it is; None for the default.
        budget_bytes: The device budget. ``max_memory_percent`` is a part of it.
    """
    from transformers import ContinuousBatchingConfig

    found = ContinuousBatchingConfig() if config is None else copy.copy(config)
    if found.num_blocks is None:
        wanted = (found.max_memory_percent or CACHE_SHARE) * budget_bytes
        found.max_memory_percent = min(wanted / batching_memory_bytes(), 1.0)
    if found.use_cuda_graph not in (None, False):
        logger.warning("continuous batching runs without graphs of the device: the model streams")
    found.use_cuda_graph = False
    return found
