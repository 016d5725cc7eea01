from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_finepage.execution import lanes as lanes_module
from ds_finepage.execution.lanes import CpuLanes
from ds_finepage.execution.stores import WeightTable
from tests.unit.execution.parameters import Model, attached
from tests.unit.execution.rig import Rig


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.lanes.close()


@pytest.fixture
def lanes() -> Iterator[CpuLanes]:
    made = CpuLanes()
    yield made
    made.close()


@pytest.fixture
def every_transfer_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each lane have its own thread, however little it copies."""
    monkeypatch.setattr(lanes_module, "SMALL_TRANSFER_BYTES", 0)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def table(model: Model) -> WeightTable:
    """The weights of the model, which shows them."""
    return attached(model)
