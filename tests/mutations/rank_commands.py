"""Faults of commands that start several ranks: the demo and the comparison."""

from __future__ import annotations

from tests.mutations.mutant import mutant

PROCESSES = "unit/compare/test_processes.py"
ON_RANKS = "unit/compare/test_on_ranks.py"
COMPARE = "integration/cli/test_compare.py"
INSTRUMENTS = "integration/cli/test_instruments.py"

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
        "compare/processes.py",
        "            stack.callback(kill, process)",
        "            stack.callback(id, process)",
        f"{PROCESSES}::test_no_rank_outlives_an_interrupt",
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
