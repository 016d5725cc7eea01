"""Writes the page of a grid: each cell by policy, the winners, and the settings that were found.

    ds-finepage grid ... --policies zero,zero-persistence,static,finepage --json > FILE.json
    python benchmarks/grid_page.py FILE.json

The page is ``FILE.md``, with the command, date and versions of the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planned_page import table

from ds_finepage.planning.baselines.zero_search import POLICY as SEARCHED

OURS = "finepage"
Row = dict[str, Any]


def rows_of(cells: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the cells of each combination by policy, in the order of the page."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for cell in cells:
        key = (cell["model"], cell["batch"], cell["seq"], cell["hardware"])
        found.setdefault(key, {})[cell["policy"]] = cell
    models = list(dict.fromkeys(key[0] for key in found))
    return {k: found[k] for k in sorted(found, key=lambda k: (models.index(k[0]), *k[1:]))}


def figure(cell: Row) -> str:
    """Return decode tokens a second and seconds to the first token; "no" if it does not run."""
    if not cell["runs"]:
        return "no"
    rate, host = cell["tokens_per_s"], cell["prefill_kv_on_host"] or cell["decode_kv_on_host"]
    digits = 4 if rate < 1 else 2
    return f"{rate:.{digits}f} · {cell['first_token_ns'] / 1e9:.2f}{' h' if host else ''}"


def verdict(cell: Row, phase: str) -> str:
    """Return the winner, and the speed of ours over the best baseline."""
    row = cell["row"][phase]
    over = "" if row["over_baselines"] is None else f", {row['over_baselines']:.3f}"
    return f"{row['winner'] or 'none'}{over}"


def summary(cells: list[Row]) -> Iterator[str]:
    """Yield what the rows have in common."""
    ours = [c for c in cells if c["policy"] == OURS]
    yield f"{sum(c['runs'] for c in ours)} of {len(ours)} rows run by policy `{OURS}`."
    for phase in ("decode", "prefill"):
        over = [c["row"][phase]["over_baselines"] for c in ours]
        known = [o for o in over if o is not None]
        if known:
            yield (
                f"Its {phase} is {min(known):.3f} to {max(known):.3f} times as fast as the best "
                f"baseline, and slower in {sum(o < 0.9995 for o in known)} of {len(known)} rows."
            )


def page_of(document: dict[str, Any], title: str) -> str:
    """Return the page."""
    cells: list[Row] = document["cells"]
    policies = list(dict.fromkeys(c["policy"] for c in cells))
    versions = ", ".join(f"{name} {found}" for name, found in document["versions"].items())
    headings = ["model", "batch", "sequence", "card"]
    headings += [*(f"`{p}`" for p in policies), "decode", "prefill"]
    body = []
    for (model, batch, seq, card), by_policy in rows_of(cells).items():
        some = next(iter(by_policy.values()))
        figures = [figure(by_policy[p]) if p in by_policy else "-" for p in policies]
        verdicts = [verdict(some, phase) for phase in ("decode", "prefill")]
        body.append([model, str(batch), str(seq), card, *figures, *verdicts])
    lines = [
        f"# {title}, {document['date']}",
        "",
        f"    {document['command']}",
        "",
        f"`{SEARCHED}` has prefetch, live parameters and both persistence thresholds searched "
        f"together, and `static` tries several forms. {versions}. Nothing was run: figures are "
        "predicted from published dimensions and datasheet rates. The error of such predictions, "
        "where they could be measured, is in the latest `prediction_*.md`.",
        "",
        "Decode tokens a second · seconds to the first token, then the fastest policy and the "
        f"speed of `{OURS}` over the best baseline. `h`: the KV cache is in host memory.",
        "",
        *table(headings, body),
        "",
        " ".join(summary(cells)),
        "",
        f"The JSON file has the settings of `{SEARCHED}` in every row.",
    ]
    return "\n".join(lines) + "\n"


def main(path: Path) -> None:
    """Write the page beside the file."""
    document = json.loads(path.read_text())
    path.with_suffix(".md").write_text(page_of(document, "The baselines as good as they get"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
