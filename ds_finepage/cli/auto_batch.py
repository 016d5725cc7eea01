"""``plan --batch auto``: the batch that makes most tokens a second."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

from ds_finepage.cli import options, output
from ds_finepage.errors import ConfigError
from ds_finepage.reporting import drawing

NEW_TOKENS = 32


def is_asked(arguments: argparse.Namespace) -> bool:
    """Tell whether the batch is to be found, and refuse options that cannot be used with that.

    Raises:
        ConfigError: A batch below 1; ``--new`` without ``--batch auto``, or too large; another
            policy; a picture that cannot be drawn.
    """
    if arguments.batch != options.AUTO:
        options.require_counts(arguments, "batch")
        if arguments.new is not None:
            raise ConfigError("--new: the batch is given. Write --batch auto, or leave --new out.")
        return False
    arguments.new = NEW_TOKENS if arguments.new is None else arguments.new
    options.require_counts(arguments, "new")
    if arguments.new >= arguments.seq:
        raise ConfigError(
            f"--new: {arguments.new} of {arguments.seq} tokens (--seq) leave none for the prompt."
        )
    if arguments.policy != "finepage":
        raise ConfigError("--policy: --batch auto is for finepage. Leave one of them out.")
    if arguments.out is not None:
        drawing.require_packages("plan --batch auto --out")
    return True


def run(arguments: argparse.Namespace, **settings: Any) -> int:
    """Find the batch, print it beside others, draw them.

    Args:
        arguments: The options.
        **settings: Those of them that are read already, as the modeller takes them.
    """
    from ds_finepage.batches import find_best  # imports torch: options are checked first
    from ds_finepage.modeller import Modeller

    lengths = {"prompt_tokens": arguments.seq - arguments.new, "new_tokens": arguments.new}
    make = partial(Modeller, arguments.model, **lengths, **settings)
    found = find_best(make, kv_cache=arguments.kv_cache)
    if arguments.out is not None:
        points = [astuple(point) for point in found.curve]
        best = found.batch, found.planned.tokens_per_s
        arguments.out.write_bytes(drawing.png(drawing.draw_batches(points, best, found.title)))
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
        return 0
    output.show(found.to_table())
    output.show_figures(found.step.title, found.step.lines())
    if arguments.out is not None:
        print(f"picture: {arguments.out}")
    return 0
