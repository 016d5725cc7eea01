"""The options of ``plan`` and ``curve`` for a draft, and a line of figures for each budget."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ds_finepage.capture.shipped import config_text
from ds_finepage.cli import options, output
from ds_finepage.errors import ConfigError
from ds_finepage.graph.profiles import load_profile

if TYPE_CHECKING:
    from ds_finepage.drafted import DraftedPoint

ACCEPTANCES = "0.6,0.8,0.95"


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add the options for a draft."""
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help='predict assisted generation too: "stand-in", for int4 copies of what streams, or a '
        "smaller model, named as --model is. Both share the budget",
    )
    parser.add_argument(
        "--acceptance",
        metavar="LIST",
        help="chances that the model accepts a drafted token, with commas in between "
        f"({ACCEPTANCES})",
    )


def acceptances_of(arguments: argparse.Namespace) -> list[float]:
    """Read the chances, and refuse options that cannot be used together; none without a draft.

    Raises:
        ConfigError: One is no share; the options of a draft cannot be used together with others.
    """
    text = arguments.acceptance
    if arguments.draft is None:
        if text is not None:
            raise ConfigError("--acceptance: there is no --draft. Name one, or leave it out.")
        return []
    if arguments.draft != "stand-in":
        config_text(arguments.draft)  # refuses one that is not there
    for name in ("batch", "ranks"):
        if (number := getattr(arguments, name)) != 1:
            raise ConfigError(
                f"--{name}: {number} with --draft; transformers assists one sequence, on one rank. "
                f"Leave one of them out."
            )
    has_several = "," in (arguments.weights or "")
    if arguments.policy != "finepage" or arguments.no_split or has_several:
        raise ConfigError(
            "--draft: it is planned by finepage, which may cut weights, in one form of them. Leave "
            "out --policy and --no-split, and name one form."
        )
    return [_share(name) for name in options.names_of(text or ACCEPTANCES, "--acceptance")]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--acceptance: {text!r} is no chance. Write numbers from 0 to 1.")
    return share


def points_of(arguments: argparse.Namespace, budgets: Sequence[int]) -> list[DraftedPoint]:
    """Plan a model with its draft under each budget that has room for both; none without one."""
    if arguments.draft is None:
        return []
    from ds_finepage.drafted import with_draft  # imports torch: check the options first

    drafted = with_draft(
        arguments.model,
        arguments.draft,
        seq=arguments.seq,
        profile=load_profile(arguments.hardware),
        weights=arguments.weights,
        weights_group=arguments.weights_group,
    )
    found = [point for point in drafted.at(budgets) if point is not None]
    if not found:
        options.note(f"no budget has room for the draft {arguments.draft}")
    return found


def show(arguments: argparse.Namespace, points: Sequence[DraftedPoint]) -> None:
    """Print the figures, if there are any."""
    if points:
        from ds_finepage.drafted import draft_table

        name = arguments.draft
        title = f"with the draft {name}: tok/s at an acceptance of (tokens drafted a round)"
        output.show(draft_table(title, points, acceptances_of(arguments)))


def as_json(arguments: argparse.Namespace, points: Sequence[DraftedPoint]) -> dict[str, Any]:
    """Return the figures under the key "draft", with the tokens a second at each acceptance."""
    given = acceptances_of(arguments)
    found = [
        {**asdict(point), "tokens_per_s": {str(a): point.tokens_per_s(a) for a in given}}
        for point in points
    ]
    return {"draft": found} if given else {}
