"""A small run for a sanitiser to watch: a tiny model under a small budget, against plain tokens.

python benchmarks/day_small.py --device cuda
"""

from __future__ import annotations

import sys

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


def main() -> int:
    """Compare; return the exit status."""
    device = device_of(parser_of(__doc__).parse_args())
    model = make_llama(SHAPES["tiny"], device)
    ids = torch.arange(3, 15)[None].to(device)
    expected = generate(model, ids, 4).tokens
    budget_bytes = weight_bytes_of(model) // 2
    handle = ds_finepage.attach(model, device_budget=budget_bytes, device=device)
    generate(model, ids, 4)
    is_equal = torch.equal(generate(model, ids, 4).tokens, expected)
    reasons = handle.stats.unplanned_reasons
    handle.detach()
    report("small run", tokens_equal=is_equal, without_a_plan=len(reasons))
    return 0 if is_equal and not reasons else 1


if __name__ == "__main__":
    sys.exit(main())
