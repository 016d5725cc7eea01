"""Faults of measured rates and timelines."""

from __future__ import annotations

from tests.mutations.mutant import mutant

OBSERVING = "unit/runtime/test_observing.py"
SIMULATOR = "unit/planning/test_simulator.py"
PROBE = "unit/execution/test_probe.py"

MEASURING = (
    mutant(
        "products-grow-however-long-they-take",
        "execution/probe.py",
        "if seconds >= LONG_ENOUGH_S or not has_room:",
        "if not has_room:",
        PROBE,
    ),
    mutant(
        "a-first-run-is-predicted-as-a-steady-one",
        "runtime/observing.py",
        "entry_missing=each.entry_missing,\n                begin_ns",
        "begin_ns",
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
    # What a machine does beside its rates.
    mutant(
        "small-copies-are-as-fast-as-large-ones",
        "planning/simulator.py",
        "        if self._shares:\n",
        "        if False:\n",
        SIMULATOR,
    ),
    mutant(
        "details-decide-plans",
        "runtime/settings.py",
        "profile=self.profile.without_details(),",
        "profile=self.profile,",
        "unit/runtime/test_handle.py",
    ),
    mutant(
        "details-of-a-plain-profile-are-written",
        "graph/codec.py",
        "if values[name] == default}",
        "if values[name] == ()}",
        "unit/graph/test_profiles.py",
    ),
    mutant(
        "ops-are-measured-with-warm-caches",
        "execution/measure.py",
        "        cold.fill_(1)\n",
        "",
        "unit/execution/test_measure.py",
    ),
    mutant(
        "rates-count-the-latency-twice",
        "execution/probe.py",
        "size / max(took - latency, took / 2)",
        "size / took",
        PROBE,
    ),
    mutant(
        "calls-take-no-time-before-their-lanes",
        "runtime/observing.py",
        "begin_ns=statistics.median_low(begins_ns),",
        "begin_ns=0,",
        OBSERVING,
    ),
)
