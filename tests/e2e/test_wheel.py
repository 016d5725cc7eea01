"""The wheel: what it contains, and what a user's type checker finds in it."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "ds_finepage", "examples")

USER = """
import ds_finepage

reveal_type(ds_finepage.attach)
reveal_type(ds_finepage.handle_of(object()))
ds_finepage.attach()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, because building leaves files beside the sources."""
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(folder / "source")],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ds_finepage").rglob("*")
        if path.suffix in (".py", ".json", ".html") or path.name == "py.typed"
    }
    found = set(wheel.namelist())
    assert {name.rpartition(".")[2] for name in expected} == {"py", "json", "html", "typed"}
    assert expected - found == set()
    assert "ds_finepage/examples/generate.py" in found
    assert any(name.endswith("/LICENSE") and ".dist-info/" in name for name in found)
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in found)


def test_the_metadata_says_who_what_and_under_which_terms(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    found = email.message_from_bytes(wheel.read(name))
    licences = (found["License"], found["License-Expression"])
    assert "Apache-2.0" in licences
    assert found["Author"] and found["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert "# ds_finepage" in str(found.get_payload())
    requirements = [r for r in found.get_all("Requires-Dist", []) if "extra" not in r]
    needed = {re.split(r"\W", r)[0] for r in requirements}
    assert needed >= {"deepspeed", "pydantic", "torch", "transformers", "wrapt"}
    assert {"report", "test", "trained"} <= set(found.get_all("Provides-Extra", []))


def test_the_packaged_files_import(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import ds_finepage; print(ds_finepage.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()) == tmp_path / "ds_finepage" / "__init__.py"


def test_a_users_type_checker_finds_the_types(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    wheel.extractall(site)
    (tmp_path / "user.py").write_text(USER)
    python = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("MYPYPATH", "PYTHONPATH")},
        check=False,
        capture_output=True,
        text=True,
    )
    attach, handle, mistake, summary = done.stdout.splitlines()
    assert "def (module: " in attach and attach.endswith('Handle"')
    assert handle.endswith('Handle"')
    assert "[call-arg]" in mistake
    assert summary.startswith("Found 1 error")
