"""Keeps packed matrices in a folder, so that the next start reads what an earlier one has packed.

A file is named by all that its content follows from: the bytes of the weight, its shape and dtype,
and the form. So a weight that has changed is packed again, and models can share a folder.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ds_finepage.packing.form import Packed, PackedForm, pack

VERSION = 1
"""Of the numbers that a form gives. Another one reads no file of this one."""


def pack_once(weight: torch.Tensor, form: PackedForm, name: str) -> Packed:
    """Pack a matrix, or read what was packed of it, as :func:`ds_finepage.packing.form.pack`.

    Raises:
        ConfigError: The form does not suit the weight.
        OSError: The folder of the form cannot be read or written.
    """
    if form.kept_in is None or weight.is_meta:
        return pack(weight, form, name)
    content = weight.cpu().contiguous()
    about = f"{VERSION} {form.bits} {form.group} {content.dtype} {tuple(content.shape)}"
    digest = hashlib.sha256(about.encode())
    digest.update(content.view(torch.uint8).numpy().data)
    path = Path(form.kept_in) / f"{digest.hexdigest()}.safetensors"
    try:
        return Packed(**load_file(path))
    except (FileNotFoundError, SafetensorError):  # none, or one that a full disk has cut short
        packed = pack(weight, form, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    save_file(dict(zip(Packed.__annotations__, packed, strict=True)), written)
    written.replace(path)
    return Packed(**load_file(path))  # mapped, so that it takes no memory of its own
