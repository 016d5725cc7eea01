"""Faults in the traces that are kept for other processes."""

from __future__ import annotations

from tests.mutations.mutant import mutant

KEPT = "integration/test_kept_traces.py"
TAKEN = "unit/capture/test_traces.py"
TASKGRAPHS = "unit/runtime/test_kept_taskgraphs.py"
TRACES, SERVING = "capture/traces.py", "runtime/kept_traces.py"
RECORDED = "runtime/kept_taskgraphs.py"

OF_KEPT_TRACES = (
    mutant(
        "a-kept-trace-serves-other-values",
        TRACES,
        "if not all(now == before for now, before in zip(found, seen, strict=True)):",
        "if len([*found]) != len(seen):",
        KEPT,
    ),
    mutant(
        "a-kept-trace-serves-calls-of-other-sizes",
        TRACES,
        "return manager if manager.check(locals_) else None",
        "return manager",
        KEPT,
    ),
    mutant(
        "a-kept-trace-serves-any-source",
        SERVING,
        "isinstance(trace, Trace) and trace.is_of_these_files()",
        "isinstance(trace, Trace)",
        KEPT,
    ),
    mutant(
        "a-trace-with-a-graph-break-is-kept",
        TRACES,
        '            self._draft.refusal = "Dynamo does not keep it"',
        "            pass",
        TAKEN,
    ),
    mutant(
        "torch-dumps-its-guards-in-our-way",
        TRACES,
        "            CheckFunctionManager.serialize_guards = theirs",
        "            pass",
        TAKEN,
    ),
    mutant(
        "names-of-dynamo-collide",
        TRACES,
        'while int(unique_id("").rpartition("_")[2]) < int(number[1]):',
        "while False:",
        TAKEN,
    ),
    mutant(
        "a-taken-name-is-taken-over",
        TRACES,
        "    if any(globals_.get(name, value) is not value for name, value in values.items()):\n"
        "        return False\n",
        "",
        TAKEN,
    ),
    mutant(
        "a-kept-trace-serves-calls-of-other-models",
        SERVING,
        "return found is not None and found.running.thread == get_ident()",
        "return True",
        KEPT,
    ),
    mutant(
        "two-models-share-a-graph",
        SERVING,
        "with_names(code, {trace.backend: backend})",
        "code",
        KEPT,
    ),
    mutant(
        "kept-traces-stay-in-the-code",
        SERVING,
        "    _reset_precompile_entries(code)\n",
        "",
        KEPT,
    ),
    mutant(
        "the-traces-of-other-models-go-too",
        SERVING,
        "    for other in others:\n        other.install(code)\n",
        "",
        KEPT,
    ),
    mutant(
        "graphs-of-kept-traces-stay-in-the-module",
        SERVING,
        "    function.__globals__.pop(served.backend, None)\n",
        "",
        KEPT,
    ),
    mutant(
        "the-traces-of-a-forgotten-model-stay",
        SERVING,
        "        weakref.finalize(self.calls, _take_out, self.function, served).atexit = False\n",
        "",
        KEPT,
    ),
    mutant(
        "a-detached-model-is-served",
        "runtime/attachment.py",
        "            kept.remove()",
        "            pass",
        KEPT,
    ),
    mutant(
        "files-of-others-are-read",
        "execution/disk_cache.py",
        "found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "False",
        KEPT,
    ),
    mutant(
        "others-can-read-traces", "execution/disk_cache.py", "    path.chmod(0o600)\n", "", KEPT
    ),
    mutant(
        "all-traces-are-kept",
        SERVING,
        "            old.unlink(missing_ok=True)",
        "            pass",
        KEPT,
    ),
    mutant(
        "a-trace-waits-for-ever",
        SERVING,
        "            waiting.num_tries += 1",
        "            pass",
        KEPT,
    ),
    mutant(
        "kept-traces-are-looked-for-for-ever",
        SERVING,
        "if self._num_calls > MAX_CALLS:",
        "if False:",
        KEPT,
    ),
    mutant("the-collector-runs-meanwhile", SERVING, "with collector_off():", "if True:", KEPT),
    mutant(
        "all-weights-have-one-folder",
        SERVING,
        "digest_of(function.__code__), weights)",
        "digest_of(function.__code__))",
        KEPT,
    ),
    mutant(
        "a-kept-graph-has-no-code",
        "capture/kept_graph.py",
        "    module.recompile()\n",
        "",
        "unit/capture/test_kept_graph.py",
    ),
    mutant(
        "methods-do-not-count",
        "capture/identities.py",
        '                found.update(f"{name} {_place_of(function.__code__)}\\0".encode())',
        "                pass",
        "unit/capture/test_identities.py",
    ),
    mutant(
        "a-kept-trace-is-recorded-again",
        SERVING,
        "self._backend = _keeping_taskgraphs(backend, self.folder)",
        "self._backend = backend",
        KEPT,
    ),
    mutant(
        "a-new-trace-has-no-taskgraphs",
        "capture/kept_graph.py",
        "    module.meta[DIGEST] = _digest_of(found)\n",
        "",
        KEPT,
    ),
    mutant(
        "calls-of-other-sizes-share-a-taskgraph",
        RECORDED,
        "tuple(arg.shape), arg.stride()",
        "arg.stride()",
        TASKGRAPHS,
    ),
    mutant(
        "calls-of-other-weights-share-a-taskgraph",
        RECORDED,
        "return weight, kind,",
        "return kind,",
        TASKGRAPHS,
    ),
    mutant(
        "other-settings-share-a-taskgraph",
        RECORDED,
        'found = described, _state_of_torch({"cpu", *kinds})',
        "found = described",
        TASKGRAPHS,
    ),
    mutant(
        "other-kernels-of-attention-share-a-taskgraph",
        "capture/unguarded.py",
        "        backends.cuda.flash_sdp_enabled(),\n",
        "",
        TASKGRAPHS,
    ),
    mutant(
        "other-graphs-share-a-taskgraph",
        RECORDED,
        'f"{start.name}-{_digest_of_call(graph, args)}.json"',
        'f"{_digest_of_call(graph, args)}.json"',
        TASKGRAPHS,
    ),
    mutant(
        "numbers-do-not-tell-taskgraphs-apart",
        RECORDED,
        " or position in graph.key_positions",
        "",
        TASKGRAPHS,
    ),
    mutant(
        "a-kept-taskgraph-has-another-name",
        RECORDED,
        "dataclasses.replace(kept, name=graph.name)",
        "kept",
        TASKGRAPHS,
    ),
    mutant(
        "arguments-in-one-block-have-a-kept-taskgraph",
        RECORDED,
        "if start is None or graph.sharing_of(args):",
        "if start is None:",
        TASKGRAPHS,
    ),
    mutant(
        "all-taskgraphs-are-kept",
        RECORDED,
        ") < MAX_TASKGRAPHS:",
        ") >= 0:",
        TASKGRAPHS,
    ),
    mutant(
        "ops-of-users-are-those-of-another-process",
        "capture/identities.py",
        ' and str(value).partition(".")[0] in OF_RELEASES',
        "",
        "unit/capture/test_identities.py",
    ),
    mutant(
        "casts-by-themselves-share-a-taskgraph",
        RECORDED,
        "[(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]",
        "None",
        TASKGRAPHS,
    ),
    mutant(
        "tensors-of-other-devices-share-a-taskgraph",
        RECORDED,
        "        torch.get_default_device(),\n",
        "",
        TASKGRAPHS,
    ),
)
