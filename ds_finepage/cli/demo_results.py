"""The figures of a demo: one object an engine and rank, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ds_finepage.cli.instruments import Reading
from ds_finepage.cli.output import show as show_table
from ds_finepage.units import format_bytes

ENGINES = {"zero_inference": "stock ZeRO-Inference", "finepage": "ds_finepage"}

JSON_KEYS = (
    "tokens_equal",
    "peak_bytes",
    "prefill_reloaded_bytes",
    "decode_reloaded_bytes",
    "decode_lower_bound_bytes",
    "wall_s",
)
"""The figures of an engine in ``--json``."""

FOOTNOTE = """\
Peak: a meter reads the allocator, in a run of its own, from just before deepspeed.initialize on. It
counts all device bytes, but not the host copy of the weights. Reloads: of the last prefill and the
last decode step. Stock has no budget; its peak follows from its default prefetch settings. Times
are of generate alone, without the meter. ds_finepage's first call uses the costs and plans that
the run with the meter has kept. A new model is measured and planned then, which takes longer."""

FOOTNOTE_RANKS = """\
DeepSpeed's AutoTP cuts the model for both engines. Budget and bytes are those of one rank. Ranks
compute in float32: their sums round differently than those of one process."""

FOOTNOTE_CPU_RANKS = """\
On the CPU the meter of several ranks begins after deepspeed.initialize, which makes the partitions
in host memory."""

FOOTNOTE_CPU = """\
On the CPU a fetch of stock ZeRO-Inference copies nothing (the meter makes it copy), while
ds_finepage really copies: compare the bytes here, and times on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult(Reading):
    """The figures of one engine.

    ``wall_s`` is the time of the first call of ``generate``, capture and planning included.
    ``wall_again_s`` is that of the last call.
    """

    tokens_equal: bool
    wall_s: float
    wall_again_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The figures of both engines on one rank; ``weights`` names their packed form, if any."""

    budget_bytes: int
    weight_bytes: int
    engines: dict[str, EngineResult]
    weights: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one object for ``--json``; figures that are None are left out."""
        engines = {}
        for name, engine in self.engines.items():
            figures = asdict(engine)
            engines[name] = {k: figures[k] for k in JSON_KEYS if figures[k] is not None}
        return {
            "budget_bytes": self.budget_bytes,
            "weight_bytes": self.weight_bytes,
            **({} if self.weights is None else {"weights": self.weights}),
            "engines": engines,
        }


def problems_of(result: DemoResult) -> list[str]:
    """List the faults of a result, in words."""
    problems = [
        f"the tokens of {ENGINES[name]} differ from those of plain transformers"
        for name, engine in result.engines.items()
        if not engine.tokens_equal
    ]
    peak_bytes = result.engines["finepage"].peak_bytes
    if peak_bytes > result.budget_bytes:
        problems.append(
            f"ds_finepage had {peak_bytes} bytes on the device; the budget is "
            f"{result.budget_bytes} bytes"
        )
    return problems


def problems_of_ranks(results: Sequence[DemoResult]) -> list[str]:
    """List the faults of all ranks, in words; those of several ranks begin with the rank."""
    if len(results) == 1:
        return problems_of(results[0])
    return [
        f"rank {rank}: {problem}"
        for rank, result in enumerate(results)
        for problem in problems_of(result)
    ]


def print_results(results: Sequence[DemoResult]) -> None:
    """Print the table, with a line for each figure of each rank."""
    first, num_ranks = results[0], len(results)
    form = "" if first.weights is None else f" in {first.weights}"
    over = "" if num_ranks == 1 else f" a rank, over {num_ranks} ranks"
    table = Table(title=f"Llama, {format_bytes(first.weight_bytes)} of weights{form}{over}")
    table.add_column("engine")
    for title in ENGINES.values():
        table.add_column(title, justify="right")
    table.add_column("limit or bound", justify="right")

    def add(
        label: str,
        attribute: str,
        show: Callable[[Any], str],
        limit: Callable[[DemoResult], str] = lambda result: "",
    ) -> None:
        for rank, result in enumerate(results):
            values = [show(getattr(result.engines[name], attribute)) for name in ENGINES]
            of_rank = "" if num_ranks == 1 else f", rank {rank}"
            table.add_row(label + of_rank, *values, limit(result))

    def budget(result: DemoResult) -> str:
        return f"<= {format_bytes(result.budget_bytes)} (budget)"

    def bound(attribute: str) -> Callable[[DemoResult], str]:
        def of(result: DemoResult) -> str:
            lower_bound_bytes = getattr(result.engines["finepage"], attribute)
            return "" if lower_bound_bytes is None else f">= {format_bytes(lower_bound_bytes)}"

        return of

    add("tokens equal to plain transformers", "tokens_equal", ("no", "yes").__getitem__)
    add("peak device bytes", "peak_bytes", format_bytes, budget)
    for label, of_pass in (("a prefill", "prefill"), ("a steady decode step", "decode")):
        limit = bound(f"{of_pass}_lower_bound_bytes")
        add(f"reloaded in {label}", f"{of_pass}_reloaded_bytes", format_bytes, limit)
    add("wall time, first call", "wall_s", "{:.2f} s".format)
    add("wall time, second call", "wall_again_s", "{:.2f} s".format)
    show_table(table)
    print(FOOTNOTE)
    on_cpu = not has_accelerator()
    for note, holds in (
        (FOOTNOTE_CPU, on_cpu),
        (FOOTNOTE_RANKS, num_ranks > 1),
        (FOOTNOTE_CPU_RANKS, on_cpu and num_ranks > 1),
    ):
        if holds:
            print(note)


def has_accelerator() -> bool:
    """Return True if the runs use an accelerator."""
    import torch

    return torch.accelerator.is_available()
