"""Faults of measured rates and timelines."""

from __future__ import annotations

from tests.mutations.mutant import mutant

OBSERVING = "unit/runtime/test_observing.py"
SIMULATOR = "unit/planning/test_simulator.py"
PROBE = "unit/execution/test_probe.py"
WARM = "unit/planning/test_warm_weights.py"
WEIGHT_TIMES = "unit/execution/test_weight_times.py"

MEASURING = (
    mutant(
        "products-grow-however-long-they-take",
        "execution/probe.py",
        "if seconds >= LONG_ENOUGH_S or not has_room:",
        "if not has_room:",
        PROBE,
    ),
    mutant(
        "products-are-timed-by-units-that-sleep",
        "execution/weight_times.py",
        "            _wake(dtypes)\n",
        "",
        WEIGHT_TIMES,
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
        "a-lane-goes-on-at-once-after-a-wait",
        "planning/overlap.py",
        "else ready_ns + wait_ns",
        "else ready_ns",
        SIMULATOR,
    ),
    mutant(
        "a-lane-goes-on-at-once-after-a-node",
        "planning/simulator.py",
        "            lane_free[lane] = complete[node] + profile.step_ns",
        "            lane_free[lane] = complete[node]",
        SIMULATOR,
    ),
    mutant(
        "overlapping-lanes-go-on-at-once-after-a-node",
        "planning/overlap.py",
        "then + self._step_ns",
        "then",
        SIMULATOR,
    ),
    mutant(
        "a-single-lane-goes-on-at-once-after-a-node",
        "planning/simulator.py",
        "dict.fromkeys(Lane, complete[node] + profile.step_ns)",
        "dict.fromkeys(Lane, complete[node])",
        SIMULATOR,
    ),
    mutant(
        "copies-run-as-fast-beside-ops",
        "planning/overlap.py",
        "{lane: profile.copy_slowdown for lane in Lane}",
        "{lane: 1.0 for lane in Lane}",
        SIMULATOR,
    ),
    mutant(
        "copies-slow-down-copies",
        "planning/overlap.py",
        "overlaps = others if lane is Lane.COMPUTE else others & {Lane.COMPUTE}",
        "overlaps = others",
        SIMULATOR,
    ),
    mutant(
        "small-copies-run-beside-ops",
        "planning/simulator.py",
        "in_one_lane = extents_bytes < profile.one_lane_below_bytes * num_copies",
        "in_one_lane = False",
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
        "one-interrupted-measurement-counts",
        "execution/interplay.py",
        "(min(seconds) for seconds in zip(*both, strict=True))",
        "(max(seconds) for seconds in zip(*both, strict=True))",
        PROBE,
    ),
    mutant(
        "calls-take-no-time-before-their-lanes",
        "runtime/observing.py",
        "begin_ns=statistics.median_low(begins_ns),",
        "begin_ns=0,",
        OBSERVING,
    ),
    # Two times of an op on weights.
    mutant(
        "a-reloaded-weight-is-as-cold-as-a-resident-one",
        "planning/simulator.py",
        "            fresh.add(node.buffer)\n",
        "            pass\n",
        WARM,
    ),
    mutant(
        "a-weight-stays-warm-after-its-use",
        "planning/simulator.py",
        "            fresh.difference_update(task.reads)\n",
        "            pass\n",
        WARM,
    ),
    mutant(
        "the-bound-counts-cold-weights",
        "planning/time_bound.py",
        "costs.task_ns(graph, task, task.reads)",
        "costs.task_ns(graph, task)",
        WARM,
    ),
    mutant(
        "weights-are-not-written-before-a-warm-run",
        "execution/weight_times.py",
        "            lane.submit(trials[signature].write_again, weights[signature]).result()\n",
        "            pass\n",
        WEIGHT_TIMES,
    ),
    mutant(
        "caches-keep-weights-before-a-cold-run",
        "execution/weight_times.py",
        "            flushed.fill_(1)\n",
        "",
        WEIGHT_TIMES,
    ),
    mutant(
        "scratch-of-a-batch-has-no-limit",
        "execution/weight_times.py",
        "if batch and taken + nbytes > most:",
        "if False:",
        WEIGHT_TIMES,
    ),
    mutant(
        "the-second-times-are-dropped",
        "execution/measure.py",
        "self._costs[signature], time_ns=cold_ns, warm_ns=warm_ns",
        "self._costs[signature], time_ns=cold_ns",
        WEIGHT_TIMES,
    ),
    mutant(
        "tasks-do-not-get-their-second-time",
        "execution/measure.py",
        "                    warm_ns=cost.warm_ns,\n",
        "",
        WEIGHT_TIMES,
    ),
    mutant(
        "a-slice-has-the-warm-time-of-the-whole",
        "planning/rewrite/split.py",
        '"warm_ns": None if task.warm_ns is None else share(task.warm_ns),',
        "",
        "unit/planning/rewrite/test_split.py",
    ),
    mutant(
        "experts-are-timed-with-rows-for-the-first-one",
        "execution/weight_times.py",
        "unused, is_timed=True)",
        "unused)",
        WEIGHT_TIMES,
    ),
    mutant(
        "reloads-that-warm-weights-make-plans-seem-faster",
        "planning/finepage/forecast.py",
        "KNOWS_WARM = False",
        "KNOWS_WARM = True",
        "unit/planning/finepage/test_search.py",
    ),
)
