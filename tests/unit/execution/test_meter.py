"""The meter of live bytes, held against allocations of known size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd.profiler import profile

from ds_finepage.execution.meter import DeviceMeter, free_profiler

CPU = torch.device("cpu")
MIB = 1 << 20


def block(nbytes: int = MIB) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_was_released_before_does_not_count() -> None:
    with DeviceMeter(CPU) as meter:
        for _ in range(3):
            one = block()
            del one
    assert (meter.peak_bytes, meter.live_bytes) == (MIB, 0)


def test_the_peak_is_remembered_when_it_is_over() -> None:
    with DeviceMeter(CPU) as meter:
        one, other = block(), block()
        del one, other
        kept = block(1024)
    assert (meter.peak_bytes, meter.live_bytes) == (2 * MIB, kept.numel())


def test_what_was_there_before_does_not_count_nor_its_release() -> None:
    before = block(4 * MIB)
    with DeviceMeter(CPU) as meter:
        del before
        kept = block()
    assert meter.peak_bytes == meter.live_bytes == kept.numel()


def test_what_an_op_takes_for_a_moment_counts() -> None:
    x = torch.zeros(MIB // 4)
    with DeviceMeter(CPU) as meter:
        x.add_(x + x)
    assert meter.peak_bytes == MIB


def test_an_error_inside_goes_through_and_is_measured_up_to() -> None:
    meter = DeviceMeter(CPU)
    with pytest.raises(ValueError, match="op failed"), meter:
        kept = block()
        raise ValueError("op failed")
    assert meter.peak_bytes == kept.numel()


def test_a_meter_in_a_profile_is_refused() -> None:
    with profile(use_kineto=False), pytest.raises(RuntimeError, match="profiler"):
        DeviceMeter(CPU).__enter__()


def test_a_meter_in_a_meter_is_refused_and_the_outer_one_goes_on() -> None:
    with DeviceMeter(CPU) as meter:
        with pytest.raises(RuntimeError, match="another meter"):
            DeviceMeter(CPU).__enter__()
        kept = block()
    assert meter.peak_bytes >= kept.numel()


def test_a_profile_inside_a_meter_ends_it_and_that_is_said() -> None:
    meter = DeviceMeter(CPU)
    with pytest.raises(RuntimeError, match="ended this meter's"), meter:
        with profile(use_kineto=False):
            pass


def test_another_profile_may_run_where_the_meter_makes_room() -> None:
    with DeviceMeter(CPU) as meter:
        kept = [block()]
        for inner in (DeviceMeter(CPU), profile(use_kineto=False)):
            with free_profiler(), inner:
                block(8 * MIB)  # unseen
        kept.append(block())
    assert meter.peak_bytes == meter.live_bytes == 2 * MIB


def test_a_block_that_is_released_while_the_meter_makes_room_is_forgotten_when_it_comes_again() -> (
    None
):
    with DeviceMeter(CPU) as meter:
        kept = block()
        address = kept.data_ptr()
        with free_profiler():
            del kept
        again = block()
        same = again.data_ptr() == address
    assert meter.live_bytes == (MIB if same else 2 * MIB)


def test_the_meter_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with DeviceMeter(CPU):
        kept = block()
    del kept
    assert capfd.readouterr() == ("", "")


IN_ANOTHER_THREAD = """
import threading, torch
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.meter import DeviceMeter

OpMeter(torch.device("cpu"))

def measure():
    with DeviceMeter(torch.device("cpu")):
        torch.ones(3)

thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


def test_a_meter_in_another_thread_prints_nothing() -> None:
    command = [sys.executable, "-c", IN_ANOTHER_THREAD]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line for line in said.stderr.splitlines() if "callback" in line] == []
