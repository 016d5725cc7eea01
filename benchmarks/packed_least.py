"""Finds the least budget of a decode step where weights are packed, and what decides it.

    python benchmarks/packed_least.py --out benchmarks/packed_least_2026-11-23

Writes a .json and a .md. The least budget is that of the better place of the KV cache, on the
device or in host memory, as a run chooses it. For LLaMA-7B a plan is made and checked under each.
Nothing is run. A form whose cases are in the .json already is left out. Exit status 1 if a figure
misses its target.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planned_page import command_of, keep, options_of, table, versions_used

from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.whatif import CapturedModel, capture_model, forms_of, plan_captured, that_fits

MODELS = ("llama-7b", "llama-65b")
HARDWARE = "v100-16gb"
SEQS = (512, 2048)
FORMS = ("bf16", "int8", "int4", "int4+output", "int4 fused")
PLANNED = ("llama-7b",)
"""Models for which plans are made under their least budgets; those of others take minutes."""

LARGE_BYTES = 1 << 50
MOST_SHARE = 0.5
"""Target of the least budget in int4 over that in bf16."""


@dataclass(frozen=True)
class Case:
    """The least budget of one form, and its parts in bytes.

    ``rows_bytes`` are those of the keys and values that attention needs together, and
    ``weight_bytes`` the most that a task of the plan uses of the weights. ``scratch_bytes`` are
    reserved to unpack. Without a plan some are None.
    """

    model: str
    seq: int
    form: str
    split: bool
    kv_on_host: bool
    budget_bytes: int
    kv_bytes: int
    scratch_bytes: int
    other_bytes: int
    arena_bytes: int
    weight_bytes: int | None = None
    rows_bytes: int | None = None
    reloaded_bytes: int | None = None
    bound_bytes: int | None = None


def most_together(graph: TaskGraph, *, of_calls: bool) -> int:
    """Return the most bytes that a task uses: of the weights, or of what each call brings."""
    is_of = {
        b.id: (b.gather is not None or b.name.endswith("on the device")) is of_calls
        for b in graph.buffers
        if b.kind is BufferKind.WEIGHT
    }
    return max(sum(graph.buffers[b].nbytes for b in t.buffers if is_of.get(b)) for t in graph.tasks)


def least_of(captured: CapturedModel, form: str, *, split: bool) -> Case:
    """Find the least budget."""
    profile = load_profile(HARDWARE)
    ample = plan_captured(captured, budget_bytes=LARGE_BYTES, profile=profile, split=split)
    budget = ample.figures.min_budget_bytes
    chosen, _ = that_fits(forms_of(captured, policy="finepage", split=split), budget)
    arena = budget - chosen.needs.non_arena_bytes
    kv_bytes = sum(b.nbytes for b in chosen.graph.buffers if b.kind is BufferKind.STATE)
    scratch_bytes = chosen.graph.workspace_bytes
    return Case(
        model=captured.model,
        seq=captured.seq,
        form=form,
        split=split,
        kv_on_host=chosen.kv_on_host,
        budget_bytes=budget,
        kv_bytes=kv_bytes,
        scratch_bytes=scratch_bytes,
        other_bytes=budget - arena - kv_bytes - scratch_bytes,
        arena_bytes=arena,
    )


def planned(captured: CapturedModel, case: Case) -> Case:
    """Plan a case under its least budget."""
    profile, budget = load_profile(HARDWARE), case.budget_bytes
    found = plan_captured(captured, budget_bytes=budget, profile=profile, split=case.split)
    assert found.figures.peak_bytes <= budget
    return replace(
        case,
        weight_bytes=most_together(found.memgraph.graph, of_calls=False),
        rows_bytes=most_together(found.memgraph.graph, of_calls=True),
        reloaded_bytes=found.figures.reloaded_bytes,
        bound_bytes=found.figures.lower_bound_bytes,
    )


def cases_of(model: str, seq: int, form: str) -> Iterable[Case]:
    """Yield the cases of a form: without ``split``, and with it."""
    name, _, is_fused = form.partition(" ")
    captured = capture_model(
        model,
        phase="decode",
        batch=1,
        seq=seq,
        profile=load_profile(HARDWARE),
        weights=name,
        fused_unpacking=bool(is_fused),
    )
    for split in (False, True):
        case = least_of(captured, form, split=split)
        yield planned(captured, case) if model in PLANNED else case


def share(case: Case, cases: Sequence[Case]) -> float:
    """Return a least budget over that in bf16."""
    key = (case.model, case.seq, "bf16", case.split)
    plain = next(c for c in cases if (c.model, c.seq, c.form, c.split) == key)
    return case.budget_bytes / plain.budget_bytes


def how(case: Case) -> str:
    """Say whether products may be cut anywhere."""
    return "split" if case.split else "default"


def summary(cases: Sequence[Case]) -> list[dict[str, float | str | bool]]:
    """Hold the shares of int4 against their target."""
    found: list[dict[str, float | str | bool]] = []
    for case in cases:
        if case.form == "int4":
            what = f"least budget, int4 over bf16, {case.model}, {case.seq:,} tokens, {how(case)}"
            ratio = share(case, cases)
            found.append({"what": what, "found": ratio, "target": f"<= {MOST_SHARE}"})
            found[-1]["holds"] = ratio <= MOST_SHARE
    return sorted(found, key=lambda each: not each["holds"])


COLUMNS = (
    *("model", "tokens", "form", "", "KV cache", "least MB", "over bf16's"),
    *("arena", "weights of a task", "rows of a task", "cache", "to unpack", "other"),
    "bytes / bound",
)


def rows(cases: Sequence[Case]) -> Iterable[list[str]]:
    """Yield a row for each least budget."""
    for case in cases:
        parts = (case.arena_bytes, case.weight_bytes, case.rows_bytes)
        over = (case.reloaded_bytes or 0) / (case.bound_bytes or 1)
        others = (case.kv_bytes, case.scratch_bytes, case.other_bytes)
        yield [
            *(case.model, f"{case.seq:,}", case.form, how(case)),
            "host" if case.kv_on_host else "device",
            f"{case.budget_bytes / 1e6:.1f}",
            f"{share(case, cases):.3f}",
            *("-" if n is None else f"{n / 1e6:.1f}" for n in (*parts, *others)),
            f"{over:.3f}" if over else "-",
        ]


def page(cases: Sequence[Case], date: str, command: str) -> str:
    """Return the page with all tables."""
    versions = ", ".join(f"{name} {number}" for name, number in versions_used().items())
    holds = {True: "yes", False: "**no**"}
    held = [
        [str(s["what"]), f"{s['found']:.3f}", str(s["target"]), holds[bool(s["holds"])]]
        for s in summary(cases)
    ]
    return "\n".join(
        [
            f"# The least budget of a decode step where weights are packed, {date}",
            "",
            f"    {command}",
            "",
            "Decode steps of policy `finepage`, batch 1, for a V100 with 16 GB. The KV cache is "
            "where the budget is least: in host memory. Plans were made and checked under the "
            f"budgets of {', '.join(PLANNED)}; nothing was run. {versions}.",
            "",
            *table(["figure", "found", "target", "holds"], held),
            "",
            "By default no weight is cut where a bit may change. In bf16 the output layer then "
            "decides, because its whole weight has to be on the device. Products beside packed "
            "weights are made in slices that begin at fixed rows, so a cut between two of them "
            "changes no bit.",
            "",
            "With `split` bf16 is cut too, into slices of 64 rows. What is left of it are mostly "
            "keys and values of one layer. Attention needs them together, they are not packed, "
            "and they alone are more than half. To them int4 adds the workspace of an accelerator "
            "to unpack, which is reserved throughout; fused products have none. So half of bf16 "
            "is out of reach there.",
            "",
            "## The parts",
            "",
            "All in MB. The arena holds what a task uses: of the weights, of the rows of the "
            "cache, and activations. Beside it are a cache on the device, workspace to unpack, and "
            "other bytes outside the arena. The last column shows reloaded bytes over their "
            "bound under just this budget. Rows that come twice are those of the keys, if the "
            "arena has no room to hold them while the values come.",
            "",
            *table(COLUMNS, rows(cases)),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    """Find all least budgets; write and print them."""
    options = options_of(arguments, __doc__, MODELS)
    kept = options.out.with_suffix(".json")
    cases: list[Case] = []
    if kept.exists():
        cases = [Case(**each) for each in json.loads(kept.read_text())["cases"]]
    done = {(case.model, case.seq, case.form) for case in cases}
    for model in options.models.split(","):
        for seq in SEQS:
            for form in FORMS:
                if (model, seq, form) not in done:
                    cases += cases_of(model, seq, form)
                print(f"\r{len(cases)} cases", end="", file=sys.stderr, flush=True)
    command = command_of("packed_least.py", arguments)
    text = page(cases, options.out.name[-10:], command)
    return keep(options.out, command, text, summary(cases), cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
