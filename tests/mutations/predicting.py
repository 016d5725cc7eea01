"""Faults of predictions, bounds and baselines."""

from __future__ import annotations

from tests.mutations.mutant import mutant

UNIT = "unit/planning"

PREDICTING = (
    # What it costs.
    mutant(
        "one-row-of-logits-is-not-paid-for",
        "planning/budget.py",
        "4 * callers + 3 * row + HOST",
        "4 * callers + HOST",
        f"{UNIT}/test_budget.py",
        is_named=True,
    ),
    mutant(
        "copies-of-token-ids-are-not-paid-for",
        "planning/budget.py",
        "4 * callers + 3 * row + HOST",
        "3 * row + HOST",
        f"{UNIT}/test_budget.py",
    ),
    mutant(
        "workspaces-are-not-paid-for",
        "planning/budget.py",
        "return external + graph.workspace_bytes + ",
        "return external + ",
        f"{UNIT}/test_budget.py",
    ),
    mutant(
        "the-host-takes-no-time",
        "planning/simulator.py",
        "issued_ns += costs.host_ns[lane] * num_calls",
        "issued_ns += 0",
        f"{UNIT}/test_simulator.py",
    ),
    mutant(
        "a-copy-has-no-latency",
        "planning/simulator.py",
        "return self._latency_ns * num_copies + bytes_ns",
        "return bytes_ns",
        f"{UNIT}/test_simulator.py",
    ),
    mutant(
        "a-slice-of-experts-is-one-copy",
        "graph/memgraph.py",
        "return route.most_used if num_pieces > 1 else min(route.most_used, gaps + 1)",
        "return 1",
        f"{UNIT}/rewrite/test_split_experts.py",
    ),
    mutant(
        "the-largest-copy-takes-no-room",
        "planning/time_bound.py",
        "copied_bytes = max(reloaded_bytes, missing_bytes + copy_bytes)",
        "copied_bytes = reloaded_bytes",
        f"{UNIT}/test_time_bound.py",
    ),
    mutant(
        "weights-stream-by-bytes-only",
        "planning/finepage/grains.py",
        "pace = sizes if pace is None else pace",
        "pace = sizes",
        f"{UNIT}/finepage/test_grains.py",
    ),
    mutant(
        "rows-in-host-memory-are-paid-for-as-logits",
        "planning/budget.py",
        "        if graph.buffers[view.buffer].kind is BufferKind.HOST:\n",
        "        if False:\n",
        f"{UNIT}/test_budget.py",
    ),
    mutant(
        "rows-go-to-host-memory-at-the-speed-of-the-device",
        "planning/simulator.py",
        "        if task.op == TO_HOST:\n",
        "        if False:\n",
        f"{UNIT}/test_simulator.py",
    ),
    mutant(
        "the-bound-cuts-rows-that-a-call-brings",
        "planning/bounds.py",
        "kept = [b for b in named if b in weights and b not in per_call]",
        "kept = [b for b in named if b in weights]",
        f"{UNIT}/test_bounds.py",
    ),
    mutant(
        "lanes-run-side-by-side-with-themselves",
        "planning/simulator.py",
        "start = start_ns(ready, lane_free[lane], work[node].issued_ns, wait_ns)",
        "start = ready",
        f"{UNIT}/test_simulator.py",
    ),
    mutant(
        "transfers-behind-the-last-task-stall-it",
        "planning/simulator.py",
        "stall_ns=ends[Lane.COMPUTE] - busy[Lane.COMPUTE],",
        "stall_ns=max(ends.values()) - busy[Lane.COMPUTE],",
        f"{UNIT}/test_simulator.py",
    ),
    mutant(
        "the-bound-counts-experts-whole",
        "planning/bounds.py",
        "chosen = [(n, known[b].most_bytes(n), True)",
        "chosen = [(n, n, True)",
        f"{UNIT}/rewrite/test_late_experts.py",
    ),
    mutant(
        "the-bound-counts-weights-twice",
        "planning/bounds.py",
        "if room.weights and taken.isdisjoint(room.weights):",
        "if room.weights:",
        f"{UNIT}/test_bounds.py",
    ),
    mutant(
        "the-bound-leaves-out-activations",
        "planning/bounds.py",
        "beside_activations_bytes=spare_bytes + sum([extents[b] for b in kept]),",
        "beside_activations_bytes=arena,",
        f"{UNIT}/test_bounds.py",
        "property/test_split_plans.py",
    ),
    mutant(
        "the-bound-counts-the-largest-workspace-throughout",
        "planning/pipeline.py",
        "own_workspaces=True,",
        "own_workspaces=False,",
        f"{UNIT}/test_pipeline.py",
    ),
    mutant(
        "the-bound-forgets-the-way-ahead-of-a-router",
        "planning/bounds.py",
        "int((1 - w) * outside_ns + ",
        "int(outside_ns + ",
        f"{UNIT}/test_bounds.py",
        "property/test_printed_bounds.py",
    ),
    mutant(
        "the-bound-brings-no-experts-in-ahead-of-others",
        "planning/bounds.py",
        "return min(self.share, link_weight) if self.is_routed else",
        "return self.share if self.is_routed else",
        f"{UNIT}/test_bounds.py",
    ),
    mutant(
        "the-bound-counts-tasks-that-may-be-delayed",
        "planning/bounds.py",
        "if n == earliest[task.index]:",
        "if n >= earliest[task.index]:",
        f"{UNIT}/test_bounds.py",
    ),
    mutant(
        "the-bound-keeps-rows-that-each-call-brings",
        "planning/bounds.py",
        "per_call = {b for b in weights if graph.buffers[b].gather is not None}",
        "per_call: set[int] = set()",
        f"{UNIT}/test_bounds.py",
    ),
    # What other systems do.
    mutant(
        "lru-evicts-though-there-is-room",
        "planning/baselines/lru.py",
        "if self._in_use + nbytes <= self._room:",
        "if self._in_use + nbytes < self._room:",
        f"{UNIT}/baselines/test_lru.py",
    ),
    mutant(
        "static-keeps-the-first-weights-of-a-layer",
        "planning/baselines/static.py",
        "for buffer in reversed(new):",
        "for buffer in new:",
        f"{UNIT}/baselines/test_static.py",
    ),
    mutant(
        "zero-releases-what-it-uses-soon",
        "planning/baselines/zero.py",
        "self._release_cache[key] = frozenset(found) - used_soon",
        "self._release_cache[key] = frozenset(found)",
        f"{UNIT}/baselines/test_zero.py",
    ),
)
