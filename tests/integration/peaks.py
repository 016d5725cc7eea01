"""The host bytes that a load of a large checkpoint adds to a process at its peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.families import make_model

HAS_PEAKS = Path("/proc/self/clear_refs").exists()

MEASURE = """
import gc, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from ds_finepage.run import prepare_one_process
prepare_one_process()
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

small, large, config, *saved = sys.argv[1:]
keep_alive = HfDeepSpeedConfig(json.loads(config))
AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16)  # imports, process group
gc.collect()
before = resident("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
model = AutoModelForCausalLM.from_pretrained(large, dtype=torch.bfloat16)
print(resident("VmHWM:") - before, sum(p.nbytes for p in model.parameters()))
if saved:
    model.save_pretrained(*saved)
"""

LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24}),
    "tied": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 18,
            "vocab_size": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "wide": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 16,
            "vocab_size": 32768,
        },
    ),
    "mixtral": (
        "mixtral",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 20,
            "num_local_experts": 8,
        },
    ),
}


def make_large(name: str, folder: Path) -> int:
    """Save a small model, and a large one of several files; return the bytes of the large one."""
    family, changes = LARGE[name]
    make_model(family, torch.bfloat16, hidden_size=128).save_pretrained(folder / "small")
    with torch.device("meta"):
        model = make_model(family, torch.bfloat16, **changes)
    model.to_empty(device="cpu").tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(folder / "large", max_shard_size="50MB")
    files = list((folder / "large").glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    assert len(files) > 1 and 120e6 < num_bytes < 180e6
    return num_bytes


def peak_of_load(folder: Path, name: str, config: dict[str, Any], *saves: Path) -> tuple[int, int]:
    """Load a checkpoint in another process, after a small one.

    Args:
        folder: Has the small checkpoint, and the other one.
        name: Of the other one.
        config: The ds_config.
        saves: A folder in which the loaded model is saved, or none.

    Returns:
        The host bytes that the load added at its peak, and the bytes of the parameters.
    """
    paths = folder / "small", folder / name
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths, json.dumps(config), *saves],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    peak_bytes, num_bytes = map(int, done.stdout.split()[-2:])
    return peak_bytes, num_bytes
