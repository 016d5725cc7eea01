"""The report of a result folder: one HTML page that opens without a network, and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finepage.errors import ConfigError
from ds_finepage.files import write_file
from ds_finepage.reporting.findings import Findings
from ds_finepage.reporting.pictures import (
    Picture,
    picture_of_arms,
    picture_of_budgets,
    pictures_of_pass,
)
from ds_finepage.reporting.results import DECODE, PREFILL, ObservedPass, Results, Run
from ds_finepage.reporting.tables import RunTable, footnotes, remarks, tables

OURS = "finepage"
PAGE_FILE, FIGURES_FOLDER = "report.html", "figures"
TEMPLATE = Path(__file__).with_name("templates") / "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Pictures under one heading."""

    title: str
    pictures: tuple[Picture, ...]
    sentence: str = ""
    is_open: bool = True  # the reader need not ask for it


def write_report(
    folder: Path,
    results: Results,
    passes: dict[str, list[ObservedPass]],
    findings: Findings | None = None,
) -> Path:
    """Write ``report.html`` and the pictures of a result folder; return the page.

    Everything is drawn before the first file is written, and each file is replaced at once. So
    after an error the earlier report is still there.

    Args:
        folder: The folder.
        results: Its results.
        passes: Run name -> its observed passes.
        findings: What follows beyond the figures; None leaves that out.

    Raises:
        ConfigError: A file cannot be written.
    """
    findings = findings or Findings()
    sections = make_sections(results, passes, findings)
    page = render(results, sections, findings)
    pictures = [picture for section in sections for picture in section.pictures]
    path = folder / PAGE_FILE
    write_file(path, page)
    figures = folder / FIGURES_FOLDER
    try:
        figures.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {figures}: {error}") from error
    for picture in pictures:
        write_file(figures / f"{picture.name}.png", picture.png)
    return path


def make_sections(
    results: Results, passes: dict[str, list[ObservedPass]], findings: Findings
) -> list[Section]:
    """Draw the pictures of a folder.

    Args:
        results: Its results.
        passes: Run name -> its observed passes.
        findings: What follows beyond the figures.
    """
    sections = []
    for batch in dict.fromkeys(run.batch for run in results.runs):
        pictures = (
            *picture_of_arms(results, batch),
            *picture_of_budgets(results, batch, findings),
        )
        if pictures:
            sections.append(Section(title=f"All engines, batch {batch}", pictures=pictures))
    for run in sorted(results.runs, key=lambda run: run.arm != OURS):
        others = findings.passes.get(run.name, {})
        for found in sorted(filter(_is_first, passes.get(run.name, [])), key=_order):
            memgraph, beside = found.memgraph, others.get(found.name, ())
            sections.append(
                Section(
                    title=f"{run.arm}, batch {run.batch}: {_TITLES.get(found.name, found.name)}",
                    sentence=f"{len(memgraph.graph.tasks)} ops, planned by {memgraph.policy}.",
                    pictures=tuple(pictures_of_pass(run, found, beside, findings.hardware)),
                    is_open=run.arm == OURS,
                )
            )
    return sections


_TITLES = {PREFILL: "prefill", DECODE: "a decode step"}


def _is_first(found: ObservedPass) -> bool:
    """Tell whether a pass is the first of its kind: a cache that grows has a "decode_2" as well."""
    return not found.name.rpartition("_")[2].isdecimal()


def _order(found: ObservedPass) -> tuple[int, str]:
    return (DECODE, PREFILL).index(found.name) if found.name in _TITLES else 2, found.name


def render(results: Results, sections: Sequence[Section], findings: Findings) -> str:
    """Return the page.

    Args:
        results: The results.
        sections: The pictures.
        findings: What follows beyond the figures.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=_page(results, sections, findings))


def _page(results: Results, sections: Sequence[Section], findings: Findings) -> dict[str, Any]:
    batches = list(dict.fromkeys(run.batch for run in results.runs))
    return {
        "title": _title(results),
        "facts": _facts(results),
        "verdicts": findings.sentences,
        "remarks": [*_missing(results, sections), *findings.remarks],
        "sections": sections,
        "tables": [_table(t, findings.fastest) for b in batches for t in tables(results, b)],
        "notes": [f"Batch {b}: {note}" for b in batches for note in remarks(results, b)],
        "footnotes": footnotes(results),
        "machine": [
            ("device", results.device),
            ("date", results.date),
            *((name, version) for name, version in results.versions.items()),
        ],
        "command": results.command,
    }


def _title(results: Results) -> str:
    if results.settings is None:
        return "A run of ds_finepage"
    return f"{Path(results.settings.model).name}: every engine under one budget"


def _facts(results: Results) -> str:
    facts = [results.device, results.date]
    if (settings := results.settings) is not None:
        layers = "" if settings.layers is None else f", {settings.layers} layers"
        facts = [
            f"budget {settings.device_budget}{layers}",
            f"{settings.prompt_tokens} tokens of prompt, {settings.new_tokens} new ones",
            *facts,
        ]
    return " · ".join(facts)


def _missing(results: Results, sections: Sequence[Section]) -> list[str]:
    if not results.runs:
        return ["No run is finished yet."]
    if any(section.pictures for section in sections):
        return []
    return ["No run has kept the plan of a pass, so there is no picture of one."]


def _table(table: RunTable, best: frozenset[str]) -> dict[str, Any]:
    def kind(run: Run) -> str:
        return "best" if run.name in best else "failed" if run.reason else ""

    return {
        "title": table.title,
        "headings": [heading for heading, _ in table.columns],
        "rows": [
            {"kind": kind(run), "cells": [show(run) for _, show in table.columns]}
            for run in table.runs
        ],
    }
