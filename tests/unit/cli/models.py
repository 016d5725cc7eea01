"""Small models as files, for the tests of the commands that plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
}
NUM_PARAMETERS = 2 * 500 * 256 + 3 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256


def small_model(folder: Path, name: str = "small", **changes: Any) -> Path:
    """Write a model's directory."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path
