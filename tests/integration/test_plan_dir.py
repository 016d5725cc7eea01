"""Plans that are kept in a folder: found again, and refused by name where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.errors import InvalidPlanError
from ds_finepage.session import Handle
from tests.integration.families import tiny


def saved(model: nn.Module, folder: Path, x: torch.Tensor, **settings: Any) -> Handle:
    torch._dynamo.reset()
    handle = attach(model, device_budget="1MiB", plan_dir=str(folder), device="cpu", **settings)
    try:
        with torch.no_grad():
            model(x)
    finally:
        handle.detach()
    return handle


def test_plans_are_saved_and_loaded_again(tmp_path: Path) -> None:
    x, folder = torch.randn(3, 16), tmp_path / "new" / "plans"
    assert saved(tiny(), folder, x).stats.num_plans == 1
    (path,) = folder.iterdir()
    text = path.read_bytes()
    model = tiny()
    plain = model(x)
    again = saved(model, folder, x)
    assert again.stats.num_plans == 0
    assert again.stats.num_captures == 1
    assert torch.equal(model(x), plain)
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == text
    assert saved(tiny(), folder, x, policy="horizon").stats.num_plans == 1
    assert len(list(folder.iterdir())) == 2


class Loss(nn.Module):
    """Makes a loss whose op uses its result as scratch, if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chance = self.first(x).sigmoid()
        loss = torch.nn.functional.binary_cross_entropy(chance, chance)
        return loss + 1, self.last(chance)


def test_a_plan_that_was_loaded_runs_ops_in_their_safe_form(tmp_path: Path) -> None:
    x, model = torch.randn(30, 16), Loss()
    plain = model(x)
    for num_plans in (1, 0):
        torch._dynamo.reset()
        handle = attach(
            model,
            device_budget="1MiB",
            plan_dir=str(tmp_path),
            device="cpu",
            debug={"poison_vacated": True},  # else it would step aside
        )
        with torch.no_grad():
            assert all(map(torch.equal, model(x), plain))
        assert handle.stats.num_plans == num_plans
        handle.detach()


def wider(folder: Path, x: torch.Tensor) -> bytes:
    """Plan another model elsewhere and return its file."""
    other = folder.parent / "other"
    torch.manual_seed(0)
    saved(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)).eval(), other, x)
    (path,) = other.iterdir()
    return path.read_bytes()


def of_version(text: bytes, key: str, value: Any) -> bytes:
    document = json.loads(text)
    document[key] = value
    return json.dumps(document).encode()


BAD_PLANS: dict[str, tuple[Callable[[bytes, Path, torch.Tensor], bytes], str]] = {
    "another model": (
        lambda text, folder, x: wider(folder, x),
        "a plan file of another model or version",
    ),
    "another format": (lambda text, folder, x: of_version(text, "format", 99), "format version 99"),
    "corrupt": (lambda text, folder, x: text[: len(text) // 2], "corrupt JSON"),
    "empty": (lambda text, folder, x: b"", "corrupt JSON"),
    "another kind": (lambda text, folder, x: b"{}", "not a file of ds_finepage"),
}


@pytest.mark.parametrize("bad", BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused_by_name(bad: str, tmp_path: Path) -> None:
    spoil, message = BAD_PLANS[bad]
    x, folder = torch.randn(3, 16), tmp_path / "plans"
    saved(tiny(), folder, x)
    (path,) = folder.iterdir()
    path.write_bytes(spoil(path.read_bytes(), folder, x))
    model = tiny()
    plain = model(x)
    with pytest.raises(InvalidPlanError, match=message) as error:
        saved(model, folder, x)
    assert str(path) in str(error.value)
    assert torch.equal(model(x), plain)
    path.unlink()
    assert saved(model, folder, x).stats.num_plans == 1
