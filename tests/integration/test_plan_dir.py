"""Plans that are kept in a folder: found again, and made anew where a file is no plan."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError
from ds_finepage.files import write_file
from ds_finepage.runtime import plan_cache as plans
from ds_finepage.runtime.handle import Handle
from tests.integration.families import tiny


def saved(
    model: nn.Module,
    folder: Path,
    x: torch.Tensor,
    *,
    expect: torch.Tensor | None = None,
    **settings: Any,
) -> Handle:
    torch._dynamo.reset()
    settings = {"device_budget": "1MiB", "plan_dir": str(folder), "device": "cpu", **settings}
    handle = attach(model, **settings)
    try:
        with torch.no_grad():
            found = model(x)
        assert expect is None or torch.equal(found, expect)
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


def of_another_arena(text: bytes, folder: Path, x: torch.Tensor) -> bytes:
    other = folder.parent / "other"
    saved(tiny(), other, x, device_budget="2MiB")
    (path,) = other.iterdir()
    return path.read_bytes()


def with_a_wrong_plan(text: bytes, folder: Path, x: torch.Tensor) -> bytes:
    document = json.loads(text)
    document["edges"] = []
    return json.dumps(document).encode()


BAD_PLANS: dict[str, tuple[Callable[[bytes, Path, torch.Tensor], bytes], str]] = {
    "another model": (
        lambda text, folder, x: wider(folder, x),
        "a plan file of another model or version",
    ),
    "another arena": (of_another_arena, "a plan for an arena of"),
    "a wrong plan": (with_a_wrong_plan, "memgraph"),
    "truncated": (lambda text, folder, x: text[: len(text) // 2], "corrupt JSON"),
    "not text": (lambda text, folder, x: b"\xff\xfe\x00", "not UTF-8 text"),
}


@pytest.mark.parametrize("bad", BAD_PLANS)
def test_a_file_that_is_no_plan_is_named_and_replaced(
    bad: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, message = BAD_PLANS[bad]
    x, folder = torch.randn(3, 16), tmp_path / "plans"
    saved(tiny(), folder, x)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    path.write_bytes(spoil(good, folder, x))
    model = tiny()
    plain = model(x)
    assert saved(model, folder, x, expect=plain).stats.num_plans == 1
    (record,) = (r for r in caplog.records if r.name == "ds_finepage.runtime.plan_cache")
    assert record.levelname == "WARNING"
    assert str(path) in record.getMessage() and message in record.getMessage()
    assert path.read_bytes() == good
    assert saved(tiny(), folder, x).stats.num_plans == 0


def test_a_plan_that_cannot_be_kept_runs_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, folder = torch.randn(3, 16), tmp_path / "plans"
    saved(tiny(), folder, x)
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()  # which can neither be read nor written as a file
    model = tiny()
    saved(model, folder, x, expect=model(x))
    assert f"{path} cannot be kept" in caplog.text
    assert list(folder.iterdir()) == [path]


def test_the_home_folder_may_be_named_by_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tiny(), Path("~/kept/plans"), torch.randn(3, 16))
    assert len(list((tmp_path / "kept" / "plans").iterdir())) == 1


BAD_FOLDERS = {
    "a file": "file",
    "below a file": "file/plans",
    "a null byte": "plans\0",
    "not writable": "/proc/plans",
    "nobody's home": "~nobody-has-this-name/plans",
}


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_attached(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("here")
    model, folder = tiny(), BAD_FOLDERS[bad]
    with pytest.raises(ConfigError, match=r"finepage\.plan_dir: .* cannot be kept .*Name a folder"):
        attach(model, device_budget="1MiB", plan_dir=folder, device="cpu")
    assert all(p.untyped_storage().nbytes() for p in model.parameters())


def test_two_that_write_one_plan_at_once_leave_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, folder = torch.randn(3, 16), tmp_path / "plans"

    def write_often(path: Path, content: str) -> None:
        threads = [threading.Thread(target=write_file, args=(path, content)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    monkeypatch.setattr(plans, "write_file", write_often)
    assert saved(tiny(), folder, x).stats.num_plans == 1
    assert len(list(folder.iterdir())) == 1
    assert saved(tiny(), folder, x).stats.num_plans == 0
