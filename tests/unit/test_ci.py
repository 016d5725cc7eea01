from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import ds_finepage
from tests.conftest import BY_DEFAULT

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"
MATRIX = ROOT / ".ci" / "matrix"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
README_LINES = ["pip install . && ds-finepage demo", "pip install '.[test]' && pytest"]


def test_the_readme_and_the_ci_script_hold_the_same_two_lines() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert README_LINES in [block.splitlines() for block in blocks]
    run = [shlex.split(line)[1] for line in re.findall(r"^run .*$", SCRIPT.read_text(), re.M)]
    assert run[:2] == README_LINES
    assert "[trained]" in run[2] and "tests/integration/test_real_weights.py" in run[2]
    assert run[3:] == ["pytest -m slow", "ruff check", "ruff format --check", "mypy"]


@pytest.mark.parametrize("script", (SCRIPT, MATRIX), ids=lambda path: path.name)
def test_the_scripts_are_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_workflow_runs_every_row_of_the_matrix() -> None:
    (rows,) = re.findall(r"^ROWS=\((.*)\)$", MATRIX.read_text(), re.M)
    (workflow,) = re.findall(r"^ +row: \[(.*)\]$", WORKFLOW.read_text(), re.M)
    assert workflow.split(", ") == rows.split()
    for row in rows.split():
        assert f"    {row})" in MATRIX.read_text()


def test_the_matrix_tests_the_ends_of_the_claimed_ranges() -> None:
    setup = (ROOT / "setup.py").read_text()
    (floors,) = re.findall(r'floors\) echo "(.*)"', MATRIX.read_text())
    for requirement in floors.split():
        name, oldest = requirement.split("==")
        (claimed,) = re.findall(rf'"{name}>=([\d.]+)', setup)
        assert oldest.removesuffix(".*").startswith(claimed)


def test_the_matrix_names_tests_that_exist() -> None:
    paths = re.findall(r"^ +(tests/\S+)$", MATRIX.read_text(), re.M)
    assert paths and all((ROOT / path).exists() for path in paths)


def test_every_test_of_the_default_line_exists() -> None:
    for name in BY_DEFAULT:
        path, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}" in (ROOT / "tests" / path).read_text()


def test_an_unknown_row_is_refused() -> None:
    done = subprocess.run([str(MATRIX), "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "no row nothing" in done.stderr


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
