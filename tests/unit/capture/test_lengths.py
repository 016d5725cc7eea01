"""Sizes that vary, and how their formulas are evaluated."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ds_finepage.capture.lengths import Evaluator, evaluate, with_known_shapes
from ds_finepage.execution.call_tensors import MovingViews
from ds_finepage.execution.ops import Patch
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Length, TaskGraph, TensorView


def test_an_expression_becomes_a_length_with_its_formula() -> None:
    rows, batch = sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True)
    size = Evaluator({"s0": 16, "s1": 3})
    assert size(7) == 7 and not isinstance(size(7), Length)
    found = size(4 * rows * batch + 1)
    assert found == 193 and isinstance(found, Length)
    assert evaluate(found.formula, {"s0": 5, "s1": 2}) == 41


def test_a_length_is_copied_with_its_formula_and_forgets_it_in_arithmetic() -> None:
    length = Length(16, "s0")
    for found in (copy.deepcopy(length), pickle.loads(pickle.dumps(length))):
        assert found == 16 and found.formula == "s0"
    assert not isinstance(length + 1, Length)


def of_rows(kind: BufferKind) -> TaskGraph:
    """Return a pass of one tensor of up to 16 rows of 4."""
    return TaskGraph(
        name="g",
        buffers=(Buffer(0, kind, Length(256, "16*s0")),),
        tensors=(TensorView(0, 0, "float32", (Length(16, "s0"), 4), (4, 1)),),
        tasks=(),
        symbols=(("s0", 1),),
    )


def test_views_follow_the_call_as_far_as_the_plan_has_room() -> None:
    graph = of_rows(BufferKind.OUTPUT)
    views = MovingViews(graph)
    assert views.varies(0)
    assert views.set_sizes([None, 5])
    assert views.view(0).shape == (5, 4)
    assert views.nbytes(graph.buffers[0]) == 80
    assert not views.set_sizes([None, 17])
    assert views.view(0).shape == (5, 4)  # as it was


def test_places_of_one_tensor_share_it_and_others_do_not() -> None:
    views = MovingViews(of_rows(BufferKind.ACTIVATION))
    storage, places = torch.zeros(1024, dtype=torch.uint8), [None] * 4
    for place, offset in enumerate([0, 0, 512]):
        views.add(Patch(places, place, tensor=0), storage, offset)
    views.add(Patch(places, 3, tensor=None, size=Length(16, "s0")))
    assert views.set_sizes([None, 5])
    first, second, other, size = (places[i] for i in range(4))
    assert first is second and first.shape == other.shape == (5, 4)
    assert (first.storage_offset(), other.storage_offset(), size) == (0, 128, 5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_tensors_of_a_size_can_be_written_in_every_mode(mode: Callable[[], Any]) -> None:
    views = MovingViews(of_rows(BufferKind.ACTIVATION))
    places: list[Any] = [None]
    views.add(Patch(places, 0, tensor=0), torch.zeros(512, dtype=torch.uint8), 128)
    with mode():
        assert views.set_sizes([None, 5])
    (found,) = places
    assert found.shape == (5, 4) and found.storage_offset() == 32
    assert not found.is_inference() and not found.requires_grad
    found.add_(1)


def test_what_is_added_to_a_product_is_expanded_only_to_symbols() -> None:
    op = torch.ops.aten.baddbmm.default
    given = [torch.zeros(4, 1, 7), torch.zeros(4, 3, 2), torch.zeros(4, 2, 7)]
    assert with_known_shapes(op, given) is given
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
    fakes = [mode.from_tensor(t, symbolic_context=dynamic) for t in given]
    assert with_known_shapes(torch.ops.aten.bmm.default, fakes[1:]) == fakes[1:]
    with mode:
        added, left, right = with_known_shapes(op, fakes)
    assert (left, right) == (fakes[1], fakes[2])
    assert tuple(map(int, added.shape)) == (4, 3, 7)
    assert added.untyped_storage()._cdata == fakes[0].untyped_storage()._cdata
