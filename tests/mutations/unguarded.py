"""Faults in what is noticed of changes on which Dynamo has no guard."""

from __future__ import annotations

from tests.mutations.mutant import mutant

NOTICED = "unit/capture/test_unguarded.py"
CHANGES = "integration/test_unguarded.py"
LOOK = "capture/unguarded.py"

OF_UNGUARDED = (
    mutant(
        "hooks-that-come-are-not-noticed",
        LOOK,
        "        is_same = self._num_hooks == list(map(len, self._hooks))\n",
        "        is_same = True\n",
        NOTICED,
    ),
    mutant(
        "a-hook-in-the-place-of-another-is-not-noticed",
        LOOK,
        "            is_same = self._keys == list(map(tuple, self._hooks))\n",
        "",
        NOTICED,
    ),
    mutant(
        "hooks-around-all-modules-are-not-noticed",
        LOOK,
        "for hooks in _hooks_of(part)] + [*GLOBAL_HOOKS]",
        "for hooks in _hooks_of(part)]",
        NOTICED,
        CHANGES,
    ),
    mutant(
        "inherited-methods-are-not-looked-at",
        LOOK,
        "for base in owner.__mro__:",
        "for base in [owner]:",
        NOTICED,
    ),
    mutant(
        "methods-that-were-not-traced-count",
        LOOK,
        "if self._is_traced(value)}",
        "if callable(value)}",
        NOTICED,
    ),
    mutant(
        "a-change-is-noticed-again-and-again",
        LOOK,
        "        self.see()\n        return True",
        "        return True",
        NOTICED,
    ),
    mutant(
        "graphs-outlive-a-change",
        "runtime/attachment.py",
        "        if self._unguarded.changed():\n",
        "        if False:\n",
        CHANGES,
    ),
    mutant(
        "an-attachment-looks-elsewhere",
        "runtime/attachment.py",
        "QuickTracing(self._own_hooks, self._unguarded, self._claim.add)",
        "QuickTracing(self._own_hooks, Unguarded(module), self._claim.add)",
        CHANGES,
    ),
    mutant(
        "hooks-that-come-with-a-trace-count",
        "capture/tracing.py",
        "            self._unguarded.see()\n",
        "",
        "unit/capture/test_tracing.py",
    ),
    mutant(
        "what-is-traced-is-not-told",
        "capture/tracing.py",
        "            tracing._unguarded.take(TracingContext.get_traced_code() or ())\n",
        "",
        "unit/capture/test_tracing.py",
    ),
    mutant(
        "a-graph-serves-with-other-kernels",
        "runtime/calls.py",
        "for i in positions), kernel_settings())",
        "for i in positions))",
        CHANGES,
    ),
)
