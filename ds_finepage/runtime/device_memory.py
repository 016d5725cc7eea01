"""The device memory of an attached model: one owner, with named states."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from ds_finepage.execution.arena import Arena, HostPool
from ds_finepage.execution.bound_plan import BoundPlan
from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.executor import Executor, OpHook, Residents
from ds_finepage.execution.lanes import make_lanes
from ds_finepage.execution.replay import Graphs
from ds_finepage.execution.stores import WeightTable
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import name_of_key
from ds_finepage.planning.host_share import host_share, reloads_of
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings


class DeviceState(enum.Enum):
    """The contents of the device, and their cost.

    RELEASED: Nothing of ours. Code outside any plan runs in this state; it brings the weights of
        one op or one module at a time, and the budget is not promised meanwhile.
    PAGED: One arena; ``residents`` tells which extents of it hold valid weights.
    RESIDENT: Every weight, and no arena; PyTorch allocates the rest.
    """

    RELEASED = "released"
    PAGED = "paged"
    RESIDENT = "resident"


class DeviceMemory:
    """Owns the arena, the pinned pool, the lanes and the weights on the device.

    Invariant: a pass is bound only in state PAGED. Leaving that state unbinds every pass, because
    the views of its executor hold the arena.

    Attributes:
        residents: Which weights are valid where in the arena; an executor updates it.
        require_host: Refuses to take more host memory than its budget has.
        free_host: Returns the host memory that is free within its budget, or can be made free.
    """

    def __init__(self, weights: WeightTable, settings: RunSettings) -> None:
        self.residents = Residents()
        self.require_host: Callable[[int], None] = lambda nbytes: None
        self.free_host: Callable[[], int] = lambda: 0
        self._weights = weights
        self._device = settings.device
        self._arena: Arena | None = None
        self._bound: dict[int, Pass] = {}  # by id
        self._pool = HostPool(pinned=device_of(settings.device).is_accelerator)
        self._use(settings)

    def _use(self, settings: RunSettings) -> None:
        self._debug = settings.config.debug
        self._lanes = make_lanes(
            settings.device,
            delay_seed=self._debug.lane_delay_seed,
            max_delay_us=self._debug.max_lane_delay_us,
        )
        device = device_of(settings.device)
        self._graphs: Graphs | None = None
        records = settings.num_op_streams > 1 and not settings.shows_ops
        if records and isinstance(device, Accelerator):
            self._graphs = Graphs(device)

    @property
    def state(self) -> DeviceState:
        """The present state."""
        if self._weights.on_device:
            return DeviceState.RESIDENT
        return DeviceState.RELEASED if self._arena is None else DeviceState.PAGED

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pinned pool."""
        return self._pool.bytes.numel()

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena, or of the weights."""
        if self._weights.on_device:
            return self._weights.block_bytes
        return 0 if self._arena is None else self._arena.nbytes

    # Transitions.

    def to_released(self) -> None:
        """Free everything; weights that were resident are reloaded when they are needed."""
        self._weights.unload()
        self._free_arena()

    def to_paged(self, arena_bytes: int) -> None:
        """Hold one arena.

        An arena of another size is freed, with what is resident in it.
        """
        self._weights.unload()
        if self._arena is not None and self._arena.nbytes != arena_bytes:
            self._free_arena()
        if self._arena is None:
            self._arena = Arena(arena_bytes, self._device)

    def to_resident(self) -> int:
        """Hold every weight, and no arena; return the bytes that were copied."""
        if self._weights.on_device:
            return 0
        self._free_arena()
        self._weights.load_all()
        return sum(master.numel() for master in self._weights.masters.values())

    def _free_arena(self) -> None:
        if self._arena is None:
            return
        device_of(self._device).synchronize()  # a caller's other stream may still run a pass
        if self._graphs is not None:
            self._graphs.clear()
        self._unbind_all()
        # A view that is still alive, if only in a cycle of dead objects, must hold no bytes.
        storage = self._arena.bytes.untyped_storage()
        if storage.resizable():  # not if a hook has made a NumPy array of a tensor
            storage.resize_(0)
        self._arena = None
        self.residents.clear()
        device_of(self._device).empty_cache()

    def _unbind_all(self) -> None:
        for found in self._bound.values():
            found.unbind()
        self._bound.clear()

    # Passes.

    def bind(
        self, found: Pass, arena_bytes: int, in_place: frozenset[int], hooks: Sequence[OpHook]
    ) -> Executor:
        """Bind a planned pass to the arena.

        The arena is at least as large as that of the plan. The tasks ``in_place`` may write their
        results into their extents.

        Raises:
            StoreError: A master is missing or has another size than the captured weight.
        """
        memgraph = self._with_files(found)
        self.to_paged(arena_bytes)
        assert self._arena is not None
        if memgraph.host_bytes > self._pool.bytes.numel():
            self.require_host(memgraph.host_bytes)
            self._pool.reserve(memgraph.host_bytes)
            self._unbind_all()  # they point into the old pool
        bound = BoundPlan(
            memgraph,
            arena=self._arena,
            pool=self._pool,
            masters=self._weights.masters,
            in_place=in_place,
            poison=self._debug.poison_vacated,
            parts=self._weights.parts,
            files=self._weights.files,
        )
        executor = Executor(bound, lanes=self._lanes, hooks=hooks, graphs=self._graphs)
        found.bind(executor)
        self._bound[id(found)] = found
        return executor

    def _with_files(self, found: Pass) -> MemGraph:
        """Divide what a plan reloads between host memory and files, as far as it lies in files."""
        assert found.memgraph is not None
        files = self._weights.files
        if not files.sources and not found.memgraph.filed:
            return found.memgraph
        reloads = reloads_of(found.memgraph, files.sources)
        sizes = {key: buffer.nbytes for key, buffer in reloads.items()}
        free_bytes = self.free_host()  # with the copies that there are
        chosen = host_share(sizes, files.held, free_bytes)
        if new := chosen - files.held.keys():
            self._unbind_all()
            if sum(sizes[key] for key in new) > free_bytes - files.held_bytes:
                files.drop(files.held.keys() - chosen)  # those of other plans make way
            files.add(reloads[key] for key in new)
        found.set_files(files.sources, files.held)
        return found.memgraph

    def drop_copies(self, nbytes: int) -> None:
        """Free some bytes of copies in host memory of what lies in files; plans follow."""
        self._unbind_all()
        files = self._weights.files
        wanted = max(0, files.held_bytes - nbytes)
        while files.held_bytes > wanted:
            files.drop([next(reversed(files.held))])

    # Changes from outside.

    def reload(self, names: Sequence[str]) -> None:
        """Take over new values of weights."""
        changed = set(names)
        for key in [k for k in self.residents if name_of_key(k) in changed]:
            del self.residents[key]
        if names and self._weights.on_device and self._weights.parts is not None:
            self.to_released()  # the ranks bring them in together, before the next pass
        self._weights.reload(names)

    def use(self, settings: RunSettings) -> None:
        """Free everything and go on under other settings."""
        self.to_released()
        if settings.config.debug is not self._debug:
            self._lanes.close()
            self._use(settings)

    def close(self) -> None:
        """Free everything, and end the lanes."""
        self._free_arena()
        self._lanes.close()
        self._weights.files.reader.close()
        self._weights.unload()
