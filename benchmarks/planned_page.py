"""Shared by the benchmarks of planned cases: options, tables in Markdown, and their two files."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any


def options_of(arguments: list[str], description: str | None, models: Sequence[str]) -> Any:
    """Read the options: ``out``, the files without their endings, and ``models``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="files without their endings")
    parser.add_argument("--models", default=",".join(models))
    return parser.parse_args(arguments)


def command_of(script: str, arguments: list[str]) -> str:
    """Return the command that a page names."""
    return shlex.join(["python", f"benchmarks/{script}", *arguments])


def versions_used() -> dict[str, str]:
    """Return the versions that captured passes depend on."""
    return {name: version(name) for name in ("torch", "transformers")}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def keep(
    out: Path, command: str, page: str, summary: list[dict[str, Any]], cases: Iterable[Any]
) -> int:
    """Write and print the page, write the cases beside it; return the exit status."""
    document = {
        "command": command,
        "is_simulated": True,
        "versions": versions_used(),
        "summary": summary,
        "cases": [asdict(case) for case in cases],
    }
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)
    print(page)
    return 0 if all(each["holds"] for each in summary) else 1
