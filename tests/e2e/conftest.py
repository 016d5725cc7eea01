"""What whole commands run on: one tiny checkpoint, and an environment without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.integrations.deepspeed.one_process import ONE_PROCESS

ROOT = Path(__file__).parents[2]


TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}


def tiny_config(folder: Path, **changes: Any) -> str:
    """Write the config of a model that takes no time; return its path."""
    path = folder / "tiny.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return str(path)


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
    make_checkpoint(folder, tiny_config(folder))
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
