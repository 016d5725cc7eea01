"""Loading with a version of transformers that makes all conversions before it copies one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage import _compat
from ds_finepage._compat.transformers import keeps_conversions
from ds_finepage.integrations.deepspeed import loading
from ds_finepage.integrations.deepspeed.loading import _fill

NAMES = ("a", "b", "c")


class Converter:
    """Makes one tensor, and notes how many of those made before are still held."""

    made: list[Any] = []  # noqa: RUF012
    held: list[int] = []  # noqa: RUF012

    def convert(self, name: str, model: Any = None, config: Any = None) -> dict[str, Any]:
        self.held.append(sum(made() is not None for made in self.made))
        tensor = torch.full((1,), float(ord(name)))
        self.made.append(weakref.ref(tensor))
        return {name: [tensor] if name == "a" else tensor}


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> type[Converter]:
    monkeypatch.setattr(Converter, "made", [])
    monkeypatch.setattr(Converter, "held", [])
    return Converter


def fill(
    model: dict[str, float], state_dict: dict[str, Any], load_config: Any = None
) -> tuple[list[str], set[str]]:
    """Copy a state dict into a model; with a config, convert first what the config names."""
    tensors = dict(state_dict)
    for name in load_config or ():
        found = Converter().convert(name, model=model, config=None)
        tensors.update({key: t[0] if isinstance(t, list) else t for key, t in found.items()})
    for name, tensor in tensors.items():
        model[name] = tensor.item()
    return [f"{len(tensors)} copied"], {*NAMES, "plain", "absent"} - tensors.keys()


def test_a_conversion_is_copied_before_the_next_runs(converter: type[Converter]) -> None:
    stock_model: dict[str, float] = {}
    fill(stock_model, {"plain": torch.ones(1)}, NAMES)
    assert converter.held == [0, 1, 2]

    converter.made.clear()
    converter.held.clear()
    stock = converter.convert
    model: dict[str, float] = {}
    errors, missing = _fill(converter, fill, model, {"plain": torch.ones(1)}, NAMES)
    assert model == stock_model == {"plain": 1.0, "a": 97.0, "b": 98.0, "c": 99.0}
    assert max(converter.held) == 0
    assert missing == {"absent"} and errors == ["1 copied"] * 4
    assert converter.convert is stock


def test_conversions_of_another_model_are_left_alone(converter: type[Converter]) -> None:
    model: dict[str, float] = {}

    def fill_two(model: Any, state_dict: Any, config: Any = None) -> tuple[list[str], set[str]]:
        assert list(converter().convert("b", model={})) == ["b"]
        return fill(model, state_dict, config)

    _fill(converter, fill_two, model, {})
    assert model == {}


def test_the_method_is_restored_after_an_error(converter: type[Converter]) -> None:
    stock = converter.convert
    with pytest.raises(ZeroDivisionError):
        _fill(converter, lambda *_: 1 // 0, {}, {})
    assert converter.convert is stock


def all_at_once() -> dict[str, Any]:
    return {}


def one_by_one() -> Any:
    yield {}


@pytest.mark.parametrize(
    ("run", "expected"), [(all_at_once, True), (one_by_one, False), (None, False)]
)
def test_only_a_version_that_holds_all_conversions_is_changed(run: Any, expected: bool) -> None:
    assert keeps_conversions(SimpleNamespace(**{_compat.CONVERSIONS: run})) is expected
    assert not keeps_conversions(SimpleNamespace())


@pytest.mark.parametrize("old", (True, False))
def test_a_load_by_an_old_version_copies_by_conversion(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(loading, "is_wanted", lambda _: True)
    monkeypatch.setattr(loading, "is_wanted_by_ranks", lambda _: False)
    monkeypatch.setattr(loading, "keeps_conversions", lambda _: old)
    utils: Any = SimpleNamespace(**{_compat.MODEL_FILL: fill, _compat.MODEL_READ_FILE: None})
    found = loading._load(utils, lambda: getattr(utils, _compat.MODEL_FILL), None, (), {})
    assert found.func is _fill if old else found is fill
    assert getattr(utils, _compat.MODEL_FILL) is fill
