"""A task calls torch's public function if that is seen to arrive at the task's own overload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage._compat.torch import TorchDispatchMode, _nn
from ds_finepage.execution import bound_plan
from ds_finepage.execution.direct_calls import direct_call
from tests.unit.execution.rig import Rig, deep, negated

aten = torch.ops.aten
A, B = torch.arange(6.0).view(2, 3), torch.full((2, 3), 2.0)

TAKEN: dict[str, tuple[Any, list[Any], dict[str, Any], Any]] = {
    "two tensors": (aten.mul.out, [A, B], {}, torch.mul),
    "a number": (aten.mul.out, [A, 2.5], {}, torch.mul),
    "a keyword": (aten.add.out, [A, B], {"alpha": 3}, torch.add),
    "a power": (aten.pow.Tensor_Scalar_out, [A, 2], {}, torch.pow),
    "a list of sizes": (aten.mean.out, [A, [-1], True], {}, torch.mean),
    "a list of tensors": (aten.cat.out, [[A, B], 1], {}, torch.cat),
    "a product": (aten.mm.out, [A, A.t()], {}, torch.mm),
    "a network's function": (aten.silu.out, [A], {}, _nn.silu),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_public_function_is_taken_and_writes_the_same(name: str) -> None:
    op, args, kwargs, public = TAKEN[name]
    one, other = torch.empty(0), torch.empty(0)
    found = direct_call(op, args, {**kwargs, "out": one})
    assert found is public
    assert one.numel() == 0  # to ask computes nothing
    found(*args, **kwargs, out=one)
    op(*args, **kwargs, out=other)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("op", "args", "method"),
    [
        (aten.copy_.default, [B, True], torch.Tensor.copy_),
        (aten.add_.Tensor, [B], torch.Tensor.add_),
        (aten.index_copy_.default, [1, torch.tensor([2]), A[:, :1]], torch.Tensor.index_copy_),
    ],
)
def test_a_method_is_taken_that_writes_its_tensor(op: Any, args: list[Any], method: Any) -> None:
    one, other = A.clone(), A.clone()
    found = direct_call(op, [one, *args], {})
    assert found is method
    assert torch.equal(one, A)  # to ask computes nothing
    found(one, *args)
    op(other, *args)
    assert torch.equal(one, other)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "args", "kwargs"), [c[:3] for c in TAKEN.values()], ids=TAKEN)
def test_the_same_overload_runs(op: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    out = torch.empty(0)
    with Seen() as seen:
        direct_call(op, args, {**kwargs, "out": out})(*args, **kwargs, out=out)
    assert seen.ops == [op]


def test_a_function_that_has_no_public_name_stays() -> None:
    assert direct_call(aten.copy.out, [A, B], {"out": torch.empty(0)}) is aten.copy.out
    assert direct_call(test_a_function_that_has_no_public_name_stays, [A], {}) is (
        test_a_function_that_has_no_public_name_stays
    )


def test_a_function_that_others_have_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler may count calls of ``torch.mm`` for a while, and then take its counter out."""
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: None)
    assert direct_call(aten.mm.out, [A, A.t()], {"out": torch.empty(0)}) is aten.mm.out


def test_an_overload_with_other_keywords_stays() -> None:
    outs = {"max": torch.empty(0), "max_values": torch.empty(0, dtype=torch.int64)}
    assert direct_call(aten.max.dim_max, [A, 1], outs) is aten.max.dim_max


def test_an_op_without_tensors_stays() -> None:
    """Its public function asks for the default device, and that may not be the task's."""
    out = torch.empty(0)
    assert direct_call(aten.arange.start_out, [0, 3], {"out": out}) is aten.arange.start_out


@pytest.mark.parametrize(
    ("op", "args", "shown"),
    [
        (aten.mul.out, [A, B], [A, A]),
        (aten.mul.out, [A, 2.5], [A, 2]),
        (aten.pow.Tensor_Scalar_out, [A, 2], [A, 3]),
        (aten.mean.out, [A, [-1], True], [A, [0], True]),
        (aten.cat.out, [[A, B], 1], [[A], 1]),
        (aten.add.out, [A, B], [A, B, 2]),
        (aten.mul.out, [A, 2], None),
    ],
)
def test_a_function_that_arrives_elsewhere_stays(
    op: Any, args: list[Any], shown: list[Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is of the call that arrives, with every argument."""
    name = op.overloadpacket.__name__
    public = getattr(torch, name)

    def elsewhere(*given: Any, **kwargs: Any) -> Any:
        if shown is None:  # in two calls
            public(*given, **kwargs)
        elif name == "add":
            return public(*shown[:2], alpha=shown[2], **kwargs)
        return public(*(given if shown is None else shown), **kwargs)

    monkeypatch.setattr(torch, name, elsewhere)
    monkeypatch.setattr("types.BuiltinFunctionType", type(elsewhere))
    assert direct_call(op, args, {"out": torch.empty(0)}) is op


def test_a_bound_task_takes_the_public_function() -> None:
    actions = Rig(*deep()).executor.actions.values()
    called = [getattr(action, "func", None) for action in actions]
    assert torch.mm in called
    assert aten.mm.out not in called


def test_a_task_of_the_calls_tensors_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its tensors when it runs first, and then keeps the function."""
    found = []

    def noted(*args: Any) -> Any:
        found.append(direct_call(*args))
        return found[-1]

    monkeypatch.setattr(bound_plan, "direct_call", noted)
    made = Rig(negated())
    assert found == []
    for _ in range(2):
        given = torch.randn(3)
        assert torch.equal(made(given)[0], -given)
    assert found == [torch.neg]
