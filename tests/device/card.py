"""The module `torch.slowcard`: names that libraries expect of `torch.cuda`, and switches."""

from __future__ import annotations

import atexit
import contextlib
import traceback
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch

MAX_DEVICES = 4
_extension: Any = None
can_read_pinned_memory = True  # kernels may use pinned memory through a tensor of this device

Device = torch.device | str | int | None


def connect(extension: Any) -> None:
    """Use this compiled extension."""
    global _extension
    _extension = extension
    atexit.register(extension.settle)


# ---------------------------------------------------------------- the device


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return bool(_extension.is_in_bad_fork())


def _index(device: Device = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def init() -> None: ...


def device_count() -> int:
    return _num_devices


_num_devices = 1


def set_num_devices(count: int) -> None:
    """Have this many devices from now on (0 to 4)."""
    global _num_devices
    _extension.set_num_devices(count)
    _num_devices = count


def current_device() -> int:
    return int(_extension.current_device())


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: Device) -> Any:
    return torch.accelerator.device_index(_index(device))


def get_device_name(device: Device = None) -> str:
    return f"slowcard {_index(device)}"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return (1, 0)


def get_device_properties(device: Device = None) -> Any:
    kind = namedtuple("Properties", "name total_memory major minor multi_processor_count")
    return kind(get_device_name(device), mem_get_info(device)[1], 1, 0, 1)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


# ---------------------------------------------------------------- streams

Event = torch.Event
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device("slowcard", _index(device)), priority=priority)


def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def stream(stream: torch.Stream) -> torch.Stream:
    return stream


def _sleep(ns: int) -> None:
    """Enqueue a sleep on the current stream; ``torch.cuda._sleep`` takes cycles, this takes ns."""
    _extension.sleep(ns)


class CUDAGraph:
    """Work of one stream that is recorded once and replayed as one launch.

    Stricter than on CUDA: nothing may be allocated while a graph is recorded.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._graph = _extension.Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record what this thread enqueues on the current stream, which is not the default one."""
        self._graph.begin()

    def capture_end(self) -> None:
        """End the recording."""
        self._graph.end()

    def replay(self) -> None:
        """Enqueue the work on the current stream, as one task of kind "replay"."""
        self._graph.replay()

    def reset(self) -> None:
        """Forget the work."""
        self._graph = _extension.Graph()

    @property
    def num_works(self) -> int:
        """The copies and kernels that were recorded."""
        return int(self._graph.num_works())


# ---------------------------------------------------------------- memory

memory_stats = torch.accelerator.memory_stats
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total bytes."""
    return tuple(_extension.memory_info(_index(device)))


class _Runtime:
    """What `torch.cuda.cudart()` has for host memory that is pinned in place."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        """Pin host memory in place; return 0."""
        _extension.host_register(address, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Take that back; return 0, or 1 if it was not pinned in place."""
        return 0 if _extension.host_unregister(address) else 1


def cudart() -> _Runtime:
    """Return the functions that pin host memory in place."""
    return _Runtime()


# ---------------------------------------------------------------- random numbers


def default_generator(device: Device = None) -> torch.Generator:
    return _extension.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(MAX_DEVICES):
        default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return default_generator().initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    return default_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    default_generator(device).set_state(state)


# ---------------------------------------------------------------- switches for tests


def set_capacity(num_bytes: int, device: Device = None) -> None:
    """Let the device have this many bytes; an allocation beyond raises torch.OutOfMemoryError."""
    _extension.set_capacity(_index(device), num_bytes)


def set_delay(kind: str, ns: int = 0, random_ns: int = 0, seed: int = 0) -> None:
    """Delay every operation of a kind on its stream.

    Args:
        kind: "h2d", "d2h", "d2d", "kernel" or "replay", which is a whole graph.
        ns: nanoseconds before each.
        random_ns: up to so many more, from `seed` and the operation's place in the order.
        seed: of the random part.
    """
    _extension.set_delay(kind, ns, random_ns, seed)


def set_stream_delay(stream: torch.Stream, ns: int) -> None:
    """Delay every task of one stream by so many nanoseconds."""
    _extension.set_stream_delay(stream.device_index, stream.stream_id, ns)


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Hold a stream (None: the current one) until the block ends; the host must not wait for it."""
    stream = stream or current_stream()
    gate = _extension.hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        gate.open()


def fail_nth(kind: str, nth: int, later: bool = False) -> None:
    """Let the n-th operation of a kind from now on fail; 0 takes that back.

    Args:
        kind: "h2d", "d2h", "d2d", "kernel", "alloc" or "replay".
        nth: 1 is the next.
        later: the call works, and the error shows at the next synchronisation.
    """
    _extension.set_failure(kind, nth, later)


def counters() -> dict[str, Any]:
    """Return what happened since the last reset.

    Returns:
        For each kind: the count, and with the endings "_bytes" and "_delayed_ns" the bytes and the
        delays that were asked for. "enqueue_ns": the host's CPU time inside calls that enqueue,
        counted inside `enqueuing_timed`.
        "syncs" and "syncs_by_reason": waits of the host.
    """
    return dict(_extension.counters())


def reset_counters() -> None:
    """Count from 0."""
    _extension.reset_counters()


@contextlib.contextmanager
def enqueuing_timed() -> Iterator[None]:
    """Count "enqueue_ns" inside the block. To ask for the time makes each call slower."""
    _extension.time_enqueuing(True)
    try:
        yield
    finally:
        _extension.time_enqueuing(False)


def set_sync_debug_mode(mode: str, seen: Callable[[str], None] | None = None) -> None:
    """Say what happens when the host waits for the device.

    Args:
        mode: "default" counts; "error" raises RuntimeError, no wait; "warn" calls `seen`.
        seen: gets the reason, for mode "warn".
    """
    _extension.set_sync_mode(
        {"default": 0, "warn": 1, "error": 2}[mode], seen if mode == "warn" else None
    )


@contextlib.contextmanager
def races_found() -> Iterator[list[str]]:
    """Collect races inside the block; the list is filled when the block ends.

    Two operations race if they touch the same bytes of the device or of pinned memory, one of them
    writes, and no event, stream or wait of the host puts one before the other. The check looks at
    the order that was asked for and not at times, so it finds a missing wait in every run. It does
    not see what the host itself does with pinned memory.
    """
    found: list[str] = []
    _extension.check_races(True)
    try:
        yield found
    finally:
        found.extend(_extension.races())
        _extension.check_races(False)


@contextlib.contextmanager
def syncs_recorded() -> Iterator[list[tuple[str, str]]]:
    """Collect (reason, Python stack) of every wait of the host inside the block."""
    found: list[tuple[str, str]] = []
    set_sync_debug_mode(
        "warn", lambda reason: found.append((reason, "".join(traceback.format_stack()[:-1])))
    )
    try:
        yield found
    finally:
        set_sync_debug_mode("default")


def reset_switches() -> None:
    """No delays, no failures, no errors that wait to be shown, 4 GiB of memory, counters at 0."""
    for kind in ("h2d", "d2h", "d2d", "kernel", "alloc", "replay"):
        set_delay(kind)
        fail_nth(kind, 0)
    for index in range(MAX_DEVICES):
        for stream_id in range(33):
            _extension.set_stream_delay(index, stream_id, 0)
        set_capacity(4 << 30, index)
    set_sync_debug_mode("default")
    _extension.check_races(False)
    _extension.settle()
    reset_counters()
