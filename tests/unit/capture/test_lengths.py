"""Sizes that vary: what is planned for, and how formulas are evaluated."""

from __future__ import annotations

import copy
import pickle

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ds_finepage.capture.lengths import Evaluator, evaluate, with_known_shapes
from ds_finepage.capture.recording import SymbolicSizes, upper_end
from ds_finepage.execution.moving import MovingViews
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Length, TaskGraph, TensorView


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({}, {}),
        ({"a": 1}, {"a": 1}),
        ({"a": 5}, {"a": 16}),
        ({"a": 64}, {"a": 64}),
        ({"a": 65}, {"a": 128}),
        ({"cache": 70, "mask": 71}, {"cache": 127, "mask": 128}),
        ({"cache": 70, "mask": 72}, {"cache": 126, "mask": 128}),
        ({"cache": 70, "mask": 73}, {"cache": 128, "mask": 128}),
        ({"batch": 8, "cache": 70}, {"batch": 8, "cache": 128}),
        ({"batch": 9, "cache": 70}, {"batch": 16, "cache": 128}),
        ({"batch": 3, "cache": 70}, {"batch": 3, "cache": 128}),
        ({"window": 15, "cache": 70}, {"window": 16, "cache": 128}),
        ({"cache": 9, "encoder": 200}, {"cache": 16, "encoder": 256}),
    ],
)
def test_sizes_are_rounded_up_by_kind(given: dict[str, int], planned: dict[str, int]) -> None:
    assert upper_end(given) == planned
    assert all(planned[name] >= size for name, size in given.items())


def test_a_growing_cache_needs_a_plan_for_each_doubling() -> None:
    planned = {tuple(upper_end({"a": n, "b": n, "mask": n + 1}).values()) for n in range(1, 1024)}
    assert len(planned) <= 8


def test_an_expression_becomes_a_length_with_its_formula() -> None:
    rows, batch = sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True)
    size = Evaluator({"s0": 16, "s1": 3})
    assert size(7) == 7 and not isinstance(size(7), Length)
    found = size(4 * rows * batch + 1)
    assert found == 193 and isinstance(found, Length)
    assert evaluate(found.formula, {"s0": 5, "s1": 2}) == 41
    assert size.all((2, rows)) == (2, 16)


def test_a_length_is_copied_with_its_formula_and_forgets_it_in_arithmetic() -> None:
    length = Length(16, "s0")
    for found in (copy.deepcopy(length), pickle.loads(pickle.dumps(length))):
        assert found == 16 and found.formula == "s0"
    assert not isinstance(length + 1, Length)


def test_views_follow_the_call_as_far_as_the_plan_has_room() -> None:
    rows = Length(16, "s0")
    graph = TaskGraph(
        name="g",
        buffers=(Buffer(0, BufferKind.OUTPUT, Length(256, "16*s0")),),
        tensors=(TensorView(0, 0, "float32", (rows, 4), (4, 1)),),
        tasks=(),
        symbols=(("s0", 1),),
    )
    views = MovingViews(graph)
    assert views.varies(0)
    assert views.set_sizes([None, 5])
    assert views.views[0].shape == (5, 4)
    assert views.nbytes(graph.buffers[0]) == 80
    assert not views.set_sizes([None, 17])
    assert views.views[0].shape == (5, 4)  # as it was


def test_a_recording_holds_where_all_that_it_took_for_granted_does() -> None:
    sizes = SymbolicSizes([], [])
    rows, batch = sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True)
    assert not sizes
    assert sizes.admits({"s0": 0, "s1": 0})  # nothing was
    sizes._guards = (sympy.Gt(rows, 4), sympy.Eq(rows, 2 * batch))
    assert sizes.admits({"s0": 6, "s1": 3})
    assert not sizes.admits({"s0": 6, "s1": 4})
    assert not sizes.admits({"s0": 4, "s1": 2})
    assert sizes.admits({"s0": 6, "s1": 3})


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
