"""Strides of fake results, put right by what the ops really do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ds_finepage.capture.layouts import LayoutFixer
from ds_finepage.errors import CaptureError
from ds_finepage.execution.layouts import LayoutProbe
from ds_finepage.graph.layout import Layout

aten = torch.ops.aten
VIEWS = LayoutProbe(make_room=lambda: 0)
"""It tells of views alone, which need no room."""


def asked(strides: Any) -> tuple[LayoutFixer, list[Any]]:
    """Return a fixer that is told these strides, and what it asked."""
    questions: list[Any] = []

    def strides_of(
        op: Any, args: Any, kwargs: Any, results: Sequence[Layout], is_view: bool
    ) -> Any:
        questions.append((str(op), args, kwargs, list(results)))
        return strides

    return LayoutFixer(strides_of, {}), questions


def symbolic(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    """Return a fake tensor all of whose sizes are symbols, and their values by name."""
    env = ShapeEnv()
    real = torch.empty(shape) if strides is None else torch.empty_strided(shape, strides)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    mode = FakeTensorMode(shape_env=env)
    fake = mode.from_tensor(real, symbolic_context=context)
    return mode, fake, {str(s): int(v) for s, v in env.backed_var_to_val.items()}


def test_a_result_gets_the_strides_that_the_op_gives_it() -> None:
    fix, questions = asked([(1, 4)])
    with FakeTensorMode():
        x = torch.empty(4, 6)
        fixed = fix(aten.relu.default, (x,), {}, torch.empty(4, 6))
    assert fixed.stride() == (1, 4) and fixed.shape == (4, 6)
    layout = Layout("float32", "cpu", (4, 6), (6, 1))
    assert questions == [("aten.relu.default", [layout], {}, [layout])]


@pytest.mark.parametrize("strides", [None, [(6, 1)]])
def test_a_result_that_is_right_or_not_known_stays(strides: Any) -> None:
    fix, _ = asked(strides)
    with FakeTensorMode():
        result = torch.empty(4, 6)
        assert fix(aten.relu.default, (torch.empty(4, 6),), {}, result) is result


def test_of_several_results_each_gets_its_own() -> None:
    fix, _ = asked([(4, 1), (1, 6)])
    with FakeTensorMode():
        right, wrong = torch.empty(2, 4), torch.empty(6, 2)
        found = fix(aten.native_group_norm.default, (torch.empty(3),), {}, (right, wrong))
    assert found[0] is right and found[1].stride() == (1, 6)


def test_an_op_on_sizes_that_depend_on_data_is_not_asked_for() -> None:
    fix, questions = asked([(9, 9)])
    with FakeTensorMode(shape_env=ShapeEnv()):
        found = aten.nonzero.default(torch.empty(4, 6))
        assert fix(aten.relu.default, (found,), {}, result := found.clone()) is result
        assert fix(aten.relu.default, (object(),), {}, result) is result
    assert not questions


def test_what_an_op_changes_is_not_asked_for() -> None:
    fix, questions = asked([(9, 9)])
    with FakeTensorMode():
        x = torch.empty(4, 6)
        assert fix(aten.relu_.default, (x,), {}, x) is x
    assert not questions


def test_a_view_has_the_strides_of_a_real_one() -> None:
    fix = LayoutFixer(VIEWS, {})
    with FakeTensorMode():
        source = torch.empty_strided((1, 64, 256), (16384, 1, 64))
        shape = [1, 64, 16, 16]
        found = fix(aten.view.default, (source, shape), {}, aten.view.default(source, shape))
        assert found.untyped_storage()._cdata == source.untyped_storage()._cdata
    assert found.stride() == (64, 1, 1024, 64)


def test_symbols_stay_in_the_strides_of_a_result() -> None:
    mode, x, values = symbolic((4, 6, 5))
    fix = LayoutFixer(lambda *_: [(30, 1, 6)], values)
    with mode:
        found = fix(aten.relu.default, (x,), {}, torch.empty_like(x))
    assert [str(s) for s in found.stride()] == [str(x.shape[1] * x.shape[2]), "1", str(x.shape[1])]


def test_symbols_stay_in_the_strides_of_a_view() -> None:
    mode, x, values = symbolic((64, 256), (1, 64))
    fix = LayoutFixer(VIEWS, values)
    with mode:
        source, shape = x.unsqueeze(0), [1, x.shape[0], x.shape[1]]
        found = fix(aten.view.default, (source, shape), {}, source.as_strided(shape, (7, 1, 64)))
    assert found.stride()[1] == 1 and str(found.stride()[2]) == str(x.stride()[1])
    assert found.stride()[0] == 64


def test_strides_that_do_not_follow_from_symbols_are_refused() -> None:
    mode, x, values = symbolic((4, 6))
    fix = LayoutFixer(lambda *_: [(8, 1)], values)  # with gaps
    with mode, pytest.raises(CaptureError, match=r"strides \(8, 1\) of a result do not follow"):
        fix(aten.relu.default, (x,), {}, torch.empty_like(x))


@given(data=st.data())
def test_views_are_reshaped_as_torch_does_it(data: Any) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    repeated = data.draw(st.sets(st.sampled_from(range(len(sizes)))))  # as heads of keys are
    stored = [1 if dim in repeated else size for dim, size in enumerate(sizes)]
    x = torch.empty(stored, device="meta").expand(sizes).permute(order)
    x = x[..., : data.draw(st.integers(1, x.shape[-1]))]
    wanted = [1] * data.draw(st.integers(1, 4))
    for factor in (2, 3):
        left = x.numel()
        while left % factor == 0:
            wanted[data.draw(st.integers(0, len(wanted) - 1))] *= factor
            left //= factor
    try:
        expected = x.view(wanted).stride()
    except RuntimeError:
        assume(False)
    fix, _ = asked(None)
    assert tuple(fix._reshaped(x, wanted)) == expected
