"""The documents: their links lead to files, and the index of benchmarks has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "benchmarks" / "README.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    files = [document.parent / link for link in links if "://" not in link]
    assert [file for file in files if not file.exists()] == []


def test_the_index_of_benchmarks_has_every_page_and_script() -> None:
    index = INDEX.read_text()
    pages = {p.name for p in INDEX.parent.glob("*.md")} - {INDEX.name}
    assert [page for page in sorted(pages) if f"]({page})" not in index] == []
    scripts = {p.name for p in INDEX.parent.glob("*.py") if p.read_text().startswith('"""')}
    helpers = {p for p in scripts if p.startswith(("day_", "tiny_"))} | {"planned_page.py"}
    assert [s for s in sorted(scripts - helpers) if f"`{s}`" not in index] == []
