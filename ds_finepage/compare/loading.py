"""Loads the model of a comparison in host memory; every arm gets the same weights and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ds_finepage.compare.engine import RunRequest
from ds_finepage.config import SECTION
from ds_finepage.graph.packed import GROUP
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model


def dtype_of(ds_config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that DeepSpeed gives a model under a ds_config."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(section, {}).get("enabled"):
            return dtype
    return torch.float32


def form_of(ds_config: Mapping[str, Any]) -> PackedForm | None:
    """Return the packed form that a ds_config asks for; None if it asks for none.

    Raises:
        ConfigError: There is no such form.
    """
    section = ds_config.get(SECTION, {})
    name = section.get("weights")
    if name is None:
        return None
    form = PackedForm.parse(name, section.get("weights_group", GROUP))
    return replace(form, fused=bool(section.get("fused_unpacking")))


def load_model(
    request: RunRequest, pack: Callable[[torch.nn.Module, PackedForm], object] = pack_model
) -> Any:
    """Load the checkpoint of a request into host memory, packed if the ds_config says so.

    Raises:
        ConfigError: The form does not suit the model.
    """
    model, form = load_unpacked(request), form_of(request.ds_config)
    if form is not None:
        pack(model, form)
    return model


def load_unpacked(request: RunRequest) -> Any:
    """Load the checkpoint of a request as it is."""
    dtype = dtype_of(request.ds_config)
    return AutoModelForCausalLM.from_pretrained(request.model_dir, dtype=dtype).eval()
