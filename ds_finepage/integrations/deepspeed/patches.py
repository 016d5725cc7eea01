"""Changes other packages: wraps methods, exchanges names for a while."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import wrapt


class WrappedCall:
    """A call of a wrapped method or function.

    Attributes:
        owner: The instance, or the class.
        arguments: What was given, by name; a wrapper may change it.
    """

    def __init__(self, original: Any, owner: Any, args: Any, kwargs: Any) -> None:
        """Take a call as wrapt gives it: the original is bound."""
        self._original, self.owner = original, owner
        self._bound = inspect.signature(original).bind(*args, **kwargs)
        self.arguments = self._bound.arguments

    def run(self) -> Any:
        """Call the original."""
        return self._original(*self._bound.args, **self._bound.kwargs)


class SeamWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A method that a seam has wrapped."""


def wrap(owner: type | ModuleType, name: str, wrapper: Callable[[WrappedCall], Any]) -> None:
    """Wrap a method or a function; one that is wrapped already stays as it is.

    Args:
        owner: The class or the module that defines it.
        name: Its name. A class method or a static method stays one.
        wrapper: Takes its place.
    """
    if not is_wrapped(owner, name):
        setattr(
            owner, name, SeamWrapper(vars(owner)[name], lambda *call: wrapper(WrappedCall(*call)))
        )


def is_wrapped(owner: type | ModuleType, name: str) -> bool:
    """Return whether a seam has wrapped a method or a function."""
    return isinstance(vars(owner).get(name), SeamWrapper)


@contextlib.contextmanager
def exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module's or a class's name another value inside the context."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)
