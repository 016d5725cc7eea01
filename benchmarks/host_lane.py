"""What it gains that the host computes, beside llama.cpp's and FlexGen's ways: no GPU, no weights.

    python benchmarks/host_lane.py > table.md

A decode step, behind 1,024 tokens unless ``--seq`` says another number. The rate of the host is
that of its products while the link copies. ``layers`` is what llama.cpp does with a part of the
layers on the device (``-ngl``): as many of the last ones as fit, without copies. The host computes
the products of the others, and attention where the KV cache is in host memory, or not if that is
faster. ``static`` is FlexGen's division of the weights. Both are planned and simulated here. A
budget may be more than the card has: it is then that of a card of its speed with more memory.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from dataclasses import replace

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.device import Accelerator
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TaskGraph, block_of, layer_of
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.host_lane import can_attend, can_multiply
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.policies import unpacking_that_fits
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_attention import with_host_attention
from ds_finepage.planning.rewrite.host_products import with_host_rows
from ds_finepage.planning.simulator import predicted_ns
from ds_finepage.units import NS_PER_S
from ds_finepage.whatif import CapturedModel, capture_model, forms_of, plan_captured, that_fits

MODELS = "llama-65b,llama-2-70b"
CARDS = "v100-16gb,rtx-4090,h200"
SEQ = 1024
FLOPS_PER_S = 2e12
"""Of the host; with one sequence its memory decides."""


def layers_ns(
    captured: CapturedModel, budget_bytes: int, profile: HardwareProfile, *, attends: bool
) -> int:
    """Return the time of a step with the first layers on the host, as few as leave room.

    Args:
        captured: The step.
        budget_bytes: All device bytes.
        profile: The machine.
        attends: The host attends in these layers; else their rows come over the link.
    """
    forms = forms_of(captured, policy="finepage", split=True)
    form, needs = that_fits(forms, budget_bytes)
    graph = unpacking_that_fits(form.graph, policy="finepage", split=False)
    arena_bytes = budget_bytes - needs.non_arena_bytes
    blocks = list(
        dict.fromkeys(block_of(graph.buffers[u.buffer].name) for u in can_multiply(graph))
    )

    def with_first(num: int) -> TaskGraph:
        first = set(blocks[:num])
        attended = can_attend(graph) if attends else []
        attended = [u for u in attended if layer_of(graph.tasks[u.task].label) in first]
        beside = with_host_attention(graph, attended)
        units = can_multiply(beside)
        chosen = [u for u in units if block_of(graph.buffers[u.buffer].name) in first]
        return with_host_rows(beside, units, {u.buffer: u.num_rows for u in chosen})

    def fits(num: int) -> bool:
        return needed_arena_bytes(with_first(num), Accelerator.alignment) <= arena_bytes

    fewest = bisect_left(range(len(blocks)), True, key=fits)
    problem = Problem(with_first(fewest), arena_bytes, Accelerator.alignment, profile)
    return predicted_ns(plan_finepage(problem), profile)


def row(captured: CapturedModel, share: float, host: float, card: HardwareProfile) -> list[str]:
    """Return the figures of one cell."""
    budget_bytes = int(captured.graph.weight_bytes * share)
    profile = replace(card, host_bytes_per_s=host, host_flops_per_s=FLOPS_PER_S)
    alone = plan_captured(captured, budget_bytes=budget_bytes, profile=card).figures
    beside = plan_captured(captured, budget_bytes=budget_bytes, profile=profile).figures
    try:
        static = plan_captured(captured, budget_bytes=budget_bytes, profile=card, policy="static")
        static_ns = static.figures.predicted_ns
    except PlanInfeasibleError:
        static_ns = 0
    layers = min(layers_ns(captured, budget_bytes, profile, attends=n) for n in (False, True))
    gain = alone.predicted_ns / beside.predicted_ns
    bounds = alone.lower_bound_ns / beside.lower_bound_ns
    times = (static_ns, layers, alone.predicted_ns, beside.predicted_ns)
    speeds = [f"{captured.batch * NS_PER_S / ns:.3g}" if ns else "no room" for ns in times]
    return [
        *(f"{100 * share:.0f}%", f"{host / 1e9:.0f}", *speeds),
        *(f"{gain:.2f}", f"{gain / bounds:.3f}"),
        f"{beside.predicted_ns / beside.lower_bound_ns:.3f}",
        f"{layers / beside.predicted_ns:.2f}",
    ]


def main() -> None:
    """Print a table for each model, form and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cards", default=CARDS)
    parser.add_argument("--weights", default="bf16,int4")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--budgets", default="10,25,50", help="in percent of the weights")
    parser.add_argument("--hosts", default="50e9,200e9", help="bytes a second")
    given = parser.parse_args()
    for model in given.models.split(","):
        for weights in given.weights.split(","):
            for batch in map(int, given.batch.split(",")):
                print(f"\n### {model}, {weights}, batch {batch}, {given.seq} tokens\n")
                heads = ["card", "budget", "host GB/s", "static", "layers", "link alone", "ours"]
                heads += ["gain", "of the bounds' ratio", "time / bound", "over layers"]
                print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
                for name in given.cards.split(","):
                    card = load_profile(name)
                    captured = capture_model(
                        model,
                        phase="decode",
                        batch=batch,
                        seq=given.seq,
                        profile=card,
                        weights=weights,
                    )
                    for percent in map(float, given.budgets.split(",")):
                        for host in map(float, given.hosts.split(",")):
                            found = row(captured, percent / 100, host, card)
                            print(f"| {' | '.join([name, *found])} |", flush=True)


if __name__ == "__main__":
    main()
