"""Rows in host memory tell whose they are, so that a copy in the arena is used for them alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from ds_finepage.execution.host_ops import identity_of
from ds_finepage.integrations.transformers.host_cache import HostLayer, HostRows

CPU = torch.device("cpu")


def rows(num: int) -> torch.Tensor:
    return torch.randn(num, 2, 3, 4)


def held(num: int = 5) -> HostRows:
    found = HostRows()
    found.append(rows(num), CPU)
    return found


def identity(of: HostRows) -> object:
    of.put_in_place(CPU)
    assert of.live is not None
    return identity_of(of.live)


def test_rows_that_follow_have_the_same_identity() -> None:
    found = held()
    before = identity(found)
    for num in (1, 100):  # the second one needs a larger room
        found.append(rows(num), CPU)
        assert identity(found) is before
    assert found.live is not None
    found.live = found.live[:20]  # cut off
    assert identity(found) is before
    found.append(rows(2), CPU)
    assert identity(found) is before


def written(found: HostRows) -> None:
    assert found.live is not None
    found.live[1].zero_()


def selected(found: HostRows) -> None:
    found.select(torch.tensor([1, 0]), CPU)


def begun_again(found: HostRows) -> None:
    found.live = None
    found.append(rows(5), CPU)


def put_in(found: HostRows) -> None:
    found.live = rows(5)


@pytest.mark.parametrize("change", [written, selected, begun_again, put_in])
def test_other_rows_have_another_identity(change: Callable[[HostRows], None]) -> None:
    found = held()
    before = identity(found)
    change(found)
    now = identity(found)
    assert now is not before
    assert identity(found) is now


def test_a_copy_of_a_cache_has_rows_of_its_own() -> None:
    layer = HostLayer()
    layer.update(*(torch.randn(2, 3, 5, 4) for _ in range(2)))
    layer.prepare()
    other = copy.deepcopy(layer)
    other.prepare()
    for name in ("key_rows", "value_rows"):
        assert identity(getattr(other, name)) is not identity(getattr(layer, name))


def test_tensors_of_nobody_have_no_identity() -> None:
    tensor = rows(3)
    assert identity_of(tensor) is not identity_of(tensor)
