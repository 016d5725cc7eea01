"""Faults of the search in smaller arenas, and of passes that do not settle."""

from __future__ import annotations

from tests.mutations.mutant import mutant

UNIT = "unit/planning"
FINEPAGE = f"{UNIT}/finepage/test_search.py"
PROBLEM = f"{UNIT}/test_problem.py"
SMALLER = f"{UNIT}/finepage/test_smaller_arenas.py"

SMALLER_ARENAS = (
    mutant(
        "a-nearly-fast-plan-ends-a-thorough-search",
        "planning/finepage/options.py",
        "fast_enough=min(self.fast_enough, self.equal_times),",
        "",
        FINEPAGE,
    ),
    mutant(
        "a-short-pass-is-done-with-a-good-plan",
        "planning/finepage/options.py",
        "ends_search=min(self.ends_search, self.equal_times),",
        "",
        FINEPAGE,
    ),
    mutant(
        "plans-of-smaller-arenas-are-not-taken",
        "planning/finepage/search.py",
        "if other.has_plan:",
        "if False:",
        SMALLER,
    ),
    mutant(
        "plans-of-smaller-arenas-stay-there",
        "planning/finepage/search.py",
        "in_arena(other._plans.best.plan, self._problem.arena_bytes)",
        "other._plans.best.plan",
        SMALLER,
    ),
    mutant(
        "smaller-arenas-are-tried-whatever-their-bound",
        "planning/finepage/search.py",
        "if search.beats(smaller) or not (",
        "if not (",
        SMALLER,
    ),
    mutant(
        "all-smaller-arenas-are-tried",
        "planning/finepage/search.py",
        "self._simulated_ns <= most * fastest_ns",
        "True",
        SMALLER,
    ),
    mutant(
        "good-plans-are-held-against-smaller-arenas",
        "planning/finepage/search.py",
        "fastest_ns > most * self._bounds.least_ns and ",
        "",
        SMALLER,
    ),
    mutant(
        "plans-with-a-ring-are-tried-in-every-smaller-arena",
        "planning/finepage/search.py",
        "has_ring = num_tried < num_with_ring",
        "has_ring = True",
        SMALLER,
    ),
    mutant(
        "smaller-arenas-are-searched-like-the-arena-itself",
        "planning/finepage/search.py",
        "_searched(smaller, others)",
        "_searched(smaller, options)",
        SMALLER,
    ),
    mutant(
        "the-published-algorithm-is-not-asked-in-smaller-arenas",
        "planning/finepage/search.py",
        "        found._try_simulated(smaller.of(self._simulated.graph), settling_plans)\n",
        "",
        SMALLER,
    ),
    mutant(
        "the-captured-pass-is-always-simulated-in-smaller-arenas",
        "planning/finepage/search.py",
        "if self._offered_ns * CLEARLY < self._simulated_ns:",
        "if False:",
        SMALLER,
    ),
    mutant(
        "the-search-of-a-long-pass-is-thorough",
        "planning/finepage/search.py",
        "    return _is_short(problem.graph, options)\n\n\ndef _is_short",
        "    return True\n\n\ndef _is_short",
        SMALLER,
    ),
    mutant(
        "a-long-pass-is-simulated-in-smaller-arenas",
        "planning/finepage/search.py",
        "simulates = is_thorough and search.may_gain_by_simulation",
        "simulates = search.may_gain_by_simulation",
        SMALLER,
    ),
    mutant(
        "smaller-arenas-are-tried-without-a-profile",
        "planning/finepage/search.py",
        "    if problem.profile is None:\n        return\n    has_forecasts",
        "if False:",
        SMALLER,
    ),
    mutant(
        "a-long-pass-runs-cheap-tasks-again-in-smaller-arenas",
        "planning/finepage/options.py",
        "recomputes=self.recomputes and is_thorough,",
        "",
        SMALLER,
    ),
    mutant(
        "many-plans-are-written-in-smaller-arenas",
        "planning/finepage/search.py",
        "options.smaller_with_ring if is_thorough or has_forecasts else 1",
        "options.smaller_with_ring",
        SMALLER,
    ),
    mutant(
        "all-rings-are-written-in-smaller-arenas",
        "planning/finepage/options.py",
        "        if is_thorough or has_forecasts:\n",
        "        if True:\n",
        SMALLER,
    ),
    mutant(
        "plans-that-cannot-win-are-simulated",
        "planning/finepage/search.py",
        "(self._may_win(moved_bytes(plan), 0) and self._offer(plan))",
        "self._offer(plan)",
        f"{UNIT}/finepage/test_options.py",
    ),
    mutant(
        "derived-results-ignore-the-pass",
        "planning/problem.py",
        "known = (id(self.graph), key)",
        "known = key",
        PROBLEM,
    ),
    mutant(
        "derived-results-ignore-their-key",
        "planning/problem.py",
        "known = (id(self.graph), key)",
        "known = id(self.graph)",
        PROBLEM,
    ),
    mutant(
        "a-pass-is-not-kept-with-what-is-derived-from-it",
        "planning/problem.py",
        "self.derived[known] = self.graph, make(self.graph)",
        "self.derived[known] = None, make(self.graph)",
        PROBLEM,
    ),
    mutant(
        "kept-tables-are-not-part-of-a-key",
        "planning/finepage/search.py",
        "frozenset(kept))\n    rows",
        "frozenset())\n    rows",
        SMALLER,
    ),
    mutant(
        "whole-tables-are-not-part-of-a-key",
        "planning/finepage/search.py",
        '("rows", whole_tables, ',
        '("rows", ',
        SMALLER,
    ),
    mutant(
        "held-rows-are-not-part-of-a-key",
        "planning/finepage/ring.py",
        ", *held.ends.items())",
        ")",
        f"{UNIT}/finepage/test_held_rows.py",
    ),
    mutant(
        "the-room-for-a-ring-is-not-part-of-a-key",
        "planning/finepage/search.py",
        '("recompute", has_room),',
        '("recompute",),',
        SMALLER,
    ),
    mutant(
        "no-plan-keeps-what-stays-in-place",
        "planning/finepage/small_arena.py",
        "        if stays:\n",
        "        if False:\n",
        f"{UNIT}/finepage/test_small_arena.py",
    ),
    mutant(
        "what-stays-in-the-way-is-not-moved",
        "planning/finepage/small_arena.py",
        " or _plan_stacked(problem, stays.keys())",
        "",
        f"{UNIT}/finepage/test_small_arena.py",
    ),
)
