"""Small models and cards as files, for the tests of the commands that plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
}
NUM_PARAMETERS = 2 * 500 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256


def small_model(folder: Path, name: str = "small", **changes: Any) -> Path:
    """Write a model's directory."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path


def card(folder: Path, name: str = "little", **changes: Any) -> Path:
    """Write a hardware profile: the T4's with other figures; None leaves one out."""
    shipped = ROOT / "ds_finepage" / "graph" / "profiles" / "t4.json"
    figures = {**json.loads(shipped.read_text()), "name": name, **changes}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({k: v for k, v in figures.items() if v is not None}))
    return path
