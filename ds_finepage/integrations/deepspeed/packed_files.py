"""Files that keep packed weights for the next start: ``finepage.weights_dir``.

A file is an ordinary safetensors file. Its name and its metadata say which checkpoint was packed in
which form, so that it serves the same checkpoint alone. It is written tensor by tensor, so writing
takes no host memory to speak of.

Imported only while a checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.checkpoint_files import DTYPES
from ds_finepage.integrations.deepspeed.deferred import open_files
from ds_finepage.integrations.transformers.packed_loading import VERSION
from ds_finepage.packing.form import PackedForm

logger = logging.getLogger(__name__)


class PackedFile:
    """The file of one checkpoint in one form.

    Attributes:
        path: Where it is, or would be.
    """

    def __init__(
        self, folder: str, model: Any, files: Sequence[str], form: PackedForm, dtype: Any
    ) -> None:
        """Find its name.

        Args:
            folder: The ``weights_dir``.
            model: The model, before its weights come.
            files: The checkpoint.
            form: Of the packed weights.
            dtype: Of scales, minima and the weights that are not packed.
        """
        key = {
            "version": VERSION,
            "form": f"{form.name} in groups of {form.group}",
            "dtype": str(dtype),
            "model": _config_of(model),
            "files": [_signs_of(file) for file in files],
        }
        self._key = json.dumps(key, sort_keys=True)
        name = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        self.path = Path(folder) / f"{type(model).__name__}-{form.name}-{name}.safetensors"

    def read(self) -> dict[str, torch.Tensor] | None:
        """Return its tensors, unread; None where there is no file yet.

        Raises:
            ConfigError: The file is damaged, or of another model, form or version.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                found = (file.metadata() or {}).get("finepage")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self.path} cannot be read: {error}. Delete it.") from error
        if found != self._key:
            raise ConfigError(
                f"{self.path} has the packed weights of another model, form or version. Delete it, "
                "or give finepage.weights_dir another folder."
            )
        return open_files([self.path])

    def write(self, model: torch.nn.Module) -> None:
        """Keep the weights of a model; where there is no room, say so and go on.

        Args:
            model: Packed; tensors on the meta device are those that the checkpoint did not bring,
                tied ones among them.
        """
        tensors = {name: t.contiguous() for name, t in model.state_dict().items() if not t.is_meta}
        unusual = {str(t.dtype) for t in tensors.values()} - set(map(str, DTYPES.values()))
        if unusual:
            logger.warning("packed weights are not kept: some are %s", ", ".join(sorted(unusual)))
            return
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary, {"format": "pt", "finepage": self._key})
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except (OSError, SafetensorError) as error:
            logger.warning("packed weights are not kept for the next start: %s", error)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _config_of(model: Any) -> Any:
    """Return a model's config, without what depends on where it lies and how it is loaded."""
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version"):
        config.pop(name, None)
    return [type(model).__name__, json.loads(json.dumps(config, default=str))]


def _signs_of(file: str) -> tuple[str, int, int]:
    """Return the signs by which a file of a checkpoint is known: name, bytes, time of change."""
    status = os.stat(file)
    return Path(file).name, status.st_size, status.st_mtime_ns
