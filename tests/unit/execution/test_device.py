"""Which devices plans can run on, and what is known of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.errors import ConfigError, StoreError
from ds_finepage.execution import device as device_module
from ds_finepage.execution.device import (
    Accelerator,
    Device,
    default_device,
    device_of,
    fork_rng,
    require_device,
)
from ds_finepage.execution.host_memory import Registration

CUDA = torch.device("cuda")


class FakeAccelerator(Accelerator):
    """An accelerator that has everything, on paper."""

    live = itertools.count(0, 1 << 20)

    def new_stream(self) -> Any:
        return SimpleNamespace()

    def new_event(self, *, is_timed: bool = False) -> Any:
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)

    @property
    def live_bytes(self) -> int:
        return next(self.live)

    @property
    def reads_pinned_memory(self) -> bool:
        return True


@pytest.fixture
def one_accelerator(monkeypatch: pytest.MonkeyPatch) -> type[FakeAccelerator]:
    """Let torch see one device of type cuda that has everything."""

    class Fake(FakeAccelerator):
        pass

    empty = torch.empty
    device_module._lack.cache_clear()
    monkeypatch.setattr(device_module, "Accelerator", Fake)
    monkeypatch.setattr(torch, "empty", lambda *a, device, **k: empty(*a, **k))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    return Fake


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    device_module._lack.cache_clear()


# --- which device ----------------------------------------------------------------------------


def test_the_accelerator_is_the_default(one_accelerator: type[FakeAccelerator]) -> None:
    assert default_device() == CUDA


def test_the_cpu_is_the_default_without_one(
    no_accelerator: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_device() == torch.device("cpu")
    assert not caplog.messages


def test_an_accelerator_that_plans_cannot_run_on_is_not_the_default(
    one_accelerator: type[FakeAccelerator],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(one_accelerator, "reads_pinned_memory", False)
    assert default_device() == torch.device("cpu")
    (said,) = caplog.messages
    assert said.startswith("plans run on the CPU: cuda cannot be used: it does not address pinned")


OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update it.",
    "The NVIDIA driver on your system is too old (found version 11040)",
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "Found no NVIDIA driver on your system",
)


@pytest.mark.parametrize(("said", "shown"), [OLD_DRIVER, NO_DRIVER])
@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_card_that_cannot_be_started_is_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    said: str,
    shown: str,
) -> None:
    """As where torch is built for CUDA and sees no card."""

    def init() -> None:
        raise error(said)

    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else CUDA

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.cuda, "init", init)
    reason = f"cannot be used: torch sees no accelerator ({shown})"
    assert default_device() == torch.device("cpu")
    assert caplog.messages == [f"plans run on the CPU: cuda {reason}"]
    with pytest.raises(ConfigError) as refused:
        require_device("cuda")
    assert str(refused.value) == f"device: 'cuda' {reason}. Write cpu."


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cpu"])
def test_a_device_that_can_be_used(one_accelerator: type[FakeAccelerator], name: str) -> None:
    assert require_device(name) == torch.device(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu0", "'gpu0' is not a device that torch knows. Write cuda or cpu"),
        ("cuda:1", "torch sees 1 of cuda"),
        ("xpu", "the accelerator of this process is cuda, and torch has only one"),
        ("privateuseone", "the accelerator of this process is cuda"),
        ("meta", "'meta' cannot be used"),
    ],
)
def test_a_device_that_cannot_be_used(
    one_accelerator: type[FakeAccelerator], name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--where: .*{words}"):
        require_device(name, option="--where")


@pytest.mark.parametrize("name", ["cuda", "xpu:3", "privateuseone"])
def test_without_an_accelerator_only_the_cpu_can_be_used(no_accelerator: None, name: str) -> None:
    with pytest.raises(ConfigError, match=r"torch sees no accelerator( \(.*\))?. Write cpu"):
        require_device(name)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("Backend doesn't support create a new Stream.")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("new_stream", refuse, "no streams or no events .Backend"),
        ("new_event", refuse, "no streams or no events"),
        ("live_bytes", 0, "does not count its live bytes"),
        ("reads_pinned_memory", False, "does not address pinned host memory"),
    ],
)
def test_a_device_that_lacks_something(
    one_accelerator: type[FakeAccelerator],
    monkeypatch: pytest.MonkeyPatch,
    attribute: str,
    value: Any,
    words: str,
) -> None:
    monkeypatch.setattr(one_accelerator, attribute, value)
    with pytest.raises(ConfigError, match=f"device: 'cuda' cannot be used: it.*{words}|{words}"):
        require_device("cuda")


@pytest.mark.parametrize("device", ["gpu0", "meta"])
def test_a_refused_device_leaves_the_module_alone(device: str) -> None:
    module = torch.nn.Linear(2, 2)
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    watched = vars(torch.nn.Parameter).get("data")  # by attached models of other tests
    with pytest.raises(ConfigError, match="device"):
        ds_finepage.attach(module, device_budget="1MiB", device=device)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
    assert vars(torch.nn.Parameter).get("data") is watched


# --- what is known ---------------------------------------------------------------------------


def test_the_cpu_works_while_the_caller_waits() -> None:
    cpu, host = device_of("cpu"), torch.zeros(3, dtype=torch.uint8)
    assert type(cpu) is Device and not cpu.is_accelerator and cpu.name == "cpu"
    assert cpu.pinned(host) is host and cpu.show(host) is host
    free, total = cpu.memory_info()
    assert 0 < free <= total
    cpu.empty_cache(), cpu.synchronize(), cpu.synchronize_stream()


def test_free_memory_counts_the_reserve_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "get_memory_info": (100, 1000),
        "memory_reserved": 50,
        "memory_allocated": 20,
        "max_memory_allocated": 40,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda d, v=value: v, raising=False)
    device = Accelerator(CUDA)
    assert device.memory_info() == (130, 1000)
    assert (device.live_bytes, device.peak_bytes) == (20, 40)


def test_an_older_torch_asks_the_module_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda d: 0)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda d: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (7, 9))
    assert Accelerator(CUDA).memory_info() == (7, 9)


def test_the_module_of_a_device_says_what_is_not_generic(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda where: module)
    added = Accelerator(torch.device("privateuseone"))
    assert added.name == added.where.type
    assert not added.can_delay and not added.reads_pinned_memory
    assert Accelerator(torch.device("xpu")).reads_pinned_memory
    module.__dict__.update(
        get_device_name=lambda where: "a card", _sleep=None, can_read_pinned_memory=True
    )
    assert added.name == "a card" and added.can_delay and added.reads_pinned_memory


def test_memory_that_cannot_be_pinned_in_place_is_refused() -> None:
    host = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(StoreError, match="3 bytes of host memory are not pinned, and xpu cannot"):
        Accelerator(torch.device("xpu")).show(host)


def test_an_error_of_pinning_in_place_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda address, nbytes, flags: 712)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(StoreError, match="cannot pin 3 bytes .* error 712"):
        Accelerator(CUDA).show(torch.zeros(3, dtype=torch.uint8))


def test_shown_memory_lives_as_long_as_a_tensor_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage on another address is generic, so the CPU can stand for the accelerator."""
    host = torch.arange(6, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    shown = Accelerator(torch.device("cpu")).show(host)
    assert shown.data_ptr() == host.data_ptr() and shown.untyped_storage()._memory is host
    part = shown[2:].detach()
    del shown, host
    assert part.untyped_storage()._memory.tolist() == [0, 1, 2, 3, 4, 5]
    assert part.tolist() == [2, 3, 4, 5]


def test_random_numbers_go_on_as_if_nothing_had_been_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with fork_rng(["cpu", torch.device("cpu")]):
        drawn = torch.rand(3)
    assert torch.equal(torch.rand(3), drawn)
    asked: list[Any] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda d, **kw: asked.append((d, kw)))
    fork_rng(["cpu", "xpu:1"])
    assert asked == [([torch.device("xpu:1")], {"device_type": "xpu"})]


# --- limits and pinned memory -------------------------------------------------------------------


def test_the_allocator_is_limited_to_the_budget_and_its_slack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[Any] = []
    slack = device_module.ALLOCATOR_SLACK_BYTES
    known = SimpleNamespace(set_per_process_memory_fraction=lambda *args: limits.append(args))
    monkeypatch.setattr(Accelerator, "_module", known)
    monkeypatch.setattr(Accelerator, "memory_info", lambda self: (0, 4 * slack))
    device_of(CUDA).limit_memory(slack)
    device_of(CUDA).limit_memory(9 * slack)
    assert limits == [(0.5, 0), (1.0, 0)]
    monkeypatch.setattr(Accelerator, "_module", SimpleNamespace())
    device_of(CUDA).limit_memory(slack)
    device_of("cpu").limit_memory(slack)
    assert len(limits) == 2


def test_pinned_memory_is_that_of_the_allocator_and_whole_pages_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Registration, "total_bytes", 7)
    module = SimpleNamespace(host_memory_stats=lambda: {"allocated_bytes.current": 100})
    monkeypatch.setattr(Accelerator, "_module", module)
    assert device_of(CUDA).pinned_bytes == 107
    monkeypatch.setattr(Accelerator, "_module", SimpleNamespace())
    assert (device_of(CUDA).pinned_bytes, device_of("cpu").pinned_bytes) == (7, 0)
