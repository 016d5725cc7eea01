"""What whole commands run on: one tiny checkpoint, and an environment without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_finepage.cli.demo import TINY
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.run import ONE_PROCESS

ROOT = Path(__file__).parents[2]


def finepage(
    *words: object, environment: dict[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own; it has to end well."""
    code = "import sys; from ds_finepage.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, TINY)
    return folder


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return an environment for processes; the package is the one of this checkout."""
    kept = {k: v for k, v in os.environ.items() if k not in ONE_PROCESS}
    bin_folder = str(Path(sys.executable).parent)  # of the launcher
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
