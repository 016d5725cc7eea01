"""What stands in DeepSpeed's place: it takes over from stock hooks, and gives everything back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ds_finepage.config import FinepageConfig
from ds_finepage.integrations.deepspeed import offload
from ds_finepage.integrations.deepspeed.offload import (
    FinepageOffload,
    PlainParameters,
    offload_class,
)

NAMES = ("_register_deepspeed_module", "_register_hooks_recursively")
REGISTER_HOOKS = next(n for n in NAMES if hasattr(DeepSpeedZeRoOffload, n))


class StubHandle:
    """What attaching returns."""

    def __init__(self) -> None:
        self.num_detached = 0
        self.around_call: Any = None

    def detach(self) -> None:
        self.num_detached += 1


class Rig:
    """An offload object around a module, without an engine, and what was called on the way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle = StubHandle()
        self.calls: list[str] = []
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        self.parameters = [m._parameters for m in self.module.modules()]
        monkeypatch.setattr(offload, "attach", self._attach)
        monkeypatch.setattr(offload, "weights_of_zero", lambda module: [])
        for name in (
            "setup_zero_stage3_hooks",
            "_remove_module_hooks",
            REGISTER_HOOKS,
        ):
            monkeypatch.setattr(
                DeepSpeedZeRoOffload, name, lambda *args, name=name: self.calls.append(name)
            )
        self.made = offload_class(FinepageConfig()).__new__(offload_class(FinepageConfig()))
        assert isinstance(self.made, FinepageOffload)
        self.made.module = self.module
        self.made.finepage_config = FinepageConfig()

    def _attach(self, *_: Any, around_call: Any, **__: Any) -> StubHandle:
        self.handle.around_call = around_call
        return self.handle

    def dictionaries_are_back(self) -> bool:
        return all(
            m._parameters is before
            for m, before in zip(self.module.modules(), self.parameters, strict=True)
        )


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(monkeypatch)
    made.made.setup_zero_stage3_hooks()
    return made


def test_parameters_are_looked_up_without_being_gathered(rig: Rig) -> None:
    assert rig.made.finepage is rig.handle
    assert rig.calls == []
    for module, before in zip(rig.module.modules(), rig.parameters, strict=True):
        assert type(module._parameters) is PlainParameters
        assert dict(module._parameters) == dict(before)


@pytest.mark.parametrize("way", ("detach_finepage", "_remove_module_hooks"))
def test_every_module_gets_its_own_dictionary_of_parameters_back(rig: Rig, way: str) -> None:
    assert not rig.dictionaries_are_back()
    getattr(rig.made, way)()
    assert rig.dictionaries_are_back()
    assert rig.handle.num_detached == 1
    assert rig.made.finepage is None


def test_after_detaching_stock_hooks_are_there_once(rig: Rig) -> None:
    rig.made.detach_finepage()
    assert type(rig.made) is DeepSpeedZeRoOffload
    assert rig.calls == ["setup_zero_stage3_hooks"]
    assert rig.handle.num_detached == 1
    rig.made._remove_module_hooks()
    assert rig.calls == ["setup_zero_stage3_hooks", "_remove_module_hooks"]


def test_stock_hooks_are_not_brought_back_while_attached(rig: Rig) -> None:
    getattr(rig.made, REGISTER_HOOKS)(rig.module)
    assert rig.calls == []
    rig.made.detach_finepage()
    getattr(rig.made, REGISTER_HOOKS)(rig.module)
    assert rig.calls[-1] == REGISTER_HOOKS


def test_a_call_gets_torchs_own_linear_and_leaves_what_it_found(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = nn.functional.linear

    def of_stock(*args: Any) -> torch.Tensor:
        return plain(*args)

    keeper = offload.InsertPostInitMethodToModuleSubClasses
    monkeypatch.setattr(keeper, "linear_bk", plain, raising=False)
    monkeypatch.setattr(nn.functional, "linear", of_stock)
    with rig.handle.around_call():
        assert nn.functional.linear is plain
    assert nn.functional.linear is of_stock
    with pytest.raises(RuntimeError), rig.handle.around_call():
        raise RuntimeError
    assert nn.functional.linear is of_stock


def test_without_stock_engines_linear_stays_as_it_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = offload.InsertPostInitMethodToModuleSubClasses
    monkeypatch.delattr(keeper, "linear_bk", raising=False)
    plain = nn.functional.linear
    with rig.handle.around_call():
        assert nn.functional.linear is plain
    assert nn.functional.linear is plain
