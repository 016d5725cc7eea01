"""Model configs by name, directory or file, read by transformers.

The shipped ones lie in the folder beside this module: the contents of the ``config.json`` that was
published with each model, so dimensions without weights. Nothing here asks the network.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_finepage.config import did_you_mean, nearest
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile

_FOLDER = resources.files("ds_finepage.capture") / "models"
_SUFFIX = ".json"
CONFIG_FILE = "config.json"


def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def load_model_config(name_or_path: str) -> PretrainedConfig:
    """Return the config of a model.

    Args:
        name_or_path: The name of a shipped model, a directory that holds a ``config.json``, or the
            path of such a file.

    Raises:
        ConfigError: There is no such model, or transformers cannot read its config.
    """
    if name_or_path in model_names():
        text = (_FOLDER / (name_or_path + _SUFFIX)).read_text(encoding="utf-8")
        return _read(text, f"model {name_or_path!r}")
    path = Path(name_or_path)
    if path.is_dir():
        path = path / CONFIG_FILE
    elif not path.is_file() and len(path.parts) == 1 and path.suffix != _SUFFIX:
        raise ConfigError(
            f"unknown model {name_or_path!r}. {did_you_mean(name_or_path, model_names())} "
            f"Or give a directory with a {CONFIG_FILE}, or the path of such a file."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read model config {path}: {error}") from error
    return _read(text, f"model config {path}")


def positions_of(config: PretrainedConfig) -> int | None:
    """Return how many positions a model has; None where it does not say."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def default_dtype(config: PretrainedConfig, profile: HardwareProfile) -> str:
    """Choose the dtype of a model on a machine: the config's own, where that is fast.

    Cards before Ampere have no bfloat16, and float16 takes its place: the bytes are the same.
    A config that names no dtype gets float16.
    """
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float16"
    found = str(own).removeprefix("torch.")
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(found)
    if other in profile.flops_per_s and found not in profile.flops_per_s:
        return other
    return found


def _read(text: str, where: str) -> PretrainedConfig:
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not an object but {type(found).__name__}")
    kind = found.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(
            f"{where} has no model_type; transformers cannot tell what it is. It must be the "
            f"{CONFIG_FILE} of a transformers model."
        )
    if kind not in CONFIG_MAPPING:
        hint = nearest(kind, CONFIG_MAPPING)
        raise ConfigError(
            f"{where}: transformers does not know model_type {kind!r}. {hint}".strip()
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(found)
    except Exception as error:  # each config class checks in its own way
        raise ConfigError(f"{where}: transformers cannot read it: {error}") from error
    assert isinstance(config, PretrainedConfig)
    return config
