"""Faults in what attached models have to do with Dynamo's limits, and with code that they share."""

from __future__ import annotations

from tests.mutations.mutant import mutant

CLAIMS = "unit/runtime/test_recompiles.py"
TRACING = "unit/capture/test_tracing.py"
BREAKS = "integration/test_graph_breaks.py"
RECOMPILES = "runtime/recompiles.py"

OF_RECOMPILING = (
    mutant(
        "an-attached-model-has-a-limit-of-graphs",
        RECOMPILES,
        "    setattr(dynamo_config, name, _raised[name])\n",
        "    pass\n",
        CLAIMS,
        BREAKS,
    ),
    mutant(
        "a-limit-that-the-user-sets-is-raised",
        RECOMPILES,
        "if getattr(dynamo_config, LIMIT) == _raised.get(LIMIT):",
        "if True:",
        CLAIMS,
    ),
    mutant(
        "graphs-of-other-models-count",
        RECOMPILES,
        "_lift(LIMIT, num_graphs + MOST_GRAPHS)",
        "_lift(LIMIT, MOST_GRAPHS)",
        CLAIMS,
    ),
    mutant(
        "limits-return-while-a-model-is-attached",
        RECOMPILES,
        "        if not _claims:\n            for name, limit",
        "        if True:\n            for name, limit",
        CLAIMS,
    ),
    mutant(
        "a-limit-that-the-user-sets-is-lost",
        RECOMPILES,
        "if getattr(dynamo_config, name) == _raised[name]:",
        "if True:",
        CLAIMS,
    ),
    mutant(
        "graphs-stay-when-a-model-is-detached",
        RECOMPILES,
        "                reset_code(code)\n",
        "",
        CLAIMS,
        BREAKS,
    ),
    mutant(
        "graphs-of-other-models-go-too",
        RECOMPILES,
        "_left - set().union(*_claims)",
        "set(_left)",
        CLAIMS,
    ),
    mutant(
        "graphs-go-while-garbage-is-collected",
        RECOMPILES,
        "    return codes\n",
        "    for code in codes:\n        reset_code(code)\n    return codes\n",
        CLAIMS,
    ),
    mutant(
        "code-that-dynamo-gave-up-stays-so",
        RECOMPILES,
        "            set_code_exec_strategy(code, makes_graphs)\n",
        "            pass\n",
        CLAIMS,
        BREAKS,
    ),
    mutant(
        "code-that-is-to-be-skipped-is-compiled",
        RECOMPILES,
        "if num_graphs >= _before[LIMIT]:",
        "if True:",
        CLAIMS,
    ),
    mutant(
        "the-first-code-of-a-call-is-not-claimed",
        "runtime/attachment.py",
        "            self._claim.add(code)\n",
        "            pass\n",
        BREAKS,
    ),
    mutant(
        "code-behind-a-graph-break-is-not-claimed",
        "capture/tracing.py",
        "            self._take_code(code)\n",
        "            pass\n",
        TRACING,
    ),
    mutant(
        "a-hook-in-dynamo-stays",
        "capture/tracing.py",
        "self._settings.callback(register_bytecode_hook(self._take).remove)",
        "register_bytecode_hook(self._take)",
        TRACING,
    ),
    mutant(
        "code-of-other-threads-is-claimed",
        "capture/tracing.py",
        "    def _take(self, code: CodeType, new_code: CodeType) -> None:\n"
        "        if get_ident() == self._thread:",
        "    def _take(self, code: CodeType, new_code: CodeType) -> None:\n        if True:",
        TRACING,
    ),
)
