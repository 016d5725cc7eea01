"""Every kind of wait between streams and the host: a scenario that needs it, and how to omit it.

A scenario returns True if its results are right. The seed draws its inputs and the delays, which
lie on the test device. docs/negative_proofs.md lists all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ds_finepage.execution.arena import Arena
from ds_finepage.execution.device import Accelerator
from ds_finepage.execution.lanes import StreamLanes
from ds_finepage.execution.reload_sources import ReloadSources
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import BufferKind
from ds_finepage.integrations.transformers.host_cache import HostLayer
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.accelerator.omitting import lanes_without, lanes_without_waits
from tests.unit.execution.graphs import INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.execution.lane_programs import program_of
from tests.unit.execution.rig import N, Rig, copied_to_host, deep, deep_in_eager, thrice_tanh

PASSES = 3
MS = 10**6  # nanoseconds
ALONE = 30 * MS
"""A delay of a single operation; other programs on the machine may hold up the one after it."""

SECONDS_TO_END = 0.2
"""The time of a stream for tasks of microseconds, on a machine with other programs."""

WORDS = 1 << 10
Scenario = Callable[[torch.device, StreamLanes, int], bool]


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One kind of wait.

    Attributes:
        first: What must be done first.
        then: What waits for it.
        by: Where the product waits.
        scenario: Returns True if the results are right.
        lanes: Makes lanes that omit it; the product's own where another place waits.
        omit: A context in which another place does not wait.
    """

    first: str
    then: str
    by: str
    scenario: Scenario
    lanes: Callable[[Accelerator], StreamLanes] = StreamLanes
    omit: Callable[[], Context[Any]] = nullcontext

    @classmethod
    def of_program(cls, first: str, then: str, scenario: Scenario, of: Lane, on: Lane) -> Edge:
        """Return the waits of a program of one lane for another."""
        return cls(
            first=first,
            then=then,
            by=f"waits of the program, {of.value} for {on.value}",
            scenario=scenario,
            lanes=lanes_without_waits(of, on),
        )

    @property
    def name(self) -> str:
        """What must be done before what."""
        return f"{self.first}, before {self.then}"


def is_right(edge: Edge, device: torch.device, seed: int, *, omit: bool) -> bool:
    """Run the scenario of an edge; an error of the device is a wrong result.

    Args:
        edge: The edge.
        device: The test device.
        seed: Of inputs and delays.
        omit: Run without the edge.
    """
    card = torch.get_device_module(device)
    card.reset_switches()
    torch.manual_seed(seed)
    with edge.omit() if omit else nullcontext():
        lanes = (edge.lanes if omit else StreamLanes)(Accelerator(device))
        try:
            found = edge.scenario(device, lanes, seed)
            torch.accelerator.synchronize()
            return found
        except RuntimeError:
            if not omit:
                raise
            return False
        finally:
            card.reset_switches()


# --- scenarios -------------------------------------------------------------------------------


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


def delay(device: torch.device, seed: int, *kinds: str, ns: int = MS) -> None:
    """Delay every operation of some kinds by ``ns`` to twice as much."""
    torch.accelerator.synchronize()
    for kind in kinds:
        torch.get_device_module(device).set_delay(kind, ns, ns, seed)


def passes(delayed: str, policy: str = "finepage", *, num_streams: int = 0) -> Scenario:
    """Return a scenario of passes back to back in the least arena.

    Args:
        delayed: The kind of operation that is delayed.
        policy: Of the plan.
        num_streams: Of the caller, by turns; 0 means the current one alone.
    """

    def run(device: torch.device, lanes: StreamLanes, seed: int) -> bool:
        graph, weights = deep()
        least = min_arena_bytes(graph, 64)
        rig = Rig(graph, weights, policy=policy, arena_bytes=least, device=device, lanes=lanes)
        inputs = [torch.randn(N, N) for _ in range(PASSES)]
        on_device = [x.to(device) for x in inputs]
        streams: list[Any] = [torch.Stream(device) for _ in range(num_streams)]
        delay(device, seed, delayed)
        found = []
        for number, x in enumerate(on_device):
            with streams[number % num_streams] if streams else nullcontext():
                found.append(rig(x)[0])
        torch.accelerator.synchronize()
        expected = [deep_in_eager(x, weights) for x in inputs]
        return all(torch.equal(f.cpu(), e) for f, e in zip(found, expected, strict=True))

    return run


def rows_of_passes(delayed: str) -> Scenario:
    """Return a scenario of passes that copy rows to host memory, in the least arena."""

    def run(device: torch.device, lanes: StreamLanes, seed: int) -> bool:
        graph = copied_to_host()
        rig = Rig(graph, arena_bytes=min_arena_bytes(graph, 64), device=device, lanes=lanes)
        inputs = [torch.randn(N, N) for _ in range(PASSES)]
        on_device = [x.to(device) for x in inputs]
        delay(device, seed, delayed)
        found = [rig(x) for x in on_device]
        torch.accelerator.synchronize()
        return all(
            torch.equal(rows, -x) and torch.equal(out.cpu(), thrice_tanh(-x))
            for (rows, out), x in zip(found, inputs, strict=True)
        )

    return run


def memory_of_the_caller_becomes_the_arena(
    device: torch.device, lanes: StreamLanes, seed: int
) -> bool:
    """Free a tensor whose kernel still waits; an arena gets its memory, and a reload writes it."""
    values = torch.randn(WORDS)
    host = pinned(torch.randint(256, (values.nbytes,), dtype=torch.uint8))
    torch.accelerator.empty_cache()  # the next block of this size is then the one freed here
    theirs = values.to(device)
    address = theirs.data_ptr()
    with torch.get_device_module(device).held():
        result = theirs * 2
        del theirs
        arena = Arena(values.nbytes, device)
        assert arena.bytes.data_ptr() == address, "the allocator gave other memory"
        lanes.run(program_of("h2d r"), {0: lambda: arena.bytes.copy_(host, non_blocking=True)})
        give_time_to(lanes._streams[Lane.H2D])
    torch.accelerator.synchronize()
    return torch.equal(result.cpu(), values * 2) and torch.equal(arena.bytes.cpu(), host)


def give_time_to(stream: torch.Stream) -> None:
    """Let a stream end its tasks, unless they wait for another one: that takes the whole time."""
    end = time.monotonic() + SECONDS_TO_END
    while not stream.query() and time.monotonic() < end:
        time.sleep(0.001)


def offload_of_what_the_caller_made(device: torch.device, lanes: StreamLanes, seed: int) -> bool:
    """Begin a pass with an offload of bytes that a kernel before the pass writes."""
    values = torch.randn(WORDS)
    theirs, host = values.to(device), pinned(torch.zeros(WORDS))
    with torch.get_device_module(device).held():
        theirs.mul_(2)
        lanes.run(program_of("d2h o"), {0: lambda: host.copy_(theirs, non_blocking=True)})
        give_time_to(lanes._streams[Lane.D2H])
    torch.accelerator.synchronize()
    return torch.equal(host, values * 2)


def reload_at_the_end(device: torch.device, lanes: StreamLanes, seed: int) -> bool:
    """End a pass with a reload; the caller reads the bytes right after it."""
    values = torch.randn(WORDS)
    host, ours = pinned(values), torch.zeros(WORDS, device=device)
    with torch.get_device_module(device).held(lanes._streams[Lane.H2D]):
        lanes.run(program_of("h2d r"), {0: lambda: ours.copy_(host, non_blocking=True)})
        found = ours * 2
        give_time_to(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    return torch.equal(found.cpu(), values * 2)


def memory_of_a_pass_goes_to_the_caller(
    device: torch.device, lanes: StreamLanes, seed: int
) -> bool:
    """End a pass with an offload; its memory is freed, and the caller writes into it."""
    values = torch.randn(WORDS)
    torch.accelerator.empty_cache()  # the next block of this size is then the one freed here
    ours, host = values.to(device), pinned(torch.zeros(WORDS))
    address = ours.data_ptr()
    actions = {0: lambda of=ours: host.copy_(of, non_blocking=True)}
    with torch.get_device_module(device).held(lanes._streams[Lane.D2H]):
        lanes.run(program_of("d2h o"), actions)
        actions.clear()
        del ours
        theirs = torch.zeros(WORDS, device=device)
        assert theirs.data_ptr() == address, "the allocator gave other memory"
        give_time_to(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    return torch.equal(host, values)


def rows_of_a_cache(device: torch.device, lanes: StreamLanes, seed: int) -> bool:
    """Let a pass return new rows of a KV cache in host memory; the host appends them."""
    draft = Draft()
    x = draft.tensor(INPUT, 1, 1, 2, N)
    rows = draft.tensor(BufferKind.HOST, 1, 1, 2, N)
    draft.task("finepage.to_host.default", x, out=(rows,))
    rig = Rig(draft.graph((x,), (rows,)), device=device, lanes=lanes)
    layer = HostLayer()
    values = [torch.randn(1, 1, 2, N) for _ in range(PASSES)]
    on_device = [v.to(device) for v in values]
    layer.lazy_initialization(on_device[0], on_device[0])
    delay(device, seed, "d2h", ns=ALONE)
    for value in on_device:
        (layer.new_keys,) = (layer.new_values,) = rig(value)
        layer.settle()
    assert layer.keys is not None
    return torch.equal(layer.keys, torch.cat(values).permute(1, 2, 0, 3))


def rows_of_an_embedding(device: torch.device, lanes: StreamLanes, seed: int) -> bool:
    """Look up rows of an embedding that stays in host memory, pass after pass."""
    table = torch.randn(64, N)
    draft = Draft()
    ids = draft.tensor(INPUT, 4, dtype="int64")
    weight, out = draft.tensor(WEIGHT, 64, N, name="table"), draft.tensor(OUTPUT, 4, N)
    draft.task("aten.embedding.default", weight, ids, out=(out,))
    graph = gather_rows(draft.graph((ids,), (out,)))
    rig = Rig(graph, {"table": table}, device=device, lanes=lanes)
    wanted = [torch.randint(64, (4,)) for _ in range(PASSES)]
    on_device = [w.to(device) for w in wanted]
    delay(device, seed, "h2d", ns=ALONE)  # the host is in a hurry with the next rows
    found = [rig(w)[0] for w in on_device]
    torch.accelerator.synchronize()
    return all(torch.equal(f.cpu(), table[w]) for f, w in zip(found, wanted, strict=True))


@contextmanager
def indices_without_a_wait() -> Iterator[None]:
    """Give the host the indices of a lookup although the device is still at work."""
    gather = ReloadSources.gather_rows

    def hasty(sources: ReloadSources, args: Any) -> None:
        aside = torch.Stream(args[0].device)  # has nothing to do, so nothing to wait for
        with aside:
            args = [value.to("cpu") for value in args]
        gather(sources, args)

    with mock.patch.object(ReloadSources, "gather_rows", hasty):
        yield


# --- all of them -----------------------------------------------------------------------------

COMPUTE, H2D, D2H = Lane.COMPUTE, Lane.H2D, Lane.D2H

EDGES = (
    Edge.of_program("a reload", "a task reads it", passes("h2d"), COMPUTE, H2D),
    Edge.of_program(
        "a task", "a reload takes the bytes that it reads", passes("kernel"), H2D, COMPUTE
    ),
    Edge.of_program("a task", "its result is offloaded", passes("kernel"), D2H, COMPUTE),
    Edge.of_program("an offload", "a task takes its bytes", passes("d2h"), COMPUTE, D2H),
    Edge.of_program("an offload", "a reload takes its bytes", passes("d2h", "lru"), H2D, D2H),
    Edge.of_program(
        "a task", "its rows are copied to host memory", rows_of_passes("kernel"), D2H, COMPUTE
    ),
    Edge.of_program(
        "a copy of rows to host memory",
        "a task takes their bytes",
        rows_of_passes("d2h"),
        COMPUTE,
        D2H,
    ),
    Edge(
        first="a pass",
        then="the next one reloads",
        by="the wait of the h2d lane for the begin of a pass",
        scenario=passes("kernel"),
        lanes=lanes_without("stream.wait_event(self._begin)", of="self._streams[Lane.H2D]"),
    ),
    Edge(
        first="a kernel of the caller",
        then="a reload takes the memory that the caller has freed",
        by="the wait of the h2d lane for the begin of a pass",
        scenario=memory_of_the_caller_becomes_the_arena,
        lanes=lanes_without("stream.wait_event(self._begin)", of="self._streams[Lane.H2D]"),
    ),
    Edge(
        first="a kernel of the caller",
        then="its result is offloaded",
        by="the wait of the d2h lane for the begin of a pass",
        scenario=offload_of_what_the_caller_made,
        lanes=lanes_without("stream.wait_event(self._begin)", of="self._streams[Lane.D2H]"),
    ),
    Edge(
        first="a pass",
        then="the next one computes on another stream",
        by="the wait of the compute lane for the last pass",
        scenario=passes("kernel", num_streams=2),
        lanes=lanes_without("stream.wait_event(self._end)"),
    ),
    Edge(
        first="the reloads of a pass",
        then="the caller goes on",
        by="the wait for the h2d lane at the end of a pass",
        scenario=reload_at_the_end,
        lanes=lanes_without("compute.wait_stream(stream)", of="self._streams[Lane.H2D]"),
    ),
    Edge(
        first="the offloads of a pass",
        then="the caller gets memory that was freed",
        by="the wait for the d2h lane at the end of a pass",
        scenario=memory_of_a_pass_goes_to_the_caller,
        lanes=lanes_without("compute.wait_stream(stream)", of="self._streams[Lane.D2H]"),
    ),
    Edge(
        first="new rows of a KV cache",
        then="the host appends them",
        by="the host's wait between two calls",
        scenario=rows_of_a_cache,
        omit=lambda: mock.patch.object(Accelerator, "synchronize_stream"),
    ),
    Edge(
        first="the reload of an embedding's rows",
        then="the host gathers the rows of the next call",
        by="the host's wait for the indices",
        scenario=rows_of_an_embedding,
        omit=indices_without_a_wait,
    ),
)
