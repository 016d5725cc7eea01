"""Model configs by name, directory or file, read by transformers."""

from __future__ import annotations

import json
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_finepage.capture.shipped import CONFIG_FILE, config_text
from ds_finepage.config import nearest
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile


def load_model_config(model: str | PretrainedConfig) -> PretrainedConfig:
    """Return the config of a model.

    Args:
        model: The name of a shipped model, a directory that holds a ``config.json``, or the path of
            such a file. A config is read as transformers saves it.

    Raises:
        ConfigError: There is no such model, or transformers cannot read its config.
    """
    if isinstance(model, str):
        text, where = config_text(model)
    else:
        text, where = model.to_json_string(), type(model).__name__
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
