"""The arm ``plain``: transformers alone, with all weights on the device."""

from __future__ import annotations

import torch

from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.loading import load_model


class PlainEngine(Engine):
    """A model on the device; a forward copies nothing."""

    def place(self) -> None:
        """Move the model to the device."""
        if self.device.type == "cpu":
            for weight in self.model.parameters():
                weight.data = weight.data.clone()
        self.model.to(self.device)


def load(request: RunRequest) -> PlainEngine:
    """Load the model."""
    return PlainEngine(load_model(request), torch.device(request.device))
