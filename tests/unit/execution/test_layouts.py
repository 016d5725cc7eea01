"""What a probe says of the strides of results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_finepage.execution.layouts import LayoutProbe
from ds_finepage.graph.layout import Layout

aten = torch.ops.aten
ROWS = Layout("float32", "cpu", (4, 6), (6, 1))


def test_an_op_is_run_once_on_tensors_that_lie_as_told() -> None:
    asked: list[int] = []

    def make_room() -> int:
        asked.append(1)
        return 1 << 20

    probe = LayoutProbe(make_room=make_room)
    columns = Layout("bfloat16", "cpu", (4, 6), (1, 4))
    assert probe(aten.relu.default, (columns,), {}, [columns], False) == ((1, 4),)
    assert probe(aten.relu.default, (columns,), {}, [columns], False) == ((1, 4),)
    assert len(asked) == 1
    for scale in (2, 2.0, True):  # Python takes numbers for equal
        assert probe(aten.mul.Tensor, (ROWS, scale), {}, [ROWS], False) == ((6, 1),)
    for layout in (ROWS, Layout("float32", "cpu", (8, 6), (6, 1)), replace(ROWS, dtype="float64")):
        assert probe(aten.relu.default, (layout,), {}, [layout], False) == ((6, 1),)
    assert len(asked) == 7


def test_each_result_is_described() -> None:
    probe = LayoutProbe(make_room=lambda: 1 << 20)
    values, indices = ROWS, Layout("int64", "cpu", (4, 6), (6, 1))
    assert probe(aten.sort.default, (ROWS,), {}, [values, indices], False) == ((6, 1), (6, 1))


@pytest.mark.parametrize(
    ("op", "args", "results"),
    [
        (aten.multinomial.default, (ROWS, 1), [Layout("int64", "cpu", (4, 1), (1, 1))]),
        (aten.nonzero.default, (ROWS,), [Layout("int64", "cpu", (24, 2), (2, 1))]),
    ],
    ids=["zeros are refused", "sizes depend on data"],
)
def test_what_cannot_be_found_out_is_not_known(op: Any, args: Any, results: list[Layout]) -> None:
    assert LayoutProbe(make_room=lambda: 1 << 20)(op, args, {}, results, False) is None


def test_an_op_without_room_is_not_run() -> None:
    ran: list[int] = []

    def op(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.relu()

    nbytes = 3 * 4 * 6 * 4
    assert LayoutProbe(make_room=lambda: nbytes - 1)(op, (ROWS,), {}, [ROWS], False) is None
    assert not ran
    assert LayoutProbe(make_room=lambda: nbytes)(op, (ROWS,), {}, [ROWS], False) == ((6, 1),)


def test_random_numbers_are_those_of_the_program() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    LayoutProbe(make_room=lambda: 1 << 20)(aten.bernoulli.p, (ROWS, 0.5), {}, [ROWS], False)
    assert torch.equal(torch.rand(3), expected)
