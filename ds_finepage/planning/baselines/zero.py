"""Policies ``zero*``: ZeRO-Inference, module by module, on one rank.

This simulates DeepSpeed's parameter coordinator from the second forward on, when its trace is
complete. Each module, down to each Linear, fetches its parameters when it is called and releases
them when it returns. After each fetch the coordinator prefetches the next parameters. The two
persistence thresholds decide which parameters stay from one pass to the next.

On one rank a fetch is a copy on one stream. The host waits for that stream until a module's
parameters are there, prefetched ones of the same fetch included. On entry to each module the
compute stream waits for all fetches so far. Two things are not simulated: the time of the hooks on
the host, and bytes that the caching allocator holds back until the compute stream has used them.

``zero`` has DeepSpeed's defaults. ``zero-persistence`` has the settings that suit the arena best;
:mod:`ds_finepage.planning.baselines.zero_search` finds them.

Source: ``runtime/zero/partitioned_param_coordinator.py`` and ``parameter_offload.py`` of DeepSpeed
0.19.8; ``inference/huggingface/zero_inference/run_model.py`` of DeepSpeedExamples.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from dataclasses import dataclass

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import ITEMSIZE, BufferKind, Ref, TaskGraph
from ds_finepage.planning.baselines.modules import Module, walk
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, realize

MAX_PASSES = 8
"""Forwards to simulate before the resident parameters must be those of the forward before."""

EVERY_PARAMETER = 10**12
"""A persistence threshold that is larger than any parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """The ``stage3_*`` settings that decide about fetches, with DeepSpeed's defaults.

    They count *elements*, as DeepSpeed does. ``leaf_classes`` are modules that fetch the parameters
    of all their submodules at once; a ds_config does not name them under ``zero_optimization``.
    """

    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    leaf_classes: tuple[str, ...] = (
        "MixtralSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
    )

    @property
    def keys(self) -> dict[str, int]:
        """The settings as keys of ``zero_optimization`` in a ds_config."""
        names = (f.name for f in dataclasses.fields(self) if f.name != "leaf_classes")
        return {f"stage3_{name}": getattr(self, name) for name in names}


def authors_settings(graph: TaskGraph) -> ZeroSettings:
    """Return the settings of the ZeRO-Inference authors' benchmark for a pass."""
    hidden = _hidden_size(graph)
    return ZeroSettings(
        prefetch_bucket_size=2 * hidden * hidden,
        param_persistence_threshold=hidden,
        max_live_parameters=2 * hidden * hidden,
    )


def _hidden_size(graph: TaskGraph) -> int:
    """Return the length of the first embedding's rows; 0 if the pass has no embedding."""
    for task in graph.tasks:
        if task.op == "aten.embedding.default":
            table = task.args[0]
            assert isinstance(table, Ref)
            view = graph.tensors[table.tensor]
            if graph.buffers[view.buffer].kind is BufferKind.WEIGHT:
                return view.shape[-1]
    return 0


# The coordinator.


class _Coordinator:
    """The state of DeepSpeed's coordinator over several forwards.

    Invariant: ``_group`` has the fetch that brought a parameter, until its handle is taken off the
    registry. ``_waited`` are the fetches that the host has waited for.
    """

    def __init__(self, graph: TaskGraph, settings: ZeroSettings) -> None:
        self._settings = settings
        self._numel = element_counts(graph)
        self._modules, self._events = walk(graph, settings.leaf_classes)
        self._trace = [(p, step) for step, m in enumerate(self._modules) for p in m.own]
        self._persistent = self._mark_persistent()
        self._release_cache: dict[tuple[str, int], frozenset[int]] = {}
        self._resident: dict[int, None] = {}  # gathered or being copied, in order of fetching
        self._group: dict[int, int] = {}
        self._num_groups = 0
        self._begin_forward()

    def _mark_persistent(self) -> frozenset[int]:
        found: list[int] = []
        total = 0
        for parameter, numel in self._numel.items():
            if numel + total > self._settings.model_persistence_threshold:
                continue
            if numel <= self._settings.param_persistence_threshold:
                found.append(parameter)
                total += numel
        return frozenset(found)

    def _begin_forward(self) -> None:
        self._queue = deque(self._trace)
        self._latest: dict[int, int] = {}  # last step that a parameter was queued for, -1: none
        self._active: dict[int, set[str]] = {p: set() for p in self._numel}
        self._waited: set[int] = set()
        self._step = self._available = 0
        self.steps: list[Step] = []

    @property
    def resident(self) -> tuple[int, ...]:
        return tuple(sorted(self._resident))

    def forward(self) -> None:
        """Run one forward pass."""
        self._begin_forward()
        for what, index in self._events:
            if what == "enter":
                self._fetch(self._modules[index])
            elif what == "leave":
                self._release(self._modules[index])
            else:
                self.steps.append(Step(Act.COMPUTE, index))
        for parameter in list(self._group):  # prefetched, but not used
            del self._group[parameter]
            self._free(parameter)

    def _gather(self, parameters: list[int]) -> None:
        missing = [p for p in parameters if p not in self._resident]
        self._num_groups += 1
        for parameter in missing:
            self._resident[parameter] = None
            self._group[parameter] = self._num_groups
            self._available += self._numel[parameter]
            self.steps.append(Step(Act.RELOAD, parameter))

    def _fetch(self, module: Module) -> None:
        self._gather(list(module.own))
        for parameter in module.own:
            self._active[parameter].add(module.name)
            if parameter in self._group:
                self._waited.add(self._group.pop(parameter))
        self.steps.append(Step(Act.AWAIT_COPIES))
        missing = {p for p in module.own if self._latest.get(p, -1) < self._step}
        taken: set[int] = set()
        while self._queue and len(taken) < len(missing):
            parameter, step = self._queue.popleft()
            self._latest[parameter] = step
            taken.add(parameter)
        self._prefetch()
        self._step += 1

    def _prefetch(self) -> None:
        room = self._settings.max_live_parameters - self._available
        limit = min(room, self._settings.prefetch_bucket_size)
        chosen: dict[int, None] = {}
        num_elements = 0
        while self._queue and num_elements < limit:
            parameter, step = self._queue.popleft()
            self._latest[parameter] = max(self._latest.get(parameter, -1), step)
            if parameter not in self._resident and parameter not in chosen:
                chosen[parameter] = None
                num_elements += self._numel[parameter]
        if chosen:
            self._gather(list(chosen))

    def _release(self, module: Module) -> None:
        to_release = self._to_release(module)
        for parameter in module.own:
            self._active[parameter].discard(module.name)
            if parameter in to_release:
                self._free(parameter)

    def _free(self, parameter: int) -> None:
        group = self._group.get(parameter)
        is_on_its_way = group is not None and group not in self._waited
        if parameter not in self._resident or is_on_its_way or self._active[parameter]:
            return
        del self._resident[parameter]
        self._available -= self._numel[parameter]
        self.steps.append(Step(Act.DROP, parameter))

    def _to_release(self, module: Module) -> frozenset[int]:
        """Choose the parameters to free when a module returns; like DeepSpeed, only once."""
        key = (module.name, self._step)
        if key not in self._release_cache:
            found = [
                p
                for p in module.own
                if p not in self._persistent and self._latest.get(p, -1) <= self._step
            ]
            used_soon: set[int] = set()
            num_elements = 0
            for later in self._modules[self._step :]:
                if num_elements >= self._settings.max_reuse_distance:
                    break
                for parameter in later.nested if module.is_leaf else later.own:
                    used_soon.add(parameter)
                    num_elements += self._numel[parameter]
            self._release_cache[key] = frozenset(found) - used_soon
        return self._release_cache[key]


def element_counts(graph: TaskGraph) -> dict[int, int]:
    """Count the elements of every weight; a byte is one if the taskgraph has no dtype."""
    itemsize: dict[int, int] = {}
    for view in graph.tensors:
        itemsize.setdefault(view.buffer, ITEMSIZE.get(view.dtype, 1))
    return {
        b.id: b.nbytes // itemsize.get(b.id, 1)
        for b in graph.buffers
        if b.kind is BufferKind.WEIGHT
    }


def script_of(graph: TaskGraph, settings: ZeroSettings, policy: str = "zero") -> Script:
    """Return the steps of a steady forward.

    Args:
        graph: The pass.
        settings: The settings of DeepSpeed.
        policy: Name to write into the memgraph.

    Raises:
        PlanInfeasibleError: The resident parameters change with every forward.
    """
    coordinator = _Coordinator(graph, settings)
    for _ in range(MAX_PASSES):
        before = coordinator.resident
        coordinator.forward()
        if coordinator.resident == before:
            return Script(policy, before, tuple(coordinator.steps))
    raise PlanInfeasibleError(
        f"ZeRO-Inference still changes its resident parameters after {MAX_PASSES} forwards, so "
        f"it has no steady pass. Use a policy that plans one: finepage."
    )


def plan_zero_with(problem: Problem, settings: ZeroSettings, policy: str = "zero") -> MemGraph:
    """Plan a forward of ZeRO-Inference.

    Args:
        problem: The pass and its arena.
        settings: The settings of DeepSpeed.
        policy: Name to write into the memgraph.

    Raises:
        PlanInfeasibleError: It holds more bytes at one time than the arena has.
    """
    return realize(problem, script_of(problem.graph, settings, policy))
