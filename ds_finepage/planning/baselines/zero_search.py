"""Policy ``zero-persistence``: ZeRO-Inference with the settings that suit a budget best.

Four settings are searched together: the two persistence thresholds, which decide what stays on the
device, and the prefetch bucket and the limit on live parameters, which decide how far ahead weights
are fetched. DeepSpeed documents none of them as a way to use a budget, but a user of ZeRO-Inference
can do no better with one.

The search begins with the settings of DeepSpeed's authors and as many persistent parameters as fit.
It changes one setting after the other, fills the arena up with persistent parameters, and keeps the
change if the predicted time is shorter. The number of simulated forwards is limited.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.planning.baselines.zero import (
    EVERY_PARAMETER,
    ZeroSettings,
    authors_settings,
    element_counts,
    script_of,
)
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Script, live_bytes, realize

POLICY = "zero-persistence"

MAX_SIMULATIONS = 60
"""Forwards to simulate of each pass in one search."""

FRAGMENTATION_STEPS = 10
"""How often settings give up a percent of the arena until the offsets fit."""

WINDOWS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Limits on live parameters to try, in elements of the largest repeated weight."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Settings that fit, and the cost of the passes."""

    settings: ZeroSettings
    cost: int


def best_settings(passes: Sequence[tuple[Problem, int]]) -> ZeroSettings:
    """Search the settings with which some passes together take the shortest time.

    Args:
        passes: Passes of one model, with the number of times that each one runs. Without a profile,
            reloaded bytes take the place of the time.

    Returns:
        Settings under which each pass fits its arena.

    Raises:
        PlanInfeasibleError: Without prefetch and persistence a pass is still too large.
    """
    return _Search(passes).run()


class _Search:
    """One search; counts the forwards that it simulates."""

    def __init__(self, passes: Sequence[tuple[Problem, int]]) -> None:
        self._passes = passes
        self._first = passes[0][0]
        self._numel = element_counts(self._first.graph)
        self._num_left = MAX_SIMULATIONS * len(passes)
        self._scripts: dict[tuple[int, ZeroSettings], Script] = {}
        self._best: _Found | None = None

    def run(self) -> ZeroSettings:
        """Change one setting after the other."""
        authors = authors_settings(self._first.graph)
        start = dataclasses.replace(authors, param_persistence_threshold=EVERY_PARAMETER)
        self._try([start])
        repeated = [n for n, count in Counter(self._numel.values()).items() if count > 1]
        sizes = sorted(repeated or self._numel.values(), reverse=True)
        largest = sizes[0] if sizes else 0
        self._try(_window(start, int(largest * share)) for share in WINDOWS)
        best = self._settings_or(start)
        buckets = sorted({1, *sizes[:3]})
        self._try(_with(best, prefetch_bucket_size=size) for size in buckets)
        best = self._settings_or(start)
        self._try(_with(best, param_persistence_threshold=size) for size in sizes[:3])
        best = self._settings_or(start)
        around = (best.max_live_parameters * eighths // 8 for eighths in (7, 9))
        self._try(_with(best, max_live_parameters=limit) for limit in around)
        best = self._settings_or(start)
        around = (best.prefetch_bucket_size * quarters // 4 for quarters in (2, 6, 8))
        self._try(_with(best, prefetch_bucket_size=size) for size in around)
        if self._best is None:
            least = _with(_window(start, 0), model_persistence_threshold=0)
            for problem, _ in self._passes:
                realize(problem, self._script(problem, least))  # says why it does not fit
            return least
        return self._best.settings

    def _settings_or(self, start: ZeroSettings) -> ZeroSettings:
        return start if self._best is None else self._best.settings

    def _try(self, candidates: Iterable[ZeroSettings]) -> None:
        """Keep the best of some settings and of those found before; ties go to the earlier."""
        for settings in candidates:
            found = self._filled_up(settings) if self._num_left > 0 else None
            if found and (self._best is None or found.cost < self._best.cost):
                self._best = found

    def _filled_up(self, settings: ZeroSettings) -> _Found | None:
        """Let as many parameters persist as fit; return None if even none do."""
        row = _Row(self._first, self._numel, settings)
        most = self._most_kept(row)
        if most is None:
            return None
        for percent in range(FRAGMENTATION_STEPS):
            count = row.most_in(row.nbytes[most] - self._first.arena_bytes * percent // 100)
            cost = self._cost(row.keeping(count))
            if cost is not None:
                return _Found(row.keeping(count), cost)
            if count == 0:
                break
        return None

    def _most_kept(self, row: _Row) -> int | None:
        """Return how many parameters fit, whatever their offsets; None if even none do."""
        most: int | None = None
        count = 0
        while count < len(row.nbytes) and self._num_left > 0:
            room = min(
                problem.arena_bytes - live_bytes(problem, self._script(problem, row.keeping(count)))
                for problem, _ in self._passes
            )
            if room < 0:
                break
            # One more than fits may fit, for it no longer streams.
            most, count = count, max(count + 1, row.most_in(row.nbytes[count] + room))
        return most

    def _cost(self, settings: ZeroSettings) -> int | None:
        """Return the time of all passes, or their bytes; None if the offsets do not fit."""
        cost = 0
        for problem, num_runs in self._passes:
            try:
                memgraph = realize(problem, self._script(problem, settings))
            except PlanInfeasibleError:
                return None
            cost += num_runs * problem.cost_of(memgraph)
        return cost

    def _script(self, problem: Problem, settings: ZeroSettings) -> Script:
        key = (id(problem), settings)
        if key not in self._scripts:
            self._num_left -= 1
            self._scripts[key] = script_of(problem.graph, settings, POLICY)
        return self._scripts[key]


class _Row:
    """The parameters under a persistence threshold, in the order in which DeepSpeed keeps them.

    Attributes:
        nbytes: Bytes of the first 0, 1, 2, ... of them.
    """

    def __init__(self, problem: Problem, numel: dict[int, int], settings: ZeroSettings) -> None:
        limit = settings.param_persistence_threshold
        found = [b for b, num_elements in numel.items() if num_elements <= limit]
        self._settings = settings
        self._elements = [0, *accumulate(numel[b] for b in found)]
        self.nbytes = [0, *accumulate(problem.size(b) for b in found)]

    def most_in(self, nbytes: int) -> int:
        """Return how many of them fit some bytes."""
        return max(0, bisect_right(self.nbytes, nbytes) - 1)

    def keeping(self, count: int) -> ZeroSettings:
        """Return the settings that keep so many of them."""
        return _with(self._settings, model_persistence_threshold=self._elements[count])


_with = dataclasses.replace


def _window(settings: ZeroSettings, num_elements: int) -> ZeroSettings:
    """Return settings that fetch ahead up to a number of live elements."""
    return _with(settings, max_live_parameters=num_elements, prefetch_bucket_size=num_elements)
