"""The buffers of a module go to the device and come back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.execution.stores import WeightTable
from ds_finepage.runtime.interception import ModuleTree, move_buffers
from tests.unit.execution.parameters import CPU, scripted, weights_of_module

ELSEWHERE = torch.device("meta")
"""Stands for an accelerator; a move there is a copy."""


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        shared = torch.ones(3)
        for name, part in self.named_children():
            part.register_buffer("shared", shared)
            part.register_buffer(name, torch.zeros(2))
            part.register_buffer("none", None)


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let a move to the other device be a copy; return all copies."""
    moved: list[torch.Tensor] = []

    def to(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        moved.append(tensor.clone())
        return moved[-1]

    monkeypatch.setattr(torch.Tensor, "to", to)
    return moved


def buffers(module: nn.Module) -> dict[str, int]:
    return {name: id(b) for name, b in module.named_buffers(remove_duplicate=False)}


def test_a_buffer_is_moved_once_and_comes_back_with_its_value(moves: list[torch.Tensor]) -> None:
    module = Parts()
    before = buffers(module)
    undo = ExitStack()
    move_buffers(module, ELSEWHERE, undo)
    assert len(moves) == 3 and set(buffers(module).values()) == set(map(id, moves))
    module.first.shared.add_(1)
    undo.close()
    assert buffers(module) == before and module.second.shared.tolist() == [2, 2, 2]


def test_a_module_of_torchscript_has_no_parts_to_look_at() -> None:
    model = nn.Sequential(nn.Linear(2, 2), scripted(nn.ReLU()), nn.Linear(2, 2))
    tree = ModuleTree(model, WeightTable(weights_of_module(model, CPU), CPU))
    assert not tree.has_new_parts()
    model[0].bias = None  # this is no new part, and the script module is none either
    assert not tree.has_new_parts()
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert tree.has_new_parts()


def test_a_buffer_that_the_caller_has_replaced_stays() -> None:
    module, new = Parts(), torch.ones(1)
    undo = ExitStack()
    move_buffers(module, ELSEWHERE, undo)
    module.first.first = new
    undo.close()
    assert module.first.first is new


def test_buffers_that_moved_before_there_was_no_room_can_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, copy, num_moves = Parts(), torch.Tensor.to, 0
    before = buffers(module)

    def to(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        nonlocal num_moves
        num_moves += 1
        if num_moves == 3:
            raise torch.OutOfMemoryError("no room")
        return copy(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", to)
    undo = ExitStack()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        move_buffers(module, ELSEWHERE, undo)
    assert buffers(module) != before
    undo.close()
    assert buffers(module) == before
