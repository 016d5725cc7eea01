"""FlexGen's own schedule, modelled with the rates of a profile, beside what FlexGen published.

    python benchmarks/flexgen.py

A model of the block schedule of FlexGen (arXiv 2303.06865, section 4.2 and appendix A): several
batches go through a layer before the next one is loaded. Weights, KV cache and activations have
fixed shares of the device, of host memory and of a disk. The processor computes attention over rows
that are not on the device. The time of a layer is that of its busiest part. Shares and batches are
those of the published runs, in percent, as FlexGen's own scripts give them.

The error says how kind our model is to a schedule that was measured: the same rates give our own
predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ds_finepage.capture.models import load_model_config
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.profiles import load_profile

PROMPT, NEW = 512, 32
ITEMSIZE = 2
DISK_READ_PER_S, DISK_WRITE_PER_S = 2e9, 1e9
"""Rates of the published machine's disk, section 6 of the paper."""
PROCESSOR_BYTES_PER_S = 50e9
"""Rows that the processor attends to in a second: an assumption, the rate of its memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """A published run.

    Attributes:
        model: A shipped name.
        batch: Sequences of a block.
        weights: Shares on the device, in host memory and on the disk.
        cache: The same of the KV cache.
        tokens_per_s: Published.
    """

    model: str
    batch: int
    weights: tuple[float, float, float]
    cache: tuple[float, float, float]
    tokens_per_s: float


RUNS = (
    Run("opt-6.7b", 2, (1, 0, 0), (1, 0, 0), 25.26),
    Run("opt-30b", 144, (0.2, 0.8, 0), (0, 1, 0), 7.32),
    Run("opt-175b", 256, (0, 0.5, 0.5), (0, 0, 1), 0.69),
)


def tokens_per_s(run: Run, profile: HardwareProfile) -> tuple[float, str]:
    """Return the modelled speed, and the part that is busiest in a step."""
    config = load_model_config(run.model)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    weights = 12 * hidden**2  # of a layer
    flops = profile.flops_per_s["float16"]
    rows = 2 * hidden * ITEMSIZE * run.batch  # bytes of the keys and values of a token

    def layer_s(tokens: int, length: float) -> dict[str, float]:
        products = 2 * weights * run.batch * tokens / flops
        scores = 4 * hidden * run.batch * tokens * length / flops
        read = rows * length if tokens == 1 else 0.0
        written = rows * tokens
        weight_bytes = weights * ITEMSIZE
        return {
            "device": max(products + scores, weight_bytes / profile.memory_bytes_per_s)
            + run.cache[0] * read / profile.memory_bytes_per_s,
            "link": weight_bytes * (1 - run.weights[0]) / profile.h2d_bytes_per_s,
            "link back": written * (1 - run.cache[0]) / profile.d2h_bytes_per_s,
            "disk": (weight_bytes * run.weights[2] + read * run.cache[2]) / DISK_READ_PER_S
            + written * run.cache[2] / DISK_WRITE_PER_S,
            "processor": read * (1 - run.cache[0]) / PROCESSOR_BYTES_PER_S,
        }

    prefill, step = layer_s(PROMPT, PROMPT / 2), layer_s(1, PROMPT + NEW / 2)
    seconds = layers * (max(prefill.values()) + (NEW - 1) * max(step.values()))
    return run.batch * NEW / seconds, max(step, key=lambda name: step[name])


def main() -> None:
    """Print a line for each published run."""
    profile = load_profile("t4")
    table = Table("model", "batch", "published", "modelled", "error", "busiest in a step")
    for run in RUNS:
        modelled, busiest = tokens_per_s(run, profile)
        error = f"{modelled / run.tokens_per_s - 1:+.0%}"
        published = f"{run.tokens_per_s:.2f}"
        table.add_row(run.model, str(run.batch), published, f"{modelled:.2f}", error, busiest)
    Console().print(table)


if __name__ == "__main__":
    main()
