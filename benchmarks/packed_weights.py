"""Simulates what a budget buys where weights are packed: LLaMA-7B, 65B and Llama-2-70B.

    python benchmarks/packed_weights.py --out benchmarks/packed_weights_2026-11-23

Writes a .json and a .md with tables of decode steps, batch 1. One has budgets in shares of the
weights of each form, and holds bytes and time against their bounds. Others have equal budgets in
bytes, and compare the speeds, with fused products too. Nothing is run: passes are captured from
published dimensions, and times are predicted from the shipped hardware profiles. A form of a model
whose cases are in the .json already is not planned again. Exit status 1 if a figure misses its
target.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planned_page import command_of, keep, options_of, table, versions_used

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.units import format_bytes
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured

MODELS = ("llama-7b", "llama-65b", "llama-2-70b")
HARDWARE = ("v100-16gb", "t4")
FORMS = ("bf16", "int8", "int4")
FUSED = " fused"
"""Ends the name of a form whose products unpack in registers: ``finepage.fused_unpacking``."""

ALL_FORMS = (*FORMS, *(form + FUSED for form in FORMS[1:]))
PERCENTS = (10, 25, 50, 75, 90)
SEQ = 2048

MOST_BYTES = 1.03
"""Target of the reloaded bytes over their bound, in the packed forms."""

SPEED_UPS = {"int8": 1.9, "int4": 3.6}
TARGET_OF = ("llama-65b", "v100-16gb")
"""Target of the tokens a second over those of bf16 under an equal budget, and where it holds."""


@dataclass(frozen=True)
class Case:
    """A decode step of one form under one budget; the form may end in ``FUSED``.

    ``of`` says what ``percent`` is a share of: the weights of its own form, or those of bf16.
    Without a plan the figures are None.
    """

    model: str
    hardware: str
    form: str
    of: str
    percent: int
    budget_bytes: int
    weight_bytes: int
    reloaded_bytes: int | None = None
    bound_bytes: int | None = None
    predicted_ns: int | None = None
    bound_ns: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted speed."""
        return 1e9 / self.predicted_ns if self.predicted_ns else None


def planned(captured: CapturedModel, case: Case) -> Case:
    """Plan a case."""
    profile = load_profile(case.hardware)
    try:
        figures = plan_captured(captured, budget_bytes=case.budget_bytes, profile=profile).figures
    except PlanInfeasibleError:
        return case
    return replace(
        case,
        reloaded_bytes=figures.reloaded_bytes,
        bound_bytes=figures.lower_bound_bytes,
        predicted_ns=figures.predicted_ns,
        bound_ns=figures.lower_bound_ns,
    )


def cases_of(model: str, form: str, unpacked_bytes: int | None) -> Iterable[Case]:
    """Plan all cases of a form of a model; fused products under equal budgets alone.

    Args:
        model: The model.
        form: One of ``ALL_FORMS``.
        unpacked_bytes: Of the weights in bf16; None if this is that form.
    """
    captured = capture_model(
        model,
        phase="decode",
        batch=1,
        seq=SEQ,
        profile=load_profile(HARDWARE[0]),  # all of them have the same dtype
        weights=form.removesuffix(FUSED),
        fused_unpacking=form.endswith(FUSED),
    )
    weight_bytes = captured.graph.weight_bytes
    wholes = {"own weights": weight_bytes, "bf16 weights": unpacked_bytes or weight_bytes}
    if form.endswith(FUSED):
        del wholes["own weights"]
    for of, whole in wholes.items():
        for hardware in HARDWARE:
            for percent in PERCENTS:
                budget = whole * percent // 100
                yield planned(
                    captured, Case(model, hardware, form, of, percent, budget, weight_bytes)
                )


# The summary.


def over(found: int | None, bound: int | None) -> float:
    """Return a figure over its bound; 1 if there is nothing to do."""
    return found / bound if found and bound else 1.0


def equal_budgets(cases: Sequence[Case]) -> dict[tuple[str, str, int], dict[str, Case]]:
    """Return the cases of equal budgets: by model, card and share of bf16, then by form."""
    found: dict[tuple[str, str, int], dict[str, Case]] = {}
    for case in cases:
        if case.of == "bf16 weights":
            key = (case.model, case.hardware, case.percent)
            found.setdefault(key, {})[case.form] = case
    return found


def speed_up(by_form: dict[str, Case], form: str) -> float | None:
    """Return the speed of a form over that of bf16."""
    mine, other = by_form[form].tokens_per_s, by_form["bf16"].tokens_per_s
    return mine / other if mine and other else None


def summary(cases: Sequence[Case]) -> list[dict[str, float | str | bool]]:
    """Hold the worst figures against their targets."""
    found: list[dict[str, float | str | bool]] = []
    for form in SPEED_UPS:
        ratios = [over(c.reloaded_bytes, c.bound_bytes) for c in cases if c.form == form]
        if ratios:
            what = f"bytes / bound, {form}, worst"
            found.append({"what": what, "found": max(ratios), "target": f"<= {MOST_BYTES}"})
            found[-1]["holds"] = max(ratios) <= MOST_BYTES
    for form, least in SPEED_UPS.items():
        capacity_bytes = load_profile(TARGET_OF[1]).capacity_bytes
        ups = [
            (by_form[form].budget_bytes <= capacity_bytes, up)
            for (model, hardware, _), by_form in equal_budgets(cases).items()
            if (model, hardware) == TARGET_OF and (up := speed_up(by_form, form))
        ]
        what = f"tokens/s over bf16, {form}, {' on '.join(TARGET_OF)}"
        for words, fits, target in (
            ("least of the budgets that the card has", True, least),
            ("least of the starred budgets", False, None),
        ):
            found += [
                {
                    "what": f"{what}, {words}",
                    "found": worst,
                    "target": "" if target is None else f">= {target}",
                    "holds": target is None or worst >= target,
                }
                for worst in [min((up for has, up in ups if has is fits), default=None)]
                if worst is not None
            ]
    return found


# The page.

OWN_COLUMNS = (
    *("model", "card", "form", "budget", "reloaded", "over bf16's"),
    *("bytes / bound", "time / bound", "tokens/s"),
)
FUSED_COLUMNS = ("bf16", *(f"{form}{how}" for form in FORMS[1:] for how in ("", FUSED)))


def own_rows(cases: Sequence[Case]) -> Iterable[list[str]]:
    """Yield a row for each budget that is a share of the form's own weights."""
    own = [case for case in cases if case.of == "own weights"]
    unpacked = {(c.model, c.hardware, c.percent): c for c in own if c.form == "bf16"}
    for case in own:
        plain = unpacked[case.model, case.hardware, case.percent]
        yield [
            case.model,
            case.hardware,
            case.form,
            f"{case.percent}% of {format_bytes(case.weight_bytes)}",
            "no plan" if case.reloaded_bytes is None else format_bytes(case.reloaded_bytes),
            f"{over(case.reloaded_bytes, plain.reloaded_bytes):.3f}",
            f"{over(case.reloaded_bytes, case.bound_bytes):.4f}",
            f"{over(case.predicted_ns, case.bound_ns):.4f}",
            f"{case.tokens_per_s or 0:.3f}",
        ]


def equal_rows(cases: Sequence[Case]) -> Iterable[list[str]]:
    """Yield a row for each budget in bytes, with all forms."""
    for (model, hardware, percent), by_form in equal_budgets(cases).items():
        budget = by_form["bf16"].budget_bytes
        beyond = " *" if budget > load_profile(hardware).capacity_bytes else ""
        row = [model, hardware, f"{format_bytes(budget)}{beyond}", f"{percent}%"]
        for form in FORMS:
            reloaded = by_form[form].reloaded_bytes
            row.append(speed(by_form, form))
            row.append("-" if reloaded is None else format_bytes(reloaded))
        yield row


def speed(by_form: dict[str, Case], form: str) -> str:
    """Say how fast a form is, also over bf16."""
    if form not in by_form or not by_form[form].tokens_per_s:
        return "no plan"
    up = speed_up(by_form, form)
    times = "" if form == "bf16" or up is None else f" ({up:.2f} x)"
    return f"{by_form[form].tokens_per_s:.3f}{times}"


def fused_rows(cases: Sequence[Case]) -> Iterable[list[str]]:
    """Yield a row for each budget in bytes, with fused products beside the others."""
    for (model, hardware, percent), by_form in equal_budgets(cases).items():
        budget = by_form["bf16"].budget_bytes
        beyond = " *" if budget > load_profile(hardware).capacity_bytes else ""
        row = [model, hardware, f"{format_bytes(budget)}{beyond}", f"{percent}%"]
        yield [*row, *(speed(by_form, form) for form in FUSED_COLUMNS)]


def page(cases: Sequence[Case], date: str, command: str) -> str:
    """Return the page with all tables."""
    versions = ", ".join(f"{name} {number}" for name, number in versions_used().items())
    forms = [heading for form in FORMS for heading in (f"{form} tokens/s", "reloaded")]
    holds = {True: "yes", False: "**no**"}
    rows = [
        [
            str(s["what"]),
            f"{s['found']:.4g}",
            str(s["target"]),
            holds[bool(s["holds"])] if s["target"] else "",
        ]
        for s in summary(cases)
    ]
    return "\n".join(
        [
            f"# What a budget buys where weights are packed, {date}",
            "",
            f"    {command}",
            "",
            f"Decode steps of policy `finepage` with `split`, batch 1, {SEQ:,} tokens in the KV "
            "cache. Linear layers are packed in groups of 64, with a scale and a minimum of 16 "
            "bits each; embeddings and the output layer are not packed. `bf16` stands for 16 bits: "
            "both cards compute in float16. Nothing was run: times are predicted from the shipped "
            f"profiles. The bounds count packed bytes. {versions}.",
            "",
            *table(["figure", "found", "target", "holds"], rows),
            "",
            "## Equal budgets in bytes",
            "",
            "Budgets are shares of the weights in bf16. A star marks one that is more than the "
            "card has: a card of its speed with more memory would do that. Where nearly all "
            "weights fit, the time to unpack them decides: each step writes and reads whole "
            "weights of 16 bits on the card, slice by slice, about four times the traffic of a "
            "product with an unpacked weight. So int8 and int4 are slower than bf16 on a T4 "
            "with room for 90%.",
            "",
            *table(["model", "card", "budget", "of bf16", *forms], equal_rows(cases)),
            "",
            "## Fused products, as predicted",
            "",
            "With `finepage.fused_unpacking` a product of up to 16 rows unpacks in registers, and "
            "moves packed bytes alone. **The kernel was never run on a GPU.** These predictions "
            "take it to run at the memory rate of the card, and count no arithmetic of unpacking. "
            "So they are the most that it could reach. The key is off by default.",
            "",
            *table(
                ["model", "card", "budget", "of bf16", *(f"{f} tokens/s" for f in FUSED_COLUMNS)],
                fused_rows(cases),
            ),
            "",
            "## Shares of the packed weights",
            "",
            "Reloaded bytes stand beside those in bf16 under the same percentage of its weights. "
            "The output layer and the KV cache are not packed, so the ratio is above 0.28 in int4.",
            "",
            *table(OWN_COLUMNS, own_rows(cases)),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    """Plan all cases; write and print them."""
    options = options_of(arguments, __doc__, MODELS)
    kept = options.out.with_suffix(".json")
    cases: list[Case] = []
    if kept.exists():
        cases = [Case(**each) for each in json.loads(kept.read_text())["cases"]]
    done = {(case.model, case.form) for case in cases}
    for model in options.models.split(","):
        for form in ALL_FORMS:
            whole = next(
                (c.weight_bytes for c in cases if (c.model, c.form) == (model, "bf16")), None
            )
            for case in () if (model, form) in done else cases_of(model, form, whole):
                cases.append(case)
                print(f"\r{len(cases)} cases", end="", file=sys.stderr, flush=True)
    command = command_of("packed_weights.py", arguments)
    text = page(cases, options.out.name[-10:], command)
    return keep(options.out, command, text, summary(cases), cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
