"""Loads the model of a comparison in host memory; every arm gets the same weights and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ds_finepage.compare.engine import RunRequest


def dtype_of(ds_config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that DeepSpeed gives a model under a ds_config."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(section, {}).get("enabled"):
            return dtype
    return torch.float32


def load_model(request: RunRequest, **options: Any) -> Any:
    """Load the checkpoint of a request into host memory, without any engine.

    Args:
        request: The run.
        **options: More arguments of ``from_pretrained``.
    """
    dtype = dtype_of(request.ds_config)
    model = AutoModelForCausalLM.from_pretrained(request.model_dir, dtype=dtype, **options)
    return model.eval()
