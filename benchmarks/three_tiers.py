"""A model that host memory has no room for: tokens, bytes and times of a real run on the CPU.

    python benchmarks/three_tiers.py --folder FOLDER

It makes a Llama of 5.5 GiB in float32 with random weights, or takes it from the folder, and runs it
under a device budget of 1 GiB and a host budget of 1.5 GiB. ``--plain`` prints the tokens of plain
transformers instead, which needs memory for all weights; ``--expect`` compares with them. Where the
process has a limit, set one of about 3.6 GiB: the device is host memory here, and torch takes half
a GiB. In a cgroup, the kernel counts the peak.

The rate of the disk is that of sequential direct reads of the same files in this process.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_finepage

NEW = 8
SHAPE = {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


def make(folder: Path) -> None:
    """Save the model, with a fixed seed."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder, max_shard_size="1GB")


def disk_rate(folder: Path) -> float:
    """Return the bytes a second of sequential direct reads of 16 MiB."""
    buffer, nbytes, start = mmap.mmap(-1, 16 << 20), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        file, position = os.open(path, os.O_RDONLY | os.O_DIRECT), 0
        while done := os.preadv(file, [buffer], position):
            position += done
        os.close(file)
        nbytes += position
    return nbytes / (time.perf_counter() - start)


class Steps:
    """Notes time and bytes of each token, as a streamer."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.rows = handle, [(time.perf_counter(), handle.stats.file_bytes)]

    def put(self, value: torch.Tensor) -> None:
        """See a token, or the prompt."""
        self.rows.append((time.perf_counter(), self.handle.stats.file_bytes))

    def end(self) -> None:
        """See the end."""


def main() -> int:
    """Run and print; exit status 1 if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device-budget", default="1GiB")
    parser.add_argument("--host-budget", default="1536MiB")
    parser.add_argument("--plain", action="store_true", help="plain transformers, all in memory")
    parser.add_argument("--expect", default="", help="tokens to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (options.folder / "config.json").exists():
        make(options.folder)
    model: Any = LlamaForCausalLM.from_pretrained(options.folder, dtype="auto")
    nbytes = sum(p.nbytes for p in model.parameters())
    ids, given = torch.arange(1, 20)[None], {"max_new_tokens": NEW, "do_sample": False}
    if options.plain:
        print(",".join(map(str, model.generate(ids, **given)[0, ids.shape[1] :].tolist())))
        return 0
    budgets = {"device_budget": options.device_budget, "host_budget": options.host_budget}
    handle = ds_finepage.attach(model, device="cpu", **budgets)
    for call in ("first", "second"):
        steps = Steps(handle)
        found = model.generate(ids, streamer=steps, **given)[0, ids.shape[1] :].tolist()
        tokens = ",".join(map(str, found))
        pairs = list(zip(steps.rows[2:], steps.rows[3:], strict=False))
        seconds = statistics.median(b[0] - a[0] for a, b in pairs)
        read = statistics.median(b[1] - a[1] for a, b in pairs)
        print(
            f"{call} call: first token {steps.rows[2][0] - steps.rows[0][0]:.2f} s; a step "
            f"{seconds:.3f} s, {read / 2**20:.0f} MiB of files, {read / seconds / 1e9:.2f} GB/s"
        )
    stats = handle.stats
    least = nbytes - stats.budget_bytes - (stats.host_budget_bytes or 0)
    print(
        f"weights {nbytes / 2**20:.0f} MiB, host memory {stats.host_bytes / 2**20:.0f} of "
        f"{(stats.host_budget_bytes or 0) / 2**20:.0f} MiB, files over weights less both budgets "
        f"{read / least:.3f}; the disk alone {disk_rate(options.folder) / 1e9:.2f} GB/s"
    )
    print(f"tokens {tokens}{'' if not options.expect else f': equal {tokens == options.expect}'}")
    return int(bool(options.expect) and tokens != options.expect)


if __name__ == "__main__":
    sys.exit(main())
