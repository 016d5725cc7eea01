"""docs/api.md is what the docstrings say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import ds_finepage

DOCS = Path(__file__).parents[2] / "docs"

pytest.importorskip("deepspeed")  # a few of the public names need it


def test_the_api_reference_is_current() -> None:
    reference = runpy.run_path(str(DOCS / "make_api.py"))["reference"]()
    assert (DOCS / "api.md").read_text() == reference, "run: python docs/make_api.py"
    for name in ds_finepage.__all__:
        assert f"### {name}\n" in reference


def test_a_docstring_becomes_markdown() -> None:
    rendered = runpy.run_path(str(DOCS / "make_api.py"))["rendered"]
    docstring = """Do it, see :func:`other`.

    Args:
        first: A number
            of bytes.
        second: A name.

    Raises:
        ConfigError: ``second`` is unknown.
    """
    assert rendered(docstring) == (
        "Do it, see `other`.\n\n**Args**\n\n- first: A number of bytes.\n- second: A name.\n\n"
        "**Raises**\n\n- ConfigError: `second` is unknown."
    )
