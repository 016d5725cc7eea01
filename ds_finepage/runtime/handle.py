"""A model with ds_finepage attached: from Dynamo's graphs to plans that run.

The handle owns what lives as long as the model is attached: host masters, arena, lanes, plans and
counters. It decides nothing about memory itself; that is the planner's, whose result it has checked
before it runs it.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.config import DebugConfig
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.arena import Arena, HostPool
from ds_finepage.execution.executor import Executor, OpHook, PassCounters, Residents
from ds_finepage.execution.fallback import Runner, run_unplanned
from ds_finepage.execution.lanes import Lanes, make_lanes
from ds_finepage.execution.masters import weights_of
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.stores import TakeWeights, WeightChanges, WeightTable
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import name_of_key
from ds_finepage.graph.timeline import Timeline
from ds_finepage.integrations.transformers.preflight import LookAhead
from ds_finepage.planning.liveness import require_feasible
from ds_finepage.planning.policies import CAN_SPLIT, CYCLIC, PAGING
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.simulator import simulate
from ds_finepage.runtime.attachment import Attachment
from ds_finepage.runtime.kv_offload import CachedCalls
from ds_finepage.runtime.live_tensors import Held
from ds_finepage.runtime.pass_table import Captures, Pass
from ds_finepage.runtime.plan_cache import plan_pass
from ds_finepage.runtime.rehearsal import RehearsalError, refuse_generation, run_call
from ds_finepage.runtime.stats import PassStats, Stats

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""What torch's own allocators give, so that kernels choose the same code paths."""


class Handle:
    """ds_finepage at work on one module. Make it with :func:`ds_finepage.attach`."""

    def __init__(
        self,
        module: torch.nn.Module,
        weights: WeightTable,
        *,
        device: torch.device,
        budget_bytes: int,
        policy: str,
        split: bool,
        debug: DebugConfig,
        profile: HardwareProfile,
        plan_dir: Path | None = None,
        take: TakeWeights = weights_of,
    ) -> None:
        """Take a module over; see :func:`ds_finepage.attach` for what the arguments mean."""
        self.stats = Stats(budget_bytes, weights.nbytes)
        self.profile = profile
        self._module = module
        self._weights = weights
        self._device = device
        self._policy = policy
        self._may_split = split
        self._debug = debug
        self._plan_dir = plan_dir
        self._alignment = ALIGNMENT.get(device.type, 512)
        self._lock = threading.RLock()
        self._lanes = self._make_lanes()
        self._pool = HostPool(pinned=device.type == "cuda")
        self._arena: Arena | None = None
        self._arena_limit = budget_bytes  # only ever shrinks
        self._last: Pass | None = None
        self._entered: Pass | None = None
        self._held = Held()
        self._residents: Residents = {}
        self._cached_calls = CachedCalls(
            self.stats,
            pinned=device.type == "cuda",
            may_move=lambda: self._policy in PAGING,
        )
        self._captures = Captures(
            self.stats,
            OpMeter(device),
            alignment=self._alignment,
            all_weights_bytes=weights.block_bytes,
            may_cut=lambda: self._split,
            make_room=self._make_room,
        )
        self._acting = self  # while a call is rehearsed, the handle of the rehearsal
        self._num_graphs = self._num_graph_runs = 0
        self._graphs: dict[Any, tuple[int, DynamoGraph]] = {}
        self._unplanned_modules: list[torch.nn.Module] = []
        self._hooks: list[OpHook] = []
        self._attached = True
        self._runner = Runner()
        self._take = take
        # What has to hold while the model runs; an integration may set it.
        self.around_call: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._weights.install()
        self._attachment = Attachment(
            module,
            weights,
            run=self._call,
            run_graph=self._run_graph,
            runner=self._runner,
            on_unplanned=self._on_unplanned_module,
            num_runs=lambda: self._num_graph_runs,
            look_ahead=LookAhead(
                module,
                alignment=self._alignment,
                budget_bytes=lambda: self.stats.budget_bytes,
                may_cut=lambda: self._split,
            ),
            during_generation=self._cached_calls.generation,
            refuse=functools.partial(refuse_generation, self),
        )

    # What users call.

    def register_op_hook(
        self,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> Callable[[], None]:
        """Call ``before(task, operands)`` and ``after(task, results)`` around every task.

        Tensors are valid during the call only. Returns a function that removes both.
        """
        hook = OpHook(before, after)
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    def replan(
        self,
        *,
        budget_bytes: int | None = None,
        policy: str | None = None,
        debug: DebugConfig | None = None,
    ) -> None:
        """Go on under other settings; captured passes are planned anew when they run next.

        Args:
            budget_bytes: The new limit on all device bytes.
            policy: The new policy, by name.
            debug: The new checks.
        """
        with self._lock:
            self._runner.refuse("replan")
            self._make_room()
            if budget_bytes is not None:
                self.stats.budget_bytes = budget_bytes
            self._policy = policy or self._policy
            if debug is not None:
                self._debug = debug
                self._lanes.close()
                self._lanes = self._make_lanes()
            self._arena_limit = self.stats.budget_bytes
            for found in self._captures.planned():
                found.memgraph = found.neighbour = None

    def detach(self) -> None:
        """Give the model back as it was; a second call does nothing."""
        with self._lock:
            # While the interpreter ends, torch aborts where a tensor outlives what it is a view of.
            if not self._attached or sys.is_finalizing():
                return
            self._runner.refuse("detach")
            self._attached = False
            self._release_arena()
            self._lanes.close()
            self._weights.unload()
            self._attachment.remove()
            self._weights.restore()
            self._graphs.clear()
            self._cached_calls.bring_back()

    def refresh(self) -> None:
        """Take every weight for changed.

        Call it after a write that leaves no sign: through NumPy, DLPack or a raw pointer.
        """
        with self._lock:
            self._runner.refuse("refresh")
            self._heed(self._weights.refresh())

    @property
    def attached(self) -> bool:
        """True until :meth:`detach`."""
        return self._attached

    def plans(self) -> list[tuple[MemGraph, Timeline]]:
        """Return the plan of every captured pass with its predicted timeline."""
        return [
            (p.memgraph, simulate(p.memgraph, self.profile))
            for p in self._captures.planned()
            if p.memgraph is not None
        ]

    @property
    def _split(self) -> bool:
        return self._may_split and self._policy in CAN_SPLIT

    # Attaching.

    def _make_lanes(self) -> Lanes:
        return make_lanes(
            self._device,
            delay_seed=self._debug.lane_delay_seed,
            max_delay_us=self._debug.max_lane_delay_us,
        )

    # Calls.

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the module or of a part of it."""
        with self._lock:
            self._notice_changes()
            compiled = self._attachment.compiled(module)
            num_graphs = self._num_graphs
            self._runner.begin()
            try:
                with self.around_call():
                    return self._acting._perform(compiled, module, args, kwargs)
            finally:
                self._runner.end()
                if self._num_graphs != num_graphs:
                    gc.collect()  # Dynamo leaves cycles behind that hold the call's tensors

    def _notice_changes(self) -> None:
        """Take over what others changed in the model since the last call."""
        self._heed(self._weights.changes())
        if self._attachment.tree.has_new_parts():
            self._weights.exchange(dict(self._module.named_parameters()), self._take)
            self._forget_captures()
            self._attachment.remove()
            self._attachment.install()

    def _heed(self, changes: WeightChanges) -> None:
        """Forget what was true of weights that changed."""
        if changes.reshaped:
            self._forget_captures()
        elif changes.moved:
            self._make_room()  # executors copy from the old masters
        changed = set(changes.rewritten)
        for key in [k for k in self._residents if name_of_key(k) in changed]:
            del self._residents[key]
        self._weights.reload(changes.rewritten)

    def _forget_captures(self) -> None:
        self._make_room()
        self._captures.forget()
        self._graphs.clear()
        self._last = self._entered = None
        self._arena_limit = self.stats.budget_bytes
        self.stats.weight_bytes = self._weights.nbytes
        self._captures.all_weights_bytes = self._weights.block_bytes

    def _run_graph(self, module: GraphModule, positions: Sequence[int], args: Sequence[Any]) -> Any:
        """Run one of Dynamo's graphs.

        Weights are arguments of the graph, and where a graph is the forward of one module, Dynamo
        runs it for other modules of the same make too. Each choice of weights is a graph of ours.
        """
        self._num_graph_runs += 1
        chosen = (id(module), *(id(args[i]) for i in positions))
        if chosen not in self._graphs:
            index, self._num_graphs = self._num_graphs, self._num_graphs + 1
            graph = DynamoGraph(module, args, self._weights.names, f"graph {index}")
            self._graphs[chosen] = index, graph
        return self._acting._run(*self._graphs[chosen], args)

    # Running.

    def _perform(self, *call: Any) -> Any:
        return run_call(self, *call)

    def _run(self, index: int, graph: DynamoGraph, args: Sequence[Any]) -> Any:
        found = self._captures.find(index, graph, args)
        self._count_held(found, args)
        if found is not None and self._may_step_aside(found):
            return self._run_aside(graph, args, found)
        self._weights.unload()
        executor = None
        if found is not None:
            self._visit(found)
            executor = self._executor_of_sizes(found, args)
            if executor is None:
                found = self._captures.find_exact(index, graph, args)
                self._count_held(found, args)
                executor = None if found is None else self._executor(found)
        if found is None or executor is None:
            self.stats.num_unplanned_graphs += 1
            self._release_arena()
            return run_unplanned(graph.module, args, self._weights)
        executor.set_sizes(args)
        result = executor.run(args, graph.host_outputs(args), self._residents)
        self._held.note((*found.given(args), *found.made(result)))
        self._count(found.stats, executor.counters)
        return result

    def _count_held(self, found: Pass | None, args: Sequence[Any]) -> None:
        """Let a pass leave room for what others were given or have made, and is still alive."""
        before, self._entered = self._entered, found
        budget_bytes = self.stats.budget_bytes
        # Of one pass that runs again, what it returned before is mostly let go meanwhile.
        if found is None or (before is found and found.has_room(found.held_bytes, budget_bytes)):
            return
        given = found.given(args)
        held_bytes = self._held.bytes_beside(given)
        if not found.has_room(held_bytes, budget_bytes):
            gc.collect()  # tensors in dead cycles are still there
            held_bytes = self._held.bytes_beside(given)
        found.leave_room(held_bytes, budget_bytes)

    def _may_step_aside(self, found: Pass) -> bool:
        """Tell whether the whole model may be on the device, and nobody wants to see the ops."""
        # Were it so for some passes only, the weights would come and go with every change of pass.
        most = max(found.resident_bytes, self._captures.most_resident_bytes)
        return (
            most <= self.stats.budget_bytes
            and self._policy in CYCLIC
            and not self._hooks
            and not self._debug.poison_vacated
            and self._debug.lane_delay_seed is None
        )

    def _run_aside(self, graph: DynamoGraph, args: Sequence[Any], found: Pass) -> Any:
        """Let PyTorch run a pass by itself, with all weights on the device for good."""
        entry_bytes = 0
        if not self._weights.on_device:
            self._executor(found)  # for its figures: it is what the plan would do
            self._release_arena()
            self._weights.load_all()
            entry_bytes = self._weights.nbytes
        with torch.no_grad():
            result = graph.module(*graph.with_weights(args, self._weights.on_device))
        self._held.note((*found.given(args), *found.made(result)))
        self.stats.num_aside_runs += 1
        self._count(found.stats, PassCounters(entry_bytes, entry_bytes))
        return result

    def _visit(self, found: Pass) -> None:
        """Note that a pass runs next; let it make way if it keeps following another one.

        A decode step comes again and again, a prefill comes between decode steps: what the prefill
        keeps for itself is gone each time, so it had better leave the decode step's weights alone.
        """
        before, self._last = self._last, found
        if before is found:
            return
        may_adapt = found.is_visitor and self._policy in CYCLIC
        found.num_entries += 1
        if before is None or before.memgraph is None or not may_adapt:
            return
        if found.neighbour is not before and before.neighbour is not found:
            found.neighbour = before
            found.memgraph = found.executor = None

    def _executor(self, found: Pass) -> Executor:
        """Return a pass's executor on the present arena, planning where that is new."""
        if found.executor is not None:
            return found.executor
        arena_bytes = self._arena_bytes(found)
        if self._arena is not None and self._arena.nbytes != arena_bytes:
            self._release_arena()
        if found.memgraph is None or found.memgraph.arena_bytes != arena_bytes:
            found.memgraph = self._plan(found, arena_bytes)
            if found.memgraph.graph is not found.graph and self._needs_more_workspace(found):
                return self._executor(found)
        found.executor = self._built(found.memgraph)
        return found.executor

    def _built(self, memgraph: MemGraph) -> Executor:
        if self._arena is None:
            self._arena = Arena(memgraph.arena_bytes, self._device)
        if memgraph.host_bytes > self._pool.bytes.numel():
            self._pool.reserve(memgraph.host_bytes)
            for other in self._captures.planned():
                other.executor = None  # it points into the old pool
        return Executor(
            memgraph,
            arena=self._arena,
            pool=self._pool,
            lanes=self._lanes,
            masters=self._weights.masters,
            in_place=self._captures.costs.in_place(memgraph.graph),
            poison=self._debug.poison_vacated,
            hooks=self._hooks,
        )

    def _executor_of_sizes(self, found: Pass, args: Sequence[Any]) -> Executor | None:
        """Return a pass's executor, prepared for a call; None where only the call itself may fit.

        A pass of many sizes is as large as the largest of them.
        """
        try:
            executor = self._executor(found)
        except PlanInfeasibleError:
            if not found.graph.symbols:
                raise
            return None
        return executor if executor.set_sizes(args) else None

    def _needs_more_workspace(self, found: Pass) -> bool:
        """Measure the tasks of a changed graph; make room where one takes more than before."""
        assert found.memgraph is not None
        measured = self._captures.with_costs(found.memgraph.graph)
        more = measured.workspace_bytes - found.graph.workspace_bytes - found.extra_workspace_bytes
        if more <= 0:
            return False
        found.extra_workspace_bytes += more
        found.stats.add_around(more)
        found.memgraph = None
        return True

    def _arena_bytes(self, found: Pass) -> int:
        """Return the size of the arena that a pass runs in.

        All passes share one, so that weights stay resident from pass to pass: what is left by the
        one that needs most around it. A pass that does not fit in there gets all that it leaves
        itself, in an arena of its own.
        """
        around = found.stats.around_bytes
        allowed = (self.stats.budget_bytes - around) // self._alignment * self._alignment
        need = found.stats.min_budget_bytes - around
        if need > allowed:
            require_feasible(
                gather_rows(found.graph),
                self.stats.budget_bytes - around,
                self._alignment,
                non_arena_bytes=around,
                least_bytes=need,
            )
        else:  # one that cannot run takes nothing from the others
            self._arena_limit = min(self._arena_limit, allowed)
        return allowed if need > self._arena_limit else self._arena_limit

    def _plan(self, found: Pass, arena_bytes: int) -> MemGraph:
        return plan_pass(
            found,
            arena_bytes,
            stats=self.stats,
            policy=self._policy,
            split=self._split,
            alignment=self._alignment,
            profile=self.profile,
            plan_dir=self._plan_dir,
        )

    def _count(self, stats: PassStats, counted: PassCounters) -> None:
        stats.num_runs += 1
        stats.last_reloaded_bytes = counted.reloaded_bytes
        stats.last_entry_reloaded_bytes = counted.entry_reloaded_bytes
        stats.last_offloaded_bytes = counted.offloaded_bytes
        self.stats.reloaded_bytes += counted.reloaded_bytes
        self.stats.offloaded_bytes += counted.offloaded_bytes

    def _make_room(self) -> None:
        self._weights.unload()
        self._release_arena()

    def _release_arena(self) -> None:
        """Give the arena's bytes back; what was resident is reloaded when it is needed."""
        if self._arena is None:
            return
        for found in self._captures.planned():
            found.executor = None  # its views hold the arena
        # Whoever still holds a view, if only in a cycle of dead objects, must not hold the bytes.
        self._arena.bytes.untyped_storage().resize_(0)
        self._arena = None
        self._residents.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _on_unplanned_module(self, module: torch.nn.Module) -> None:
        if self._acting is not self:
            raise RehearsalError("a module is called outside any graph")
        self.stats.num_unplanned_modules += 1
        if module not in self._unplanned_modules:
            self._unplanned_modules.append(module)
            name = next((n for n, m in self._module.named_modules() if m is module), "")
            self._captures.warn_unplanned(
                f"module {name or 'at the root'} is called outside any graph"
            )
        self._weights.unload()
        self._release_arena()
