"""Methods are wrapped once, whatever their kind."""

from __future__ import annotations

from typing import Any

import pytest

from ds_finepage.integrations.deepspeed.patches import (
    WrappedCall,
    exchanged,
    is_wrapped,
    wrap,
)


class Theirs:
    def of_an_instance(self, value: int) -> tuple[Any, int]:
        return self, value

    @classmethod
    def of_a_class(cls, value: int) -> tuple[Any, int]:
        return cls, value

    @staticmethod
    def of_nobody(value: int) -> tuple[Any, int]:
        return None, value


def doubled(call: WrappedCall) -> tuple[Any, Any]:
    call.arguments["value"] *= 2
    return call.owner, call.run()[1]


@pytest.mark.parametrize("name", ("of_an_instance", "of_a_class", "of_nobody"))
def test_every_kind_of_method_is_wrapped_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = vars(Theirs)[name]
    theirs = Theirs()
    stock = getattr(theirs, name)(1)
    assert not is_wrapped(Theirs, name)
    monkeypatch.setattr(Theirs, name, descriptor)  # which puts it back
    wrap(Theirs, name, doubled)
    wrap(Theirs, name, doubled)
    assert is_wrapped(Theirs, name)
    assert getattr(theirs, name)(value=1) == (stock[0], 2)
    assert isinstance(vars(Theirs)[name], type(descriptor))


def test_an_exchanged_name_is_restored_after_an_error_too() -> None:
    class Owner:
        name = "stock"

    with pytest.raises(RuntimeError), exchanged(Owner, "name", "ours"):
        assert Owner.name == "ours"
        raise RuntimeError
    assert Owner.name == "stock"
