"""Run any torch module under a device budget, without DeepSpeed.

    python examples/attach.py

The results are those of the plain module, bit by bit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import ds_finepage
from ds_finepage.units import format_bytes


class Model(torch.nn.Module):
    """A stack of linear layers, 16 MiB of weights."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go through all layers."""
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def main() -> None:
    """Attach, run twice, print the counters, detach."""
    torch.manual_seed(0)
    model = Model().eval()
    x = torch.randn(8, 512)
    with torch.no_grad():
        expected = model(x)

    handle = ds_finepage.attach(model, device_budget="40%weights", device="cpu")
    calls: Counter[str] = Counter()

    def count(task: Any, operands: Any) -> None:
        calls[task.op] += 1

    remove = handle.register_op_hook(before=count)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), expected)
    remove()

    stats, (each,) = handle.stats, handle.stats.passes
    print(f"weights {format_bytes(stats.weight_bytes)}, budget {format_bytes(stats.budget_bytes)}")
    print(f"ops {dict(calls)}")
    print(
        f"a pass reloads {format_bytes(each.last_reloaded_bytes)}; no plan could reload less than "
        f"{format_bytes(each.lower_bound_bytes)}"
    )

    handle.detach()
    with torch.no_grad():
        assert torch.equal(model(x), expected)


if __name__ == "__main__":
    main()
