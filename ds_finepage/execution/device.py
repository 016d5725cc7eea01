"""The one file that knows devices: streams, events, pinned memory, statistics, random numbers.

The rest of the package asks :func:`device_of`. The CPU has threads in the place of streams. Every
accelerator (CUDA, ROCm, XPU, and devices that a program adds to torch) takes one road: torch's
generic functions. Four things are not generic in torch, and stand here:

- Free memory, before torch 2.10: the device's own module has ``mem_get_info``.
- A delay on a stream: the device's own module has ``_sleep``, as CUDA's does, or there is none.
- Pinned host memory as a tensor of the device. CUDA, ROCm and XPU address it as it is. A device
  that a program adds to torch says so by ``can_read_pinned_memory = True`` in its module.
- Graphs, before torch 2.12: the device's own module has ``CUDAGraph``, or there are none.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

from ds_finepage._compat.torch import _construct_storage_from_data_pointer
from ds_finepage.errors import ConfigError, FinepageError, StoreError
from ds_finepage.execution.host_memory import LEAST_BYTES, Registration, host_memory, new_pages
from ds_finepage.units import format_bytes

logger = logging.getLogger(__name__)

CYCLES_PER_US = 1000
"""Of a delay on a stream. Clocks are faster, so delays are shorter than asked for."""

ALLOCATOR_SLACK_BYTES = 64 << 20
"""What torch's allocator may hold beyond the live bytes under a limit: it rounds, and splits."""

READ_PINNED_MEMORY = ("cuda", "xpu")  # ROCm calls itself cuda
"""Devices that read and write pinned host memory at its own address."""

_in_place: WeakValueDictionary[tuple[int, int], Registration] = WeakValueDictionary()
"""Address and size -> host memory that is pinned in place."""


class DeviceMemoryError(FinepageError, torch.OutOfMemoryError):
    """The device has less room than the budget: others hold memory of it."""

    @classmethod
    def of(
        cls, error: torch.OutOfMemoryError, where: torch.device, budget_bytes: int
    ) -> DeviceMemoryError:
        """Make the error."""
        free, total = device_of(where).memory_info()
        return cls(
            f"{where} is out of memory within device_budget {format_bytes(budget_bytes)} "
            f"({budget_bytes} bytes): {format_bytes(free)} of {format_bytes(total)} are free. "
            f"Other programs, or tensors of this one, hold the rest. Free them, or lower "
            f"finepage.device_budget. ({error})"
        )


class Device:
    """The CPU. It works while the caller waits, and its memory is host memory.

    Attributes:
        where: The device as torch names it.
        is_accelerator: True if it works beside the host, in streams, on memory of its own.
        alignment: The alignment of torch's own allocator, in bytes; kernels choose their code path
            by it.
        rated_dtypes: The dtypes whose rates are measured; in float16 a CPU would take its time.
    """

    is_accelerator = False
    alignment = 64
    rated_dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def __init__(self, where: torch.device) -> None:
        """Describe a device that :func:`require_device` has accepted."""
        self.where = where

    @property
    def name(self) -> str:
        """The name of the machine part."""
        return self.where.type

    def memory_info(self) -> tuple[int, int]:
        """Return the free bytes, and all bytes; what torch's allocator keeps in reserve is free."""
        return host_memory()

    def empty_cache(self) -> None:
        """Give the reserve of torch's allocator back to the system."""

    def limit_memory(self, nbytes: int) -> None:
        """Let torch's allocator run out of memory beyond a limit, where it knows limits."""

    @property
    def live_bytes(self) -> int:
        """The bytes of all live tensors; 0 where torch does not count them."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """The pinned host memory of this process."""
        return 0

    @property
    def has_graphs(self) -> bool:
        """True if it records work and replays that with one launch."""
        return False

    def synchronize(self) -> None:
        """Let the host wait until no stream has work."""

    def synchronize_stream(self) -> None:
        """Let the host wait until the caller's current stream has no work."""

    def follow_default_stream(self) -> None:
        """Let the caller's current stream wait for the default one."""

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """Return host memory that copies beside the host can use: a copy if this cannot be used."""
        return host

    def new_pinned(self, nbytes: int) -> torch.Tensor:
        """Return new host memory that copies beside the host can use, 1-d uint8."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def show(self, host: torch.Tensor) -> torch.Tensor:
        """Return host memory as memory of the device, at the same address.

        It is 1-d uint8.

        Raises:
            StoreError: The device cannot address memory that is not pinned.
        """
        return host


class Accelerator(Device):
    """A device with streams, through torch's generic functions."""

    is_accelerator = True
    alignment = 512
    rated_dtypes = ("float32", "bfloat16", "float16")

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.where)

    @property
    def name(self) -> str:
        """The name of the card, as far as torch knows it."""
        name_of = getattr(self._module, "get_device_name", None)
        return self.where.type if name_of is None else str(name_of(self.where))

    # Memory.

    def memory_info(self) -> tuple[int, int]:
        """Return the free bytes, and all bytes; what torch's allocator keeps in reserve is free."""
        ask = getattr(torch.accelerator, "get_memory_info", None) or self._module.mem_get_info
        free, total = ask(self.where)
        return int(free) + torch.accelerator.memory_reserved(self.where) - self.live_bytes, total

    @property
    def live_bytes(self) -> int:
        """The bytes of all live tensors."""
        return int(torch.accelerator.memory_allocated(self.where))

    @property
    def peak_bytes(self) -> int:
        """The most live bytes since :meth:`reset_peak`."""
        return int(torch.accelerator.max_memory_allocated(self.where))

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        torch.accelerator.reset_peak_memory_stats(self.where)

    def empty_cache(self) -> None:
        """Give the reserve of torch's allocator back to the system."""
        torch.accelerator.empty_cache()

    def limit_memory(self, nbytes: int) -> None:
        """Let torch's allocator run out of memory beyond a limit, where it knows limits."""
        limit = getattr(self._module, "set_per_process_memory_fraction", None)
        if limit is not None:
            share = (nbytes + ALLOCATOR_SLACK_BYTES) / self.memory_info()[1]
            limit(min(1.0, share), self.where.index or 0)

    # Streams.

    def new_stream(self) -> torch.Stream:
        """Make a stream."""
        return torch.Stream(self.where)

    def current_stream(self) -> torch.Stream:
        """Return the caller's current stream."""
        return torch.accelerator.current_stream(self.where)

    def new_event(self, *, is_timed: bool = False) -> torch.Event:
        """Make an event."""
        return torch.Event(self.where, enable_timing=is_timed)

    def synchronize(self) -> None:
        """Let the host wait until no stream has work."""
        torch.accelerator.synchronize(self.where)

    def synchronize_stream(self) -> None:
        """Let the host wait until the caller's current stream has no work."""
        self.current_stream().synchronize()

    def follow_default_stream(self) -> None:
        """Let the caller's current stream wait for the default one."""
        default_stream = getattr(self._module, "default_stream", None)
        if default_stream is not None:
            self.current_stream().wait_stream(default_stream(self.where))

    @property
    def can_delay(self) -> bool:
        """True if :meth:`delay` works."""
        return hasattr(self._module, "_sleep")

    def delay(self, stream: torch.Stream, delay_us: float) -> None:
        """Let a stream do nothing for a while; the host does not wait."""
        if delay_us:
            with stream:
                self._module._sleep(int(delay_us * CYCLES_PER_US))

    @property
    def has_graphs(self) -> bool:
        """True if it records work and replays that with one launch."""
        return hasattr(self._module, "CUDAGraph")

    def record(self, work: Callable[[], object], stream: torch.Stream) -> Callable[[], None]:
        """Record what a function enqueues; nothing of it runs.

        Args:
            work: Enqueues on its current stream alone, and allocates nothing.
            stream: The stream that records; not the default one.

        Returns:
            A function that enqueues the recorded work on the caller's current stream.

        Raises:
            RuntimeError: Some of the work cannot be recorded.
        """
        graph = self._module.CUDAGraph()
        with stream:
            # Other threads may use the device meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the recording is void
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay  # type: ignore[no-any-return]

    # Host memory.

    @property
    def pinned_bytes(self) -> int:
        """The pinned host memory of this process."""
        stats: dict[str, int] = getattr(self._module, "host_memory_stats", dict)()
        return int(stats.get("allocated_bytes.current", 0)) + Registration.total_bytes

    @property
    def reads_pinned_memory(self) -> bool:
        """True if pinned host memory has the same address on the device."""
        return self.where.type in READ_PINNED_MEMORY or getattr(
            self._module, "can_read_pinned_memory", False
        )

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """Return host memory that copies beside the host can use: a copy if this cannot be used."""
        if host.is_pinned() or host.nbytes < LEAST_BYTES or self._runtime is None:
            return host.pin_memory()
        with torch.inference_mode(False), torch.no_grad():
            return self.new_pinned(host.nbytes).view(host.dtype).copy_(host)

    def new_pinned(self, nbytes: int) -> torch.Tensor:
        """Return new host memory that copies beside the host can use, 1-d uint8."""
        if nbytes < LEAST_BYTES or self._runtime is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return new_pages(nbytes, self._runtime)

    @property
    def _runtime(self) -> Any:
        """The functions that pin memory in place; None where a device has none."""
        find = getattr(self._module, "cudart", None)
        return None if find is None else find()

    def show(self, host: torch.Tensor) -> torch.Tensor:
        """Return host memory as memory of the device, at the same address.

        Memory that is not pinned is registered in place first, and stays so while any tensor on
        that storage lives.

        Raises:
            StoreError: The device cannot address memory that is not pinned.
        """
        if not host.numel():
            return host.to(self.where)
        memory = _in_place.get((host.data_ptr(), host.numel()))
        if memory is None and not host.is_pinned():
            memory = self._registered(host)
        return self._at(host, memory or host)

    def form(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device in the place of host memory, which must not be read.

        It is 1-d uint8.
        """
        return self._at(host, host)

    def _at(self, host: torch.Tensor, memory: object) -> torch.Tensor:
        storage: Any = _construct_storage_from_data_pointer(
            host.data_ptr(), self.where, host.numel()
        )
        storage._memory = memory  # lives as long as any tensor on the storage
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=torch.uint8, device=self.where)
            return made.set_(storage, 0, (host.numel(),), (1,))

    def _registered(self, host: torch.Tensor) -> Registration:
        if self._runtime is None:
            raise StoreError(
                f"{host.numel()} bytes of host memory are not pinned, and {self.where.type} cannot "
                "pin them in place. Load the model into pinned memory."
            )
        found = _in_place[host.data_ptr(), host.numel()] = Registration(self._runtime, host)
        found.memory = host
        return found


def device_of(where: torch.device | str) -> Device:
    """Return what is known of a device."""
    where = torch.device(where)
    return Device(where) if where.type == "cpu" else Accelerator(where)


def default_device() -> torch.device:
    """Return the accelerator of this process if plans can run on it, else the CPU.

    A warning says why an accelerator is not used that torch is built for.
    """
    found = torch.accelerator.current_accelerator()  # that this torch is built for
    if found is None:
        return torch.device("cpu")
    lack = _absence(found) or _lack(found)
    if lack is None:
        return found
    logger.warning("plans run on the CPU: %s cannot be used: %s", found, lack)
    return torch.device("cpu")


def require_device(name: torch.device | str, *, option: str = "device") -> torch.device:
    """Return a device that plans can run on.

    Args:
        name: A device, or its name.
        option: Where the user wrote it, for the error.

    Raises:
        ConfigError: torch does not know the device, does not see it in this process, or cannot do
            with it what plans need.
    """
    try:
        where = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{option}: {name!r} is not a device that torch knows. Write {_usable()}."
        ) from error
    lack = None if where.type == "cpu" else _absence(where) or _lack(where)
    if lack is not None:
        raise ConfigError(f"{option}: {str(where)!r} cannot be used: {lack}. Write {_usable()}.")
    return where


def fork_rng(devices: Iterable[torch.device | str]) -> AbstractContextManager[Any]:
    """Return a context that restores the random numbers of the CPU and of these devices."""
    found = {torch.device(d) for d in devices} - {torch.device("cpu")}
    accelerators = [d for d in found if device_of(d).is_accelerator]
    kind = accelerators[0].type if accelerators else None
    return torch.random.fork_rng(accelerators, device_type=kind or "cuda")


def _usable() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else f"{accelerator.type} or cpu"


def _absence(where: torch.device) -> str | None:
    """Say why torch does not see a device; None if it does."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return f"torch sees no accelerator{_reason(where)}"
    if accelerator.type != where.type:
        return f"the accelerator of this process is {accelerator.type}, and torch has only one"
    count = torch.accelerator.device_count()
    if (where.index or 0) >= count:
        return f"torch sees {count} of {where.type}"
    return None


def _reason(where: torch.device) -> str:
    """Say what torch says when it cannot start a device, such as a driver that is too old."""
    start = getattr(getattr(torch, where.type, None), "init", None)
    try:
        if start is not None:
            start()
    except (AssertionError, RuntimeError) as error:
        return f" ({str(error).partition('. ')[0].partition(chr(10))[0].rstrip('.')})"
    return ""


@functools.cache
def _lack(where: torch.device) -> str | None:
    """Say what plans need and a device does not have; None if it has everything."""
    device = Accelerator(where)
    try:
        event = device.new_event(is_timed=True)
        event.record(device.new_stream())
        event.synchronize()
    except RuntimeError as error:
        return f"it has no streams or no events ({error})"
    before = device.live_bytes
    held = torch.empty(device.alignment, dtype=torch.uint8, device=where)
    if device.live_bytes - before < held.numel():
        return "torch does not count its live bytes"
    if not device.reads_pinned_memory:
        return "it does not address pinned host memory"
    return None
