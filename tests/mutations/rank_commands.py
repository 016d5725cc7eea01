"""Faults of commands that start several ranks: the demo and the comparison."""

from __future__ import annotations

from tests.mutations.mutant import mutant

PROCESSES = "unit/compare/test_processes.py"
ON_RANKS = "unit/compare/test_on_ranks.py"
COMPARE = "integration/cli/test_compare.py"
INSTRUMENTS = "integration/cli/test_instruments.py"
CHILDREN = "unit/compare/test_children.py"
CLI = "integration/cli/test_cli.py"

OF_RANK_COMMANDS = (
    mutant(
        "ranks-go-on-after-one-has-failed",
        "compare/processes.py",
        "failed, until = rank, min(until, time.monotonic() + grace_s)",
        "failed = rank",
        f"{PROCESSES}::test_the_others_get_little_time_after_a_failure",
    ),
    mutant(
        "a-rank-outlives-its-command",
        "compare/children.py",
        "            kill(process)\n            self._running.remove(process)",
        "            self._running.remove(process)",
        f"{PROCESSES}::test_no_rank_outlives_an_interrupt",
    ),
    mutant(
        "a-process-outlives-a-killed-command",
        "compare/leash.py",
        "        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)\n",
        "",
        f"{CHILDREN}::test_a_killed_command_leaves_no_process",
    ),
    mutant(
        "an-interrupt-while-a-process-starts-leaves-it",
        "compare/children.py",
        "release = hold_interrupts()",
        "release = bool",
        f"{CHILDREN}::test_an_interrupt_while_a_process_starts_ends_it",
    ),
    mutant(
        "an-error-while-a-process-starts-keeps-handlers",
        "compare/children.py",
        "        except BaseException:\n            release()\n",
        "        except BaseException:\n",
        f"{CHILDREN}::test_an_error_while_a_process_starts_gives_handlers_back",
    ),
    mutant(
        "a-process-starts-without-its-parent",
        "compare/leash.py",
        "if os.getppid() != int(parent):",
        "if False:",
        f"{CHILDREN}::test_a_process_whose_parent_is_gone_does_not_start",
    ),
    mutant(
        "a-process-starts-after-the-end",
        "compare/children.py",
        "            if self._is_over:",
        "            if False:",
        f"{CHILDREN}::test_none_starts_after_the_end",
    ),
    mutant(
        "a-process-does-not-end-with-the-others",
        "compare/processes.py",
        "    children = children or Children()\n    with (",
        "    children = Children()\n    with (",
        f"{CHILDREN}::test_none_starts_after_the_end",
    ),
    mutant(
        "ranks-do-not-end-with-the-demo",
        "cli/demo.py",
        "run_ranks(commands, logs, self._environment, children=self._children)",
        "run_ranks(commands, logs, self._environment)",
        f"{INSTRUMENTS}::test_all_processes_of_a_demo_end_with_it",
    ),
    mutant(
        "an-interrupted-demo-waits-for-its-runs",
        "cli/demo.py",
        "                self._children.end()",
        "                pass",
        f"{INSTRUMENTS}::test_an_interrupt_ends_the_runs_that_other_threads_wait_for",
    ),
    mutant(
        "sigterm-leaves-processes",
        "cli/__init__.py",
        "    signal.signal(signal.SIGTERM, terminate)",
        "    signal.getsignal(signal.SIGTERM)",
        f"{CLI}::test_sigterm_ends_a_command_as_an_interrupt_does",
    ),
    mutant(
        "a-command-in-a-thread-handles-signals",
        "cli/__init__.py",
        "if not is_main or signal",
        "if signal",
        f"{CLI}::test_a_command_runs_in_a_thread_too",
    ),
    mutant(
        "a-handler-of-sigterm-is-lost",
        "cli/__init__.py",
        " or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:",
        ":",
        f"{CLI}::test_sigterm_ends_a_command_as_an_interrupt_does",
    ),
    mutant(
        "every-rank-is-rank-0",
        "compare/processes.py",
        '"RANK": str(rank), "LOCAL_RANK"',
        '"RANK": "0", "LOCAL_RANK"',
        PROCESSES,
    ),
    mutant(
        "rank-0-opens-the-store-that-is-open",
        "compare/processes.py",
        '"TORCHELASTIC_USE_AGENT_STORE": "True"',
        '"TORCHELASTIC_USE_AGENT_STORE": "False"',
        PROCESSES,
    ),
    mutant(
        "more-ranks-than-devices",
        "compare/processes.py",
        "if device is not None and torch.accelerator.device_count() < num_ranks:",
        "if False:",
        PROCESSES,
    ),
    mutant(
        "ranks-build-an-op-that-they-are-not-to-use",
        "integrations/deepspeed/one_process.py",
        " or GLOO_ALONE in os.environ",
        "",
        "unit/test_run.py",
    ),
    mutant(
        "host-partitions-of-a-rank-are-device-bytes",
        "integrations/deepspeed/one_process.py",
        'return device_type == "cpu" and',
        "return False and",
        INSTRUMENTS,
    ),
    mutant(
        "a-demo-starts-with-any-number-of-ranks",
        "cli/demo.py",
        "    require_ranks(num_ranks)\n",
        "",
        INSTRUMENTS,
    ),
    mutant(
        "a-demo-cuts-heads-in-two",
        "cli/demo.py",
        """    require_heads(config_of(shape), num_ranks, "the demo's Llama")\n""",
        "",
        INSTRUMENTS,
    ),
    mutant(
        "only-rank-0-of-a-demo-is-judged",
        "cli/demo_results.py",
        "for rank, result in enumerate(results)\n        for problem",
        "for rank, result in enumerate(results[:1])\n        for problem",
        INSTRUMENTS,
    ),
    mutant(
        "plain-transformers-runs-on-every-rank",
        "compare/orchestrate.py",
        "return 1 if arm.name == PLAIN else settings.num_ranks",
        "return settings.num_ranks",
        ON_RANKS,
    ),
    mutant(
        "an-arm-of-one-rank-is-started",
        "compare/orchestrate.py",
        "if arm.why_one_rank and self._settings.num_ranks > 1:",
        "if False:",
        ON_RANKS,
    ),
    mutant(
        "a-comparison-on-ranks-models-the-whole-model",
        "compare/orchestrate.py",
        "                num_ranks=settings.num_ranks,\n",
        "                num_ranks=1,\n",
        ON_RANKS,
    ),
    mutant(
        "a-comparison-knows-rank-0-alone",
        "compare/orchestrate.py",
        "over_ranks([self._judged(*each) for each in zip(runs, folders, strict=True)])",
        "over_ranks([self._judged(runs[0], folders[0])] * len(runs))",
        ON_RANKS,
    ),
    mutant(
        "other-tokens-of-one-rank-are-forgotten",
        "reporting/results.py",
        "tokens_equal=all(rank.tokens_equal for rank in ranks)",
        "tokens_equal=any(rank.tokens_equal for rank in ranks)",
        ON_RANKS,
    ),
    mutant(
        "a-trace-shows-rank-0-alone",
        "cli/trace.py",
        "for name in run.folder_names)",
        "for name in run.folder_names[:1])",
        ON_RANKS,
    ),
    mutant(
        "a-rank-that-failed-ends-well",
        "compare/worker.py",
        "        sys.exit(1)  # the other ranks wait for this one",
        "        pass",
        f"{COMPARE}::test_a_rank_that_fails_ends_with_a_status",
    ),
    mutant(
        "the-meter-of-a-worker-counts-host-partitions",
        "compare/worker.py",
        "            if not is_late:\n",
        "            if True:\n",
        f"{COMPARE}::test_partitions_of_several_ranks_are_no_device_bytes_on_the_cpu",
    ),
    mutant(
        "stock-is-partitioned-before-it-is-cut",
        "compare/zero_arms.py",
        'if int(ds_config.get(TENSOR_PARALLEL, {}).get("autotp_size", 1)) > 1:',
        "if False:",
        f"{COMPARE}::test_stock_is_partitioned_after_it_is_cut",
    ),
    mutant(
        "a-comparison-starts-with-any-number-of-ranks",
        "cli/compare.py",
        "    require_ranks(arguments.ranks)\n",
        "",
        ON_RANKS,
    ),
    mutant(
        "ranks-compute-in-bfloat16-by-default",
        "cli/compare.py",
        '        changes["bf16"] = {"enabled": False}',
        "        pass",
        ON_RANKS,
    ),
)
