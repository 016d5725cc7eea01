"""Files, classes and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ds_finepage", "tests", "benchmarks", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

MOST_LINES = {ast.Module: 500, ast.ClassDef: 250, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}


def too_long(text: str) -> Iterator[str]:
    """Yield every file, class and function of a text that is longer than its limit."""
    if text.count("\n") > MOST_LINES[ast.Module]:
        yield f"file: {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MOST_LINES[type(node)]:
                yield f"{node.name}: {num_lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_too_long(path: Path) -> None:
    assert list(too_long(path.read_text())) == []


def test_how_lengths_are_found() -> None:
    body = "    x = 1\n"
    assert list(too_long("def f():\n" + 59 * body)) == []
    assert list(too_long("def f():\n" + 60 * body)) == ["f: 61 lines"]
    assert list(too_long("class A:\n" + 250 * body)) == ["A: 251 lines"]
    assert list(too_long(501 * "x = 1\n")) == ["file: 501 lines"]
