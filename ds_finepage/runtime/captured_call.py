"""One call of an attached model, on its way to its graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ds_finepage.integrations.transformers.host_cache import caches_among


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One call of an attached model, or of a part of it.

    Attributes:
        compiled: The call as Dynamo compiled it.
        module: The module that is called.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """

    compiled: Callable[..., Any]
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the call."""
        return self.compiled(*self.args, **self.kwargs)

    def caches(self, *, growing: bool = False) -> list[Any]:
        """List the KV caches among the arguments.

        Args:
            growing: Leave out the caches that the encoder's output fills once.
        """
        return caches_among((*self.args, *self.kwargs.values()), growing=growing)
