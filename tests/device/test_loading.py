"""Building the test device: once, by one process at a time, with a reason where it fails."""

from __future__ import annotations

import pathlib

import pytest
import torch

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
