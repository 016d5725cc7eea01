"""The documents: their links lead somewhere, and the index of benchmarks has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "benchmarks" / "README.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]


def headings(document: Path) -> set[str]:
    """Return the addresses of the headings of a document."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        file, _, heading = link.partition("#")
        target = document.parent / file if file else document
        is_there = target.exists() and (not heading or heading in headings(target))
        broken += [] if "://" in link or is_there else [link]
    assert broken == []


def test_the_index_of_benchmarks_has_every_page_and_script() -> None:
    index = INDEX.read_text()
    pages = {p.name for p in INDEX.parent.glob("*.md")} - {INDEX.name}
    assert [page for page in sorted(pages) if f"]({page})" not in index] == []
    scripts = {p.name for p in INDEX.parent.glob("*.py") if p.read_text().startswith('"""')}
    helpers = {p for p in scripts if p.startswith(("day_", "tiny_"))} | {"planned_page.py"}
    assert [s for s in sorted(scripts - helpers) if f"`{s}`" not in index] == []
