"""Counters of an attached model, and the snapshots that users read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStats:
    """Counters of one captured pass.

    Attributes:
        name: The graph that the pass is a call of.
        num_tasks: Captured ops that compute.
        arena_bytes: Size of the arena that the pass is planned for; 0 before its first plan.
        non_arena_bytes: Device bytes that the pass needs outside the arena.
        min_budget_bytes: The least budget under which the pass runs.
        needed_budget_bytes: The budget under which the pass runs with all weights resident.
        lower_bound_bytes: Reloads of a run that no plan of one batch at a time can avoid.
        num_runs: Runs so far.
        last_reloaded_bytes: Host-to-device bytes of the last run.
        last_entry_reloaded_bytes: The part of them that restored the residents of the plan.
        last_offloaded_bytes: Device-to-host bytes of the last run.
    """

    name: str
    num_tasks: int
    arena_bytes: int
    non_arena_bytes: int
    min_budget_bytes: int
    needed_budget_bytes: int
    lower_bound_bytes: int = 0
    num_runs: int = 0
    last_reloaded_bytes: int = 0
    last_entry_reloaded_bytes: int = 0
    last_offloaded_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """Events of an attached model; the runtime adds to them and never reads them.

    Attributes:
        num_captures: Recordings; each one serves all calls of its kind.
        num_plans: Plans made.
        plan_ns: Time that these plans took.
        num_forgotten: Passes that made way for others.
        num_resident_runs: Runs with every weight on the device, by PyTorch itself.
        num_caches_on_host: KV caches that moved to host memory.
        num_unplanned_graphs: Runs of graphs without a plan.
        num_unplanned_modules: Module calls outside any graph.
        reloaded_bytes: Host-to-device bytes of all runs.
        offloaded_bytes: Device-to-host bytes of all runs.
        unplanned_reasons: Why something ran without a plan.
    """

    num_captures: int = 0
    num_plans: int = 0
    plan_ns: int = 0
    num_forgotten: int = 0
    num_resident_runs: int = 0
    num_caches_on_host: int = 0
    num_unplanned_graphs: int = 0
    num_unplanned_modules: int = 0
    reloaded_bytes: int = 0
    offloaded_bytes: int = 0
    unplanned_reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A snapshot of the counters of an attached model; see :class:`Counters`.

    Attributes:
        budget_bytes: The limit on all device bytes.
        weight_bytes: Bytes of all weights.
        file_bytes: Bytes of weights read from files so far.
        host_bytes: Host memory of the run: weights, pinned pool and KV caches.
        host_budget_bytes: The limit on it; None without one.
        passes: The passes that are remembered, in the order of their capture.
        draft_bytes: Bytes of the draft's weights, which stay on the device; 0 without a draft.
        num_drafted: Tokens that the draft made and the model checked.
        num_accepted: Those of them that the model agreed with.
        num_checks: Passes of the model that checked some.
    """

    budget_bytes: int
    weight_bytes: int
    num_captures: int
    num_plans: int
    plan_ns: int
    num_forgotten: int
    num_resident_runs: int
    num_caches_on_host: int
    num_unplanned_graphs: int
    num_unplanned_modules: int
    reloaded_bytes: int
    offloaded_bytes: int
    unplanned_reasons: tuple[str, ...]
    passes: tuple[PassStats, ...]
    draft_bytes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_checks: int = 0
    file_bytes: int = 0
    host_bytes: int = 0
    host_budget_bytes: int | None = None

    @property
    def min_budget_bytes(self) -> int:
        """A budget under which every pass so far can run; lengths count as rounded up."""
        return max((p.min_budget_bytes for p in self.passes), default=0)

    @property
    def needed_budget_bytes(self) -> int:
        """The budget under which every pass so far runs with all weights resident."""
        return max((p.needed_budget_bytes for p in self.passes), default=0)
