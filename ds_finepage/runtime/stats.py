"""Counters of an attached model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassStats:
    """Counters of one captured pass."""

    name: str
    num_tasks: int
    arena_bytes: int
    around_bytes: int
    min_budget_bytes: int
    needed_budget_bytes: int
    lower_bound_bytes: int = 0
    num_runs: int = 0
    last_reloaded_bytes: int = 0
    last_entry_reloaded_bytes: int = 0
    last_offloaded_bytes: int = 0

    def add_around(self, nbytes: int) -> None:
        """Count device bytes around the arena that were not known before."""
        self.around_bytes += nbytes
        self.min_budget_bytes += nbytes
        self.needed_budget_bytes += nbytes


@dataclass
class Stats:
    """Counters of an attached model, readable at any time.

    ``num_captures`` counts recordings, each of which serves all calls of its kind; ``num_plans``
    plans; ``num_forgotten`` passes that made way for others; ``num_aside_runs`` runs for which the
    engine stepped aside, because everything fits; ``num_unplanned_graphs`` calls of graphs that ran
    without a plan; ``num_unplanned_modules`` module calls outside any graph;
    ``num_caches_on_host`` KV caches that had no room on the device.
    """

    budget_bytes: int
    weight_bytes: int
    num_captures: int = 0
    num_plans: int = 0
    num_forgotten: int = 0
    num_aside_runs: int = 0
    num_caches_on_host: int = 0
    num_unplanned_graphs: int = 0
    num_unplanned_modules: int = 0
    reloaded_bytes: int = 0
    offloaded_bytes: int = 0
    passes: list[PassStats] = field(default_factory=list)
    unplanned_reasons: list[str] = field(default_factory=list)

    @property
    def min_budget_bytes(self) -> int:
        """A budget under which every pass so far can run; lengths count as rounded up."""
        return max((p.min_budget_bytes for p in self.passes), default=0)

    @property
    def needed_budget_bytes(self) -> int:
        """The budget under which every pass so far runs with all weights resident."""
        return max((p.needed_budget_bytes for p in self.passes), default=0)
