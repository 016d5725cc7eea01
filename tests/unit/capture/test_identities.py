"""Identities: equal for what is the same in another process, and for nothing else."""

from __future__ import annotations

import enum
import math
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.capture.identities import (
    OF_THE_STATE,
    OF_WHAT_THEY_SAY,
    NotKeptError,
    digest_of,
    identity_for,
    identity_of,
)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    def method(self) -> int:
        return 1

    @property
    def facts(self) -> int:
        return 2


class Other(Plain):
    pass


def made(text: str) -> Any:
    """Return what a line of code defines; each call makes code objects of its own."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names["f"]


def function(x: int) -> int:
    return x


SAME = [
    (1.5, 1.5),
    ((1, [2, "3"], None), (1, [2, "3"], None)),
    (frozenset({"a", "b", "c"}), frozenset({"c", "b", "a"})),
    ({"a": 1}, {"a": 1}),
    (made("def f(x): return x in {'a', 'b'}"), made("def f(x): return x in {'a', 'b'}")),
    (Plain().method, Plain().method),
    (torch.device("cpu"), torch.device("cpu")),
    (float("nan"), float("nan")),
    (torch.ops.aten.mm, torch.ops.aten.mm),
]

DIFFERENT = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ([1], (1,)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (Colour.RED, Colour.BLUE),
    (Colour.RED, 1),
    (math, types),
    (len, sum),
    (torch.ops.aten.mm, torch.ops.aten.bmm),
    (torch.ops.aten.mm, torch.ops.aten.mm.default),
    (Plain, Other),
    (torch.float16, torch.bfloat16),
    (made("def f(x): return x + 1"), made("def f(x): return x + 2")),
    (made("def f(x): return lambda: x + 1"), made("def f(x): return lambda: x + 2")),
    (made("def f(x): return x.a"), made("def f(x): return x.b")),
    (made("def f(x): return x").__code__, made("def f(x): return -x").__code__),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_equal_values_have_one_identity(left: Any, right: Any) -> None:
    assert identity_of(left) == identity_of(right)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_other_values_have_another_one(left: Any, right: Any) -> None:
    assert identity_of(left) != identity_of(right)


@pytest.mark.parametrize(
    "value",
    [object(), partial(print), torch.zeros(1), [object()], torch.ops.quantized.add],
)
def test_what_says_nothing_elsewhere_is_refused(value: Any) -> None:
    with pytest.raises(NotKeptError, match="says nothing in another process"):
        identity_of(value)


def replaced(_: Any) -> int:
    return 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", replaced),
        ("facts", property(replaced)),
        ("method", staticmethod(replaced)),
        ("method", wraps(Plain.method)(lambda self: 1)),
    ],
)
def test_a_class_with_another_method_is_another_one(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(Other)
    monkeypatch.setattr(Plain, name, value)
    assert digest(Other) != before


def test_methods_that_are_made_of_text_are_told_apart_by_what_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Plain, "method", made("def f(self): return 1"))
    before = digest(Plain)
    monkeypatch.setattr(Plain, "method", made("def f(self): return 2"))
    assert digest(Plain) != before


def digest(owner: type) -> Any:
    """Return the identity of a class as a process finds it that has not looked before."""
    from ds_finepage.capture import identities

    identities._methods_of.cache_clear()
    return identity_of(owner)


def test_the_methods_of_torch_belong_to_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(torch.nn.Linear)
    monkeypatch.setattr(torch.nn.Linear, "extra_repr", replaced)
    assert digest(torch.nn.Linear) == before


def guard(kind: str, **said: Any) -> Any:
    """A guard of Dynamo, as far as identities depend at it."""
    make: Callable[..., None] = partial(print, **said)
    return SimpleNamespace(create_fn_name=lambda: kind, create_fn=make)


KINDS = [
    ("CONSTANT_MATCH", 1, 1, 2),
    ("ID_MATCH", function, function, print),
    ("TYPE_MATCH", Plain(), Plain(), Other()),
    ("TENSOR_MATCH", torch.zeros(2), torch.ones(3), torch.zeros(2, 1)),
    ("TENSOR_MATCH", torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
    ("TENSOR_MATCH", torch.zeros(2), torch.zeros(2), torch.zeros(2, requires_grad=True)),
    ("TENSOR_MATCH", torch.zeros(2), torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
    ("SEQUENCE_LENGTH", [1, 2], [3, 4], [1]),
    ("EMPTY_NN_MODULE_HOOKS_DICT", OrderedDict(), OrderedDict(), OrderedDict(a=1)),
    ("DICT_KEYS_MATCH", {"a": 1}, {"a": 2}, {"b": 1}),
    ("MAPPING_KEYS_CHECK", {"a": 1}, {"a": 2}, {"a": 1, "b": 1}),
]


@pytest.mark.parametrize(("kind", "one", "same", "other"), KINDS)
def test_a_guard_looks_at_its_part_of_a_value(kind: str, one: Any, same: Any, other: Any) -> None:
    looks = partial(identity_for, guard(kind))
    assert looks(one) == looks(same) != looks(other)


def test_a_guard_on_an_attribute_looks_for_it() -> None:
    assert identity_for(guard("HASATTR", attr="method"), Plain()) is True
    assert identity_for(guard("HASATTR", attr="way"), Plain()) is False


@pytest.mark.parametrize("kind", sorted(OF_THE_STATE | OF_WHAT_THEY_SAY))
def test_guards_without_a_value_take_none(kind: str) -> None:
    assert identity_for(guard(kind), object()) is None


def test_a_kind_of_guard_that_is_not_known_is_refused() -> None:
    with pytest.raises(NotKeptError, match="guards of kind DUAL_LEVEL are not kept"):
        identity_for(guard("DUAL_LEVEL"), None)


def test_code_is_what_it_does() -> None:
    one, other = (made(f"def f(x):\n    return x + {n}").__code__ for n in (1, 2))
    assert digest_of(one) == digest_of(made("\n\ndef f(x): return x + 1").__code__)
    assert digest_of(one) != digest_of(other)
