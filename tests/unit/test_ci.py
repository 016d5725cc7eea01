from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import ds_finepage

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"
README_LINES = ["pip install . && ds-finepage demo", "pip install '.[test]' && pytest"]


def test_the_readme_and_the_ci_script_hold_the_same_two_lines() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert README_LINES in [block.splitlines() for block in blocks]
    run = [shlex.split(line)[1] for line in re.findall(r"^run .*$", SCRIPT.read_text(), re.M)]
    assert run[:2] == README_LINES
    assert run[2:] == ["ruff check", "ruff format --check", "mypy"]


def test_the_ci_script_is_executable_and_parses() -> None:
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_the_ci_script_stops_where_the_left_of_an_and_fails(tmp_path: Path) -> None:
    """``set -e`` alone would go on after a failed ``pip install`` and report success."""
    text = SCRIPT.read_text()
    functions = text[text.index("run() {") :].split("}\n", 1)[0] + "}\n"
    script = f"set -euo pipefail\n{functions}run 'false && true'\ntouch {tmp_path}/went_on\n"
    assert subprocess.run(["bash", "-c", script], stdout=subprocess.DEVNULL).returncode == 1
    assert not (tmp_path / "went_on").exists()


def test_pyproject_has_no_project_table() -> None:
    """One would make setuptools ignore the dependencies and scripts of setup.py."""
    tables = re.findall(r"^\[+([^\]]+)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert tables and all(t == "build-system" or t.startswith("tool.") for t in tables)


def test_the_version_is_the_same_everywhere() -> None:
    found = re.search(r'^    version="(.+)",$', (ROOT / "setup.py").read_text(), re.M)
    assert found is not None and found[1] == ds_finepage.__version__
