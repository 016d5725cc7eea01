"""A small checkpoint, and the engines of a comparison on it, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.engine import RunRequest
from ds_finepage.compare.modelling import model_arm
from ds_finepage.compare.orchestrate import completed, make_prompts
from ds_finepage.compare.worker import Worker
from ds_finepage.modeller import Modeller
from ds_finepage.reporting.results import Run
from tests.integration.engines import static_tokens
from tests.unit.compare import runs


@dataclass(frozen=True)
class Compared:
    """What the arms of a comparison run."""

    folder: Path
    ds_config: dict[str, Any]
    models: Modeller
    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids, a row for each sequence."""
        return make_prompts(self.folder, batch=self.batch, prompt_tokens=self.prompt_tokens)

    def plain(self) -> Any:
        """Load the model into plain transformers."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)

    def tokens(self, model: Any) -> list[list[int]]:
        """Return the tokens that plain transformers generates."""
        found: list[list[int]] = static_tokens(
            model, torch.tensor(self.prompts), self.new_tokens
        ).tolist()
        return found

    def request(self, arm: str, **changes: Any) -> RunRequest:
        """Ask for a run of an arm, as a comparison does."""
        given = {
            "ds_config": self.ds_config,
            "budget_bytes": self.models.budget_bytes,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "settings": model_arm(ARMS[arm], self.models).settings,
            "prompt_ids": self.prompts,
        }
        return runs.request(arm, self.folder, **{**given, **changes})

    def run(self, arm: str, folder: Path, **changes: Any) -> tuple[Run, list[Any]]:
        """Run an arm; return what was found, with its modelled figures, and the tokens."""
        made = Worker(self.request(arm, **changes))
        found = made.run(folder)
        modelled = model_arm(ARMS[arm], self.models)
        return completed(found, modelled, self.models.weight_bytes), made.tokens
