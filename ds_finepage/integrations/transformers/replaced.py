"""A method of one model that another object stands for while the model is attached."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any


class ReplacedMethod:
    """Stands for a method of a model. A copy of the model gets the ordinary method of its class."""

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self._name = name
        self._original = getattr(module, name)
        replacement: Any = self
        functools.update_wrapper(replacement, self._original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the ordinary method of the copy that is being made."""
        ordinary = getattr(type(self._module), self._name)
        return types.MethodType(ordinary, copy.deepcopy(self._module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the ordinary method of the module that is being pickled."""
        return getattr, (self._module, self._name)
