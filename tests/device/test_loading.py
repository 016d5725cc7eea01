"""Building the test device: once, by one process at a time, with a reason where it fails."""

from __future__ import annotations

import pathlib
import threading

import pytest
import torch
from torch.utils import cpp_extension

from tests.device import loading


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Let builds go to an empty folder, and import nothing from it."""
    monkeypatch.setenv("SLOWCARD_BUILD", str(tmp_path))
    monkeypatch.setattr(loading, "_import", lambda file: file.read_text())
    return tmp_path


def test_a_missing_compiler_is_the_reason(
    empty_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(empty_folder))
    assert loading.why_not() == "the test device must be compiled, and g++ is not there"
    with pytest.raises(loading.DeviceMissing, match="g\\+\\+ is not there"):
        loading._register.__wrapped__()  # what the cache holds, other tests go on to use


def test_another_device_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    assert loading.why_not() == "torch already has the device 'npu' in its place"


def test_processes_build_one_after_another_and_once(
    empty_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, overtaken, builds = threading.Event(), threading.Event(), []

    def compile_slowly(name: str, sources: list[str], build_directory: str, **_: object) -> str:
        builds.append(name)
        if started.is_set():
            overtaken.set()
        started.set()
        overtaken.wait(0.2)  # the second one would come through here, were there no lock
        (pathlib.Path(build_directory) / f"{name}.so").write_text("compiled")
        return "compiled"

    monkeypatch.setattr(cpp_extension, "load", compile_slowly)
    found: list[object] = []
    first, second = (threading.Thread(target=lambda: found.append(loading._build())) for _ in "12")
    first.start()
    started.wait()
    second.start()
    first.join()
    second.join()
    assert (builds, found) == (["slowcard"], ["compiled"] * 2)


def test_half_a_build_does_not_stay(
    empty_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, sources: list[str], build_directory: str, **_: object) -> None:
        (pathlib.Path(build_directory) / f"{name}.so").write_text("half")
        raise RuntimeError("no space left")

    monkeypatch.setattr(cpp_extension, "load", fail)
    with pytest.raises(RuntimeError, match="no space"):
        loading._build()
    assert not list(empty_folder.glob("*/slowcard.so"))
