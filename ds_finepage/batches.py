"""Finds the batch that makes most tokens a second, for a model on a machine that need not be there.

[Note: few looks]
What a generation costs grows almost in proportion to its batch: the time of its tasks, the bytes
that its passes reload at least, the least budget, and the KV cache. A *look* captures both passes
with one batch and finds these figures, without a plan. Between two looks they lie on straight
lines. The next look is at the batch that the lines like best, until that one was looked at. Only
this batch is planned, since plans come within a few percent of their bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rich.table import Table

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.modeller import Costs, Modeller
from ds_finepage.planning.budget import competes
from ds_finepage.reporting.figures import PlanFigures
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import NS_PER_S, format_bytes, format_ns, require_count

MOST_SEQUENCES = 4096
FIRST_LOOKS = (1, 8, 64)

NEARLY = 0.99
"""The best batch is the smallest with this share of the most tokens a second: it waits least."""

NEAR = 1.05
"""A batch that was looked at stands for one that is smaller by so little."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """A generation with one batch."""

    batch: int  # sequences
    tokens_per_s: float  # of all sequences, prefill included; 0 without room
    first_token_ns: int  # the prefill
    step_ns: int  # the last step; each step counts as long


@dataclass(frozen=True, slots=True, kw_only=True)
class BestBatch:
    """The batch that makes most tokens a second.

    Attributes:
        planned: What its plans do.
        prefill: Figures of the plan of its prefill.
        step: Figures of the plan of its last step.
        curve: What other batches could do at most, by their lower bounds; none of them is planned.
    """

    planned: BatchPoint
    prefill: PlanFigures
    step: PlanFigures
    curve: tuple[BatchPoint, ...]

    @property
    def batch(self) -> int:
        """Its sequences."""
        return self.planned.batch

    @property
    def title(self) -> str:
        """Model, machine and budget."""
        step, name = self.step, self.step.model.rpartition("/")[2]
        return f"{name} on {step.hardware}, budget {format_bytes(step.budget_bytes)}"

    def to_table(self) -> Table:
        """Return powers of two and the best batch as a table for the terminal."""
        shown = [p for p in self.curve if p.batch.bit_count() == 1 and p.batch != self.batch]
        shown = sorted([*shown, self.planned], key=lambda p: p.batch)
        place = "host memory" if self.step.kv_on_host else "device"
        best = f"best, by plan; KV cache: {place}"
        columns: tuple[tuple[str, Callable[[BatchPoint], str]], ...] = (
            ("batch", lambda p: str(p.batch)),
            ("tok/s", lambda p: f"{p.tokens_per_s:.2f}"),
            ("first token", lambda p: format_ns(p.first_token_ns)),
            ("step", lambda p: format_ns(p.step_ns)),
            ("", lambda p: best if p is self.planned else "at most, by bounds"),
        )
        return table_of(self.title, columns, shown, left=("",))


def find_best(
    make: Callable[..., Modeller], *, kv_cache: str = "auto", most: int = MOST_SEQUENCES
) -> BestBatch:
    """Find the smallest batch within 1% of the most tokens a second, and plan it.

    Args:
        make: Makes the modeller of a generation with a ``batch`` and a ``kv_cache``.
        kv_cache: As in a ds_config: "auto", or where the KV cache is always.
        most: Sequences at most.

    Raises:
        ConfigError: A setting of the generation cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
        PlanInfeasibleError: One sequence has no room; the error has the least budget.
    """
    require_count(most, "the most sequences")
    search = Search(make, kv_cache)
    while True:
        search.look_around(most)
        try:
            return search.planned()
        except PlanInfeasibleError:
            if search.batch == 1:
                raise
            most = search.batch * 63 // 64  # activations take host memory that no bound knows


class Search:
    """Looks at batches; see [Note: few looks].

    Attributes:
        looks: The costs of each batch that was looked at.
        points: All batches, as fast as these costs allow.
        batch: The best of them.
    """

    def __init__(self, make: Callable[..., Modeller], kv_cache: str) -> None:
        self._make, self._kv_cache = make, kv_cache
        self._modellers: dict[int, Modeller] = {}
        self.looks: dict[int, Costs] = {}
        self.points: list[BatchPoint] = []
        self.batch = 1

    def look_around(self, most: int) -> None:
        """Find the best batch of all up to ``most``."""
        for batch in FIRST_LOOKS:
            if batch <= most:
                self._look(batch)
        while True:
            self.points = [self._at_most(n) for n in range(1, most + 1)]
            enough = NEARLY * max(p.tokens_per_s for p in self.points)
            liked = [p.batch for p in self.points if p.tokens_per_s >= enough]
            near = [n for n in liked if n in self.looks and n <= NEAR * liked[0]]
            if near:
                self.batch = near[0]
                return
            self._look(liked[0])

    def _look(self, batch: int) -> None:
        if batch not in self.looks:
            place = "device" if self._kv_cache == "device" else "host"  # where bytes may stay
            self._modellers[batch] = self._make(batch=batch, kv_cache=place)
            self.looks[batch] = self._modellers[batch].costs()

    def _at_most(self, batch: int) -> BatchPoint:
        costs, rate = costs_between(self.looks, batch), self._any.profile.h2d_bytes_per_s
        copies = (costs.prefill_missing_bytes, costs.step_missing_bytes)
        first_ns, step_ns = (max(n * NS_PER_S / rate, self._read_ns(n, costs)) for n in copies)
        slower = max(costs.prefill_ns, first_ns), max(costs.step_ns, step_ns)
        found = self._point(batch, *slower)
        return found if self._has_room(costs) else replace(found, tokens_per_s=0.0)

    def _read_ns(self, missing_bytes: float, costs: Costs) -> float:
        """Return the time to read what neither device nor host memory has room for."""
        limits, rate = self._any, self._any.profile.disk_bytes_per_s
        if limits.host_memory_bytes is None or not rate:
            return 0.0
        room_bytes = max(0.0, limits.host_memory_bytes - self._host_bytes(costs))
        return (missing_bytes - room_bytes) * NS_PER_S / rate

    def _point(self, batch: int, first_ns: float, step_ns: float) -> BatchPoint:
        total_ns = first_ns + (self._any.new_tokens - 1) * step_ns  # the prefill makes a token
        speed = batch * self._any.new_tokens * NS_PER_S / total_ns
        return BatchPoint(batch, speed, int(first_ns), int(step_ns))

    def _has_room(self, costs: Costs) -> bool:
        limits = self._any
        host_bytes = self._host_bytes(costs)
        most_bytes = host_bytes if limits.host_memory_bytes is None else limits.host_memory_bytes
        return costs.least_bytes <= limits.budget_bytes and host_bytes <= most_bytes

    def _host_bytes(self, costs: Costs) -> float:
        """Return the host memory without which nothing runs; a disk may have the weights."""
        profile = self._any.profile
        may_read = profile.disk_bytes_per_s and not profile.has_host
        weights = 0 if may_read else self._any.weight_bytes
        return costs.host_bytes if self._is_on_host(costs) else weights

    def _is_on_host(self, costs: Costs) -> bool:
        """Tell whether a KV cache is in host memory from the first pass on."""
        if self._kv_cache != "auto":
            return self._kv_cache == "host"
        return competes(int(costs.kv_bytes), self._any.weight_bytes, self._any.budget_bytes)

    @property
    def _any(self) -> Modeller:
        """A modeller, for what is the same in all of them."""
        return self._modellers[1]

    def planned(self) -> BestBatch:
        """Plan the best batch.

        Raises:
            PlanInfeasibleError: It has no room.
        """
        modeller = self._modellers[self.batch]
        if self._kv_cache == "auto" and not self._is_on_host(self.looks[self.batch]):
            modeller = self._make(batch=self.batch, kv_cache="auto")
        first, step = (planned.figures for planned in modeller.planned("finepage"))
        return BestBatch(
            planned=self._point(self.batch, first.predicted_ns, step.predicted_ns),
            prefill=first,
            step=step,
            # Four significant bits are enough for a curve.
            curve=tuple(
                p for p in self.points if p.tokens_per_s and p.batch < 16 * (p.batch & -p.batch)
            ),
        )


def costs_between(looks: Mapping[int, Costs], batch: int) -> Costs:
    """Return the costs of a batch on the straight line through the looks beside it."""
    known = sorted(looks)
    if len(known) == 1:
        return looks[known[0]]
    right = min(max(1, bisect_left(known, batch)), len(known) - 1)
    low, high = known[right - 1], known[right]
    share = (batch - low) / (high - low)
    pairs = zip(looks[low], looks[high], strict=True)
    return Costs(*(a + (b - a) * share for a, b in pairs))
