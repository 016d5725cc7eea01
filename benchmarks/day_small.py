"""A small run: tokens as plain, the budget held, and a host that never waits inside a pass.

python benchmarks/day_small.py --device cuda
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from day_common import (
    SHAPES,
    device_of,
    generate,
    make_llama,
    parser_of,
    report,
    weight_bytes_of,
)

import ds_finepage
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.reload_sources import ReloadSources


@torch.no_grad()
def wait_in_a_pass(model: Any, ids: torch.Tensor) -> str:
    """Say where the host waits for the device inside a pass; empty if nowhere.

    It may wait for the indices of an embedding before a pass.

    Args:
        model: A model that has run with these ids.
        ids: Token ids of shape (batch, length).
    """
    set_mode = getattr(torch.get_device_module(ids.device), "set_sync_debug_mode", None)
    if set_mode is None:
        return ""
    gather = ReloadSources.gather_rows

    def gather_before_the_pass(sources: ReloadSources, args: Sequence[Any]) -> None:
        set_mode("default")
        gather(sources, args)
        set_mode("error")

    set_mode("error")
    try:
        with patch.object(ReloadSources, "gather_rows", gather_before_the_pass):
            model(input_ids=ids, use_cache=False)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        set_mode("default")
    return ""


def main() -> int:
    """Compare; return the exit status."""
    device = device_of(parser_of(__doc__).parse_args())
    model = make_llama(SHAPES["tiny"], device)
    ids = torch.arange(3, 15)[None].to(device)
    expected = generate(model, ids, 4).tokens
    budget_bytes = weight_bytes_of(model) // 2
    model.to("cpu")  # so that the meter sees what the plan brings in
    with DeviceMeter(device) as meter:
        handle = ds_finepage.attach(model, device_budget=budget_bytes, device=device)
        generate(model, ids, 4)
        is_equal = torch.equal(generate(model, ids, 4).tokens, expected)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    wait = wait_in_a_pass(model, ids)
    reasons = handle.stats.unplanned_reasons
    handle.detach()
    report(
        "small run",
        tokens_equal=is_equal,
        peak_bytes=meter.peak_bytes,
        budget_bytes=budget_bytes,
        within_budget=meter.peak_bytes <= budget_bytes,
        host_waits=wait or "never",
        without_a_plan=len(reasons),
    )
    is_good = is_equal and meter.peak_bytes <= budget_bytes and not wait and not reasons
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
