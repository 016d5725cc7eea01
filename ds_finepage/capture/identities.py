"""Describes the values that Dynamo's guards look at, so that another process can compare them.

A guard compares a value with one that it saw while it traced: often by its address, which says
nothing in another process. An identity says it by names, types, constants and bytecode.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
OPS = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))
OF_RELEASES = frozenset({"aten", "prims", "transformers"})
"""Namespaces of ops that belong to a release, which the cache folder is for."""

OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)

OF_VALUES = frozenset(
    {
        "BOOL_MATCH",
        "BUILTIN_MATCH",
        "CLASS_MATCH",
        "CLOSURE_MATCH",
        "CONSTANT_MATCH",
        "EQUALS_MATCH",
        "FUNCTION_MATCH",
        "ID_MATCH",
        "MODULE_MATCH",
        "NONE_MATCH",
    }
)
"""Guards that compare the value itself."""

OF_THE_STATE = frozenset(
    {
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "SHAPE_ENV",
        "TORCH_FUNCTION_STATE",
    }
)
"""Guards on no value. What they compare with is kept beside them."""

OF_WHAT_THEY_SAY = frozenset(
    {
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "DUPLICATE_INPUT",
        "NOT_NONE_MATCH",
        "NOT_PRESENT_IN_GENERIC_DICT",
        "SET_CONTAINS",
        "SET_NOT_CONTAINS",
    }
)
"""Guards that take nothing from the value: they say all that they compare with."""


class NotKeptError(Exception):
    """Something of a trace says nothing in another process."""


def identity_of(value: Any) -> Any:
    """Describe a value by what is the same in every process.

    Returns:
        Tuples of text and numbers; equal for equal values, and for the same function or class.

    Raises:
        NotKeptError: The value is of a kind that is not described.
    """
    kind = type(value).__name__
    if isinstance(value, enum.Enum):
        return "enum", identity_of(type(value)), value.name
    if isinstance(value, (*CONSTANTS, *OF_TORCH)):
        return kind, repr(value)
    if isinstance(value, (tuple, list)):
        return kind, tuple(map(identity_of, value))
    if isinstance(value, (set, frozenset)):
        return kind, tuple(sorted(repr(identity_of(v)) for v in value))
    if isinstance(value, dict):
        return kind, tuple((identity_of(k), identity_of(v)) for k, v in value.items())
    if isinstance(value, ModuleType):
        return kind, value.__name__
    if isinstance(value, CodeType):
        return kind, digest_of(value)
    if isinstance(value, MethodType):
        return kind, identity_of(value.__func__)
    if isinstance(value, FunctionType):
        return kind, value.__module__, value.__qualname__, digest_of(value.__code__)
    if isinstance(value, BuiltinFunctionType):
        return kind, value.__module__, value.__qualname__
    if isinstance(value, OPS) and str(value).partition(".")[0] in OF_RELEASES:
        return kind, str(value)
    if isinstance(value, type):
        return kind, value.__module__, value.__qualname__, _methods_of(value)
    raise NotKeptError(f"a {kind} says nothing in another process")


def identity_for(guard: Any, value: Any) -> Any:
    """Describe of a value what a guard compares.

    Args:
        guard: A guard of Dynamo.
        value: What it looks at; None if the guard is one of ``OF_THE_STATE``.

    Raises:
        NotKeptError: The guard is of a kind that is not known here, or its value is.
    """
    kind = guard.create_fn_name()
    if kind in OF_VALUES:
        return identity_of(value)
    if kind in OF_THE_STATE or kind in OF_WHAT_THEY_SAY:
        return None
    if kind == "TYPE_MATCH":
        return identity_of(type(value))
    if kind == "TENSOR_MATCH":  # sizes and strides are kept beside the guard
        facts = (value.dtype, value.device, value.requires_grad, value.dim())
        return identity_of((type(value), *facts))
    if kind in ("SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"):
        return identity_of((type(value), len(value)))
    if kind in ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"):
        return identity_of((type(value), tuple(value)))
    if kind == "HASATTR":
        return hasattr(value, guard.create_fn.keywords["attr"])
    raise NotKeptError(f"guards of kind {kind} are not kept")


@cache
def digest_of(code: CodeType) -> str:
    """Return a hash of what a function's code does."""
    found = hashlib.sha256(code.co_code)
    consts = [digest_of(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    found.update(repr((code.co_names, code.co_varnames, code.co_freevars, consts)).encode())
    return found.hexdigest()[:32]


def _constant(value: Any) -> str:
    # The order of a set differs from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


@cache
def _methods_of(owner: type) -> str:
    """Return a hash of the methods of a class, with those that it inherits.

    Dynamo reads methods without guards on them. Those of torch and of Python belong to a release.
    """
    found = hashlib.sha256()
    for base in owner.__mro__:
        if base.__module__.split(".")[0] in ("builtins", "torch"):
            continue
        for name, value in vars(base).items():
            for function in functions_in(value):
                found.update(f"{name} {_place_of(function.__code__)}\0".encode())
    return found.hexdigest()[:32]


def forget_classes() -> None:
    """Look at the methods of classes again: they may be other ones now."""
    _methods_of.cache_clear()


def _place_of(code: CodeType) -> str:
    """Return where some code is written, which is fast; a trace keeps hashes of the files."""
    if code.co_filename.startswith("<"):
        return digest_of(code)
    return f"{code.co_filename}:{code.co_firstlineno}"


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class, with those that decorators have around."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
    for part in parts:
        part = getattr(part, "__func__", part)  # of a static method or one of the class
        while isinstance(part, FunctionType):
            yield part
            part = getattr(part, "__wrapped__", None)
