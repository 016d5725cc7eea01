"""Faults of measured rates and timelines."""

from __future__ import annotations

from tests.mutations.mutant import mutant

OBSERVING = "unit/runtime/test_observing.py"

MEASURING = (
    mutant(
        "a-first-run-is-predicted-as-a-steady-one",
        "runtime/observing.py",
        "simulate(each.memgraph, profile, entry_missing=each.entry_missing)",
        "simulate(each.memgraph, profile)",
        OBSERVING,
    ),
    mutant(
        "a-failed-run-is-observed",
        "runtime/observing.py",
        "self._passes.pop(found, None)  # in case the run fails",
        "pass",
        OBSERVING,
    ),
    mutant(
        "recording-never-stops",
        "runtime/observing.py",
        "            executor.recorder = None\n",
        "            pass\n",
        OBSERVING,
    ),
    mutant(
        "spans-of-the-last-pass-stay",
        "execution/spans.py",
        "        self._spans = []\n        timed",
        "        timed",
        "unit/execution/test_executor_hooks.py",
    ),
)
