"""Faults of several ranks: their setups, their passes, their collectives."""

from __future__ import annotations

from tests.mutations.mutant import mutant

SEAM = "unit/integrations/test_seam.py"
RANKS = "unit/runtime/test_ranks.py"
SHARDS = "unit/capture/test_shards.py"
CLI_PLAN = "integration/cli/test_plan.py"

OF_RANKS = (
    mutant(
        "ranks-run-different-passes",
        "runtime/ranks.py",
        "if all(row == [READY, number] for row in rows):",
        "if True:",
        RANKS,
    ),
    mutant(
        "a-failed-rank-keeps-its-connections",
        "runtime/ranks.py",
        "        self._channel.leave()",
        "        self._channel",
        RANKS,
    ),
    mutant(
        "no-room-on-one-rank-is-an-error-on-the-others",
        "runtime/ranks.py",
        "has_room = all(row[0] != NO_ROOM for row in rows)",
        "has_room = True",
        RANKS,
    ),
    mutant(
        "one-rank-alone-measures-a-collective",
        "execution/measure.py",
        "if is_collective(task):",
        "if False:",
        "unit/execution/test_collectives.py",
    ),
    mutant(
        "a-collective-goes-on-after-its-task",
        "capture/recorder.py",
        "if func.namespace in NAMESPACES:",
        "if False:",
        "unit/capture/test_collectives.py",
    ),
    mutant(
        "collectives-inside-autograd-functions-are-forgotten",
        "capture/collectives.py",
        "(m for m in module.modules() if isinstance(m, GraphModule))",
        "[module]",
        "unit/capture/test_collectives.py",
    ),
    mutant(
        "setups-of-other-ranks-are-not-awaited",
        "integrations/deepspeed/seam.py",
        "setup.wants_others = True",
        "setup.wants_others = False",
        SEAM,
    ),
    mutant(
        "a-part-of-the-ranks-may-share-a-model",
        "integrations/deepspeed/seam.py",
        "num_ranks > 1 and size != num_ranks",
        "num_ranks > 1 and size == 1",
        SEAM,
    ),
    mutant(
        "a-refused-setup-is-kept-from-the-others",
        "integrations/deepspeed/ranks.py",
        "ranks.post({FAILED: str(error)})",
        "ranks",
        "unit/integrations/test_ranks.py",
    ),
    mutant(
        "ranks-of-a-forecast-do-not-sum",
        "capture/shards.py",
        "layer.register_forward_hook(partial(_sum_over_ranks, num_ranks))",
        "layer",
        SHARDS,
    ),
    mutant(
        "the-bias-of-a-sum-is-forgotten",
        "capture/shards.py",
        "return result if bias is None else result + bias",
        "return result",
        SHARDS,
    ),
    mutant(
        "attention-of-a-shard-keeps-all-heads",
        "capture/shards.py",
        "if hasattr(attention, NUM_HEADS):",
        "if False:",
        SHARDS,
    ),
    mutant(
        "tied-weights-are-cut",
        "capture/shards.py",
        "or uses[id(module.weight)] > 1",
        "",
        SHARDS,
    ),
    mutant(
        "kv-heads-need-not-be-divided",
        "capture/shards.py",
        'for kind, number in (("attention heads", heads), ("KV heads", kv_heads)):',
        'for kind, number in (("attention heads", heads),):',
        SHARDS,
    ),
    mutant(
        "a-forecast-is-of-the-whole-model",
        "whatif.py",
        "prepare=cutting(num_ranks, None if form is None else partial(pack, form=form))",
        "prepare=None if form is None else partial(pack, form=form)",
        CLI_PLAN,
    ),
    mutant(
        "plan-forgets-its-ranks",
        "cli/plan.py",
        "num_ranks=arguments.ranks",
        "num_ranks=1",
        CLI_PLAN,
    ),
    mutant(
        "curve-forgets-its-ranks",
        "cli/curve.py",
        "num_ranks=arguments.ranks",
        "num_ranks=1",
        "integration/cli/test_curve.py",
    ),
    mutant(
        "a-rank-that-has-left-waits-for-numbers",
        "runtime/ranks.py",
        "        if self._left is not None:\n"
        '            raise RankError(f"{self._left} Start all ranks again.")\n'
        "        return self._channel.gather(numbers)",
        "        return self._channel.gather(numbers)",
        RANKS,
    ),
    mutant(
        "the-table-over-ranks-has-one-rank",
        "runtime/handle.py",
        "for numbers in found]",
        "for numbers in found[:1]]",
        "unit/runtime/test_handle_ranks.py",
    ),
    mutant(
        "each-rank-measures-the-link-with-its-own-bytes",
        "runtime/ranks.py",
        "min(LINK_BYTES, common_bytes)",
        "min(LINK_BYTES, scratch_bytes)",
        RANKS,
    ),
    mutant(
        "ranks-may-have-other-versions-of-this-package",
        "integrations/deepspeed/ranks.py",
        'PACKAGES = ("torch", "transformers", "deepspeed", "ds_finepage")',
        'PACKAGES = ("torch", "transformers", "deepspeed")',
        "unit/integrations/test_ranks.py",
    ),
    mutant(
        "grid-forgets-its-ranks",
        "cli/grid.py",
        "num_ranks=cell.num_ranks",
        "num_ranks=1",
        "integration/cli/test_grid.py",
    ),
    mutant(
        "the-first-rank-has-its-own-logits-alone",
        "capture/shards.py",
        "layer.register_forward_hook(partial(_gather_from_ranks, widths))",
        "widths",
        SHARDS,
    ),
    mutant(
        "a-shard-is-not-packed",
        "capture/shards.py",
        "if then is not None:",
        "if False:",
        SHARDS,
    ),
    mutant(
        "a-plan-hides-what-ranks-send",
        "whatif.py",
        "        sent_bytes=of_one_pass(sent_bytes(memgraph.graph)),\n",
        "",
        CLI_PLAN,
    ),
    mutant(
        "a-missing-link-between-ranks-is-not-named",
        "cli/plan.py",
        "    options.note_link(arguments.ranks, profile)\n",
        "",
        CLI_PLAN,
    ),
)
