"""From a recorded taskgraph to a sized pass: measure, add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ds_finepage.capture.layouts import StridesOf
from ds_finepage.execution.layouts import LayoutProbe
from ds_finepage.execution.measure import OpMeter
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.pipeline import Needs, needs_of
from ds_finepage.planning.policies import unpacking_that_fits
from ds_finepage.runtime.parted_ranks import shape_of
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.ranks import ONE_RANK, Ranks
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.units import align_up

UNPLANNED_FACTOR = 2
"""Activations under PyTorch's allocator take at most this many times their largest live sum.
PyTorch frees what a composite op made when the op returns; a plan frees it after its last use."""

UNLIMITED_BYTES = 1 << 62
"""More than any budget."""


class PassMaker:
    """Makes passes, measured on the device that they will run on.

    Attributes:
        meter: What ops take on this device.
        most_resident_bytes: Budget under which, for every pass so far, the whole model may stay on
            the device.
        most_arena_bytes: The part of it for weights and activations, that of the largest pass.
        model_bytes: Bytes of the whole model on the device.
    """

    def __init__(
        self,
        meter: OpMeter,
        *,
        model_bytes: int,
        free_device: Callable[[], None],
        prepare: Callable[[TaskGraph], TaskGraph] = lambda graph: graph,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Start without a pass.

        ``free_device`` frees our device memory before something is measured there. ``prepare``
        makes a captured taskgraph ready for the way in which its masters lie.
        """
        self._prepare, self._ranks = prepare, ranks
        self.meter = meter
        self.model_bytes = model_bytes
        self.most_resident_bytes = self.most_arena_bytes = 0
        self._free_device = free_device
        self._settings: RunSettings | None = None  # of the call that is being captured
        self._probe = LayoutProbe(make_room=self._scratch_bytes)

    def forget(self, model_bytes: int) -> None:
        """Forget the passes so far; the measured ops stay known."""
        self.most_resident_bytes = self.most_arena_bytes = 0
        self.model_bytes = model_bytes

    def _scratch_bytes(self) -> int:
        """Free the device; return the bytes that scratch tensors may take."""
        assert self._settings is not None
        self._free_device()
        return self._settings.budget_bytes - self.meter.library_bytes

    def strides_of(self, settings: RunSettings) -> StridesOf:
        """Return the probe of layouts for a capture under these settings."""
        self._settings = settings
        return self._probe

    def require_room(self, graph: TaskGraph, settings: RunSettings) -> None:
        """Refuse a taskgraph for which no plan has room in the budget.

        Raises:
            PlanInfeasibleError: Some task needs more than the budget.
        """
        self._needs(graph, settings).require_room(settings.budget_bytes)

    def has_room(self, graph: TaskGraph, settings: RunSettings) -> bool:
        """Tell whether a plan for a taskgraph may have room in the budget."""
        return self._needs(graph, settings).min_budget_bytes <= settings.budget_bytes

    def size(self, graph: TaskGraph, settings: RunSettings) -> Pass:
        """Measure a taskgraph, and add up its needs.

        Raises:
            CaptureError: An op writes where its schema does not say it would.
            PlanInfeasibleError: Some task needs more than the budget, and plans cannot cut it.
        """
        planning = settings.planning
        graph = self._prepare(graph)
        graph = unpacking_that_fits(graph, policy=planning.policy, split=planning.split)
        graph = self.measured(graph, settings)
        needs = self._needs(graph, settings)
        if not settings.planning.cuts_weights:  # a cut may still make room
            needs.require_room(settings.budget_bytes)
        alignment = settings.planning.alignment
        weight_bytes = sum(
            align_up(b.nbytes, alignment) for b in graph.buffers if b.kind is BufferKind.WEIGHT
        )
        activation_bytes = needs.needed_arena_bytes - weight_bytes
        arena = self.model_bytes + UNPLANNED_FACTOR * activation_bytes
        self.most_arena_bytes = max(self.most_arena_bytes, arena)
        has_rows = any(graph.is_handed(b) for b in graph.buffers)
        # Without a plan, rows of a KV cache in host memory would all come in with each call.
        resident = UNLIMITED_BYTES if has_rows else needs.non_arena_bytes + arena
        self.most_resident_bytes = max(self.most_resident_bytes, resident)
        return Pass(graph, needs, resident_bytes=resident)

    def measured(self, graph: TaskGraph, settings: RunSettings) -> TaskGraph:
        """Return a taskgraph with the costs of its ops, measured where they are not known."""
        measured = self._measured(graph, settings)
        if not self._ranks.collects_weights:
            return measured
        costs = self._ranks.shared(
            f"costs of {shape_of(graph)}",
            lambda: [(task.time_ns, task.workspace_bytes) for task in measured.tasks],
        )
        tasks = zip(measured.tasks, costs, strict=True)
        return replace(
            measured,
            tasks=tuple(replace(t, time_ns=ns, workspace_bytes=n) for t, (ns, n) in tasks),
        )

    def _measured(self, graph: TaskGraph, settings: RunSettings) -> TaskGraph:
        non_arena = non_arena_bytes(graph, settings.planning.alignment) + self.meter.library_bytes
        outputs = sum(b.nbytes for b in graph.buffers if b.kind is BufferKind.OUTPUT)
        # Outputs do not exist yet while the ops are measured.
        room_bytes = settings.budget_bytes - non_arena + outputs
        return self.meter.with_costs(graph, room_bytes=room_bytes, make_room=self._free_device)

    def _needs(self, graph: TaskGraph, settings: RunSettings) -> Needs:
        return needs_of(
            self._prepare(graph),
            alignment=settings.planning.alignment,
            cuts_weights=settings.planning.cuts_weights,
            library_bytes=self.meter.library_bytes,
        )
