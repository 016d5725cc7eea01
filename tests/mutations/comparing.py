"""Faults of the comparison: counting, timing, processes, judging."""

from __future__ import annotations

from tests.mutations.mutant import mutant

ENGINES = "integration/cli/test_compare.py"
JUDGE = "unit/compare/test_judge.py"
OPTIONS = "unit/compare/test_cli_compare.py"
ORCHESTRATE = "unit/compare/test_orchestrate.py"
STOPWATCH = "unit/compare/test_stopwatch.py"
TABLES = "unit/compare/test_tables.py"

COMPARING = (
    mutant(
        "the-fetches-of-an-engine-are-counted-for-good",
        "compare/zero_arms.py",
        "            undo()",
        "            pass",
        f"{ENGINES}::test_the_fetches_of_later_engines_are_not_counted_any_more",
    ),
    mutant(
        "an-arm-of-stock-ignores-its-settings",
        "compare/zero_arms.py",
        "{**request.ds_config[ZERO], **request.settings}",
        "{**request.ds_config[ZERO]}",
        f"{ENGINES}::test_stock_copies_what_is_simulated",
    ),
    mutant(
        "a-run-without-plans-has-figures",
        "compare/finepage_arms.py",
        "if stats.unplanned_reasons:",
        "if False:",
        f"{ENGINES}::test_an_engine_that_runs_something_without_a_plan_is_refused",
    ),
    mutant(
        "weights-that-stay-count-for-nothing",
        "compare/plain_arm.py",
        "weight.data = weight.data.clone()",
        "pass",
        f"{ENGINES}::test_plain_counts_every_weight",
    ),
    mutant(
        "other-modules-of-the-class-are-timed",
        "compare/stopwatch.py",
        "if called is not model:",
        "if False:",
        STOPWATCH,
    ),
    mutant(
        "the-watch-stays-on",
        "compare/stopwatch.py",
        "                del owner.__call__",
        "                pass",
        STOPWATCH,
    ),
    mutant(
        "an-interrupted-process-runs-on",
        "compare/children.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "process.kill()",
        f"{ORCHESTRATE}::test_an_interrupt_kills_the_process_and_what_it_has_started",
    ),
    mutant(
        "a-finished-run-is-not-in-the-file",
        "compare/orchestrate.py",
        "        save_results(results, self._folder)\n",
        "",
        ORCHESTRATE,
    ),
    mutant(
        "finished-runs-run-again",
        "compare/orchestrate.py",
        "finished = {run.name for run in self.results.runs}",
        "finished: set[str] = set()",
        ORCHESTRATE,
    ),
    mutant(
        "only-the-first-call-has-to-have-the-tokens",
        "compare/orchestrate.py",
        "all(t == expected[0] for t in tokens)",
        "tokens[0] == expected[0]",
        ORCHESTRATE,
    ),
    mutant(
        "the-second-arm-is-the-reference",
        "compare/orchestrate.py",
        "reference = next((r for r in ran if r.arm == PLAIN), ran[0] if ran else run)",
        "reference = ran[-1] if ran else run",
        ORCHESTRATE,
    ),
    mutant(
        "a-budget-below-every-arm-is-tried",
        "compare/models.py",
        "if not limited or any(found.refusal is None for _, found in limited):",
        "if True:",
        ORCHESTRATE,
    ),
    mutant(
        "plans-of-earlier-runs-are-used",
        "compare/processes.py",
        'CACHE_VARIABLE: "0"',
        'CACHE_VARIABLE: ""',
        f"{ORCHESTRATE}::test_the_output_of_a_process_is_in_its_log",
    ),
    mutant(
        "an-arm-above-the-budget-wins",
        "compare/judge.py",
        "if run.batch == batch and holds_budget(run)]",
        "if run.batch == batch and run.reason is None]",
        JUDGE,
    ),
    mutant(
        "only-we-can-win",
        "compare/judge.py",
        "timed.sort(key=lambda each: each[0])",
        "timed.sort(key=lambda each: each[1].arm != OURS)",
        JUDGE,
    ),
    mutant(
        "a-peak-of-ours-above-the-budget-is-no-problem-of-a-comparison",
        "compare/judge.py",
        "if run.reason is None and by_plan and not holds_budget(run):",
        "if False:",
        JUDGE,
    ),
    mutant(
        "wall-times-of-the-cpu-decide",
        "compare/judge.py",
        "return results.device == CPU",
        "return False",
        JUDGE,
    ),
    mutant(
        "the-first-token-needs-no-planning",
        "compare/tables.py",
        "(run.capture_ns or 0) + (run.plan_ns or 0)",
        "(run.capture_ns or 0)",
        TABLES,
    ),
    mutant(
        "a-comparison-goes-on-under-other-settings",
        "cli/compare.py",
        "    if differences:\n",
        "    if False:\n",
        OPTIONS,
    ),
    mutant(
        "results-are-overwritten",
        "cli/compare.py",
        "    if not resume:\n",
        "    if False:\n",
        OPTIONS,
    ),
    mutant(
        "an-arm-that-failed-is-finished",
        "cli/compare.py",
        "if r.reason is None or r.out_of_memory)",
        "if True)",
        OPTIONS,
    ),
    mutant(
        "a-tokenizer-of-another-model-fits",
        "compare/prompts.py",
        "if len(found) > vocab_size:",
        "if False:",
        "unit/compare/test_prompts.py",
    ),
    mutant(
        "the-allocator-is-not-limited",
        "execution/device.py",
        "limit(min(1.0, share), self.where.index or 0)",
        "limit(1.0, self.where.index or 0)",
        "unit/execution/test_device.py",
    ),
    mutant(
        "planning-takes-no-time",
        "runtime/plan_cache.py",
        "counters.plan_ns += time.perf_counter_ns() - start",
        "pass",
        "unit/runtime/test_plan_cache.py",
    ),
    mutant(
        "a-model-that-cannot-be-captured-ends-the-comparison",
        "compare/models.py",
        "        except CaptureError as error:\n            self.why_not",
        "        except KeyError as error:\n            self.why_not",
        ORCHESTRATE,
    ),
    mutant(
        "a-fault-of-one-policy-ends-the-comparison",
        "compare/models.py",
        "except Exception as error:  # a fault of one policy must not end the other arms",
        "except KeyError as error:",
        ORCHESTRATE,
    ),
    mutant(
        "a-fault-of-one-process-ends-the-comparison",
        "compare/orchestrate.py",
        "        except Exception as error:\n            _log.warning(",
        "        except KeyError as error:\n            _log.warning(",
        ORCHESTRATE,
    ),
    mutant(
        "why-nothing-is-modelled-is-not-said",
        "compare/orchestrate.py",
        "        notes = (*notes, modelled.why_not)\n",
        "        pass\n",
        ORCHESTRATE,
    ),
    mutant(
        "stock-runs-with-the-users-own-settings-if-nothing-is-modelled",
        "compare/models.py",
        "Modelled(settings=ZeroSettings().keys, why",
        "Modelled(settings={}, why",
        ORCHESTRATE,
    ),
    mutant(
        "a-device-map-is-taken-by-its-weights-alone",
        "compare/accelerate_arm.py",
        "num_modules, tries = modules_within(model, request.budget_bytes), True",
        "num_modules = modules_within(model, request.budget_bytes)",
        "integration/test_other_engines.py",
    ),
)
