"""Pinned memory of our own: exact, registered while it is there, and left to torch where small."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finepage.capture.models import load_model_config
from ds_finepage.errors import StoreError
from ds_finepage.execution import host_memory
from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.host_memory import LEAST_BYTES, Registration, new_pages
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model

CUDA = torch.device("cuda")
PAGE = mmap.PAGESIZE


class Driver:
    """Notes what is registered; memory that is unregistered is still there."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.status:
            assert address not in self.registered and flags == 0
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ctypes.string_at(address, self.registered.pop(address))
        return 0


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture(autouse=True)
def total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registration, "total_bytes", 0)


def test_pages_are_registered_while_any_tensor_has_them(driver: Driver) -> None:
    pages = new_pages(3 * PAGE + 5, driver)
    assert pages.dtype is torch.uint8 and pages.tolist() == [0] * (3 * PAGE + 5)
    assert driver.registered == {pages.data_ptr(): 3 * PAGE + 5}
    assert Registration.total_bytes == 4 * PAGE
    part = pages[PAGE:].view(torch.uint8)
    del pages
    assert driver.registered and part.fill_(7).sum() == 7 * (2 * PAGE + 5)
    del part
    assert not driver.registered and Registration.total_bytes == 0


@pytest.mark.usefixtures("card")
def test_memory_of_others_is_registered_in_place_and_kept(driver: Driver) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    address = memory.data_ptr()
    shown, is_there = Accelerator(torch.device("cpu")).show(memory), weakref.ref(memory)
    del memory
    gc.collect()
    assert is_there() is not None
    assert driver.registered == {address: 100} and Registration.total_bytes == PAGE
    del shown  # the driver reads what it unregisters
    assert not driver.registered and Registration.total_bytes == 0


def test_what_the_driver_refuses_is_not_counted() -> None:
    with pytest.raises(StoreError, match=r"cannot pin 4096 bytes .* error 2 of cudaHostRegister"):
        new_pages(4096, Driver(status=2))
    assert Registration.total_bytes == 0


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [(os, "getpid", -1), (sys, "is_finalizing", True)],
    ids=["a process that was forked", "the end of the process"],
)
def test_where_the_driver_may_be_gone_nothing_is_unregistered(
    where: Any, name: str, value: object, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = new_pages(PAGE, driver)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, lambda: value)
        del pages
    assert driver.registered


def test_copies_that_are_on_their_way_are_waited_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    pages = new_pages(PAGE, driver)
    monkeypatch.setattr(
        torch.accelerator, "synchronize", lambda: seen.append(bool(driver.registered))
    )
    del pages
    assert seen == [True]


# What is free.


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1,000 bytes, of which 600 are free, and the files of its container."""
    memory = psutil.virtual_memory()._replace(available=600, total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    return tmp_path


def test_without_a_container_what_the_machine_has_is_free(groups: Path) -> None:
    assert host_memory.host_memory() == (600, 1000)
    write(groups, memory__max="max\n", memory__current="5\n", memory__stat="")
    assert host_memory.host_memory() == (600, 1000)


def test_a_container_has_its_own_limit_and_pages_of_files_are_free(groups: Path) -> None:
    stat = "anon 100\ninactive_file 50\n"
    write(groups, memory__max="400\n", memory__current="150\n", memory__stat=stat)
    assert host_memory.host_memory() == device_of("cpu").memory_info() == (300, 400)
    write(groups, memory__current="500\n")
    assert host_memory.host_memory() == (0, 400)
    write(groups, memory__max="5000\n", memory__current="4900\n")
    assert host_memory.host_memory() == (600, 1000)  # a limit beyond the machine is none


def test_the_older_version_of_the_files_is_read_too(groups: Path) -> None:
    write(
        groups / "memory",
        memory__limit_in_bytes="400\n",
        memory__usage_in_bytes="150\n",
        memory__stat="cache 9\n",
    )
    assert host_memory.host_memory() == (250, 400)


# What an accelerator takes.


@pytest.fixture
def card(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """A card whose own allocator rounds, as torch's does; nothing of it is allocated."""
    monkeypatch.setattr(Accelerator, "_module", SimpleNamespace(cudart=lambda: driver))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda host: host.data_ptr() in [1])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host.clone())
    return Accelerator(CUDA)


def test_a_large_block_is_copied_to_pages_and_a_small_one_is_left_to_torch(
    card: Accelerator, driver: Driver
) -> None:
    large = torch.arange(LEAST_BYTES // 4, dtype=torch.float32)
    found = card.pinned(large)
    assert torch.equal(found, large) and found.dtype is torch.float32
    assert driver.registered == {found.data_ptr(): LEAST_BYTES}
    small, new = card.pinned(large[1:]), card.new_pinned(LEAST_BYTES)
    assert driver.registered.keys() == {found.data_ptr(), new.data_ptr()}
    assert torch.equal(small, large[1:])


def test_without_such_a_driver_torch_pins(
    card: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "_module", SimpleNamespace())
    monkeypatch.setattr(host_memory, "new_pages", None)
    large = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    assert torch.equal(card.pinned(large), large)


def bytes_to_pin(nbytes: int, card: Accelerator, driver: Driver) -> int:
    """Return what a block takes: whole pages, or as torch's allocator rounds it."""
    if nbytes < LEAST_BYTES:
        return 1 << (nbytes - 1).bit_length()
    block = card.new_pinned(nbytes)  # pages that nobody writes take no memory
    (registered,) = driver.registered.values()
    assert block.numel() == nbytes
    return -(-registered // PAGE) * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["as trained", "int4"])
@pytest.mark.parametrize(
    "model", ["llama-7b", "llama-65b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"]
)
def test_a_model_pins_what_it_has(
    model: str, weights: str, card: Accelerator, driver: Driver
) -> None:
    config = load_model_config(model)
    config.quantization_config = None
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if weights == "int4":
        pack_model(made, PackedForm.parse("int4", 32))
    sizes = [weight.nbytes for weight in made.parameters()]
    known = {size: bytes_to_pin(size, card, driver) for size in set(sizes)}
    assert sum(sizes) <= sum(map(known.__getitem__, sizes)) <= 1.01 * sum(sizes)
