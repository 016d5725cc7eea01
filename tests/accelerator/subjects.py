"""Models attached on an accelerator, and what plain transformers makes of the same calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import ds_finepage
from ds_finepage.config import DebugConfig
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.handle import Handle
from tests.integration.families import SLOW_LINK, logits, make_model, token_ids, tokens

AMPLE = 256 << 20
NUM_TOKENS = 6


def plain_on(device: torch.device) -> torch.device:
    """Where plain transformers runs: the test device computes as the CPU, bit by bit."""
    return device if device.type == "cuda" else torch.device("cpu")


def attached(module: torch.nn.Module, device: Any, **settings: Any) -> Handle:
    given = {"device_budget": AMPLE, "profile": SLOW_LINK, **settings}
    return ds_finepage.attach(module, device=device, **given)


@dataclass
class Subject:
    """An attached model, with its captures made, and the results of plain transformers."""

    device: torch.device
    model: Any
    ids: torch.Tensor
    split: bool = False
    graphs: bool = False
    handle: Handle = field(init=False)
    logits: torch.Tensor = field(init=False)
    tokens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        plain, ids = self.model.to(plain_on(self.device)), self.ids.to(plain_on(self.device))
        plain.generation_config.disable_compile = True
        self.logits = logits(plain, ids).cpu()
        self.tokens = tokens(plain, ids, NUM_TOKENS, cache=None).cpu()
        self.model.to("cpu")
        self.ids = self.ids.to(self.device)
        settings = {"split": self.split, "device_graphs": self.graphs}
        self.handle = attached(self.model, self.device, **settings)
        self.check()

    def check(self) -> None:
        """Hold both kinds of calls against plain transformers."""
        assert torch.equal(logits(self.model, self.ids).cpu(), self.logits)
        assert torch.equal(self.generate().cpu(), self.tokens)

    def generate(self) -> torch.Tensor:
        return tokens(self.model, self.ids, NUM_TOKENS, cache=None)

    @property
    def budgets(self) -> tuple[int, int, int]:
        """The least budget, one in the middle, and one under which no weight is streamed."""
        stats = self.handle.stats
        assert stats.min_budget_bytes is not None and stats.needed_budget_bytes is not None
        least, needed = stats.min_budget_bytes, stats.needed_budget_bytes
        return least, (least + needed) // 2, needed

    def at(self, budget_bytes: int, *, seed: int | None = None) -> None:
        """Go on under another budget; with a seed, under poison and delays on the device."""
        debug = DebugConfig(poison_vacated=seed is not None, lane_delay_seed=seed)
        self.handle.replan(budget_bytes=budget_bytes, debug=debug)

    def check_at(self, budget_bytes: int, *, seed: int | None = None) -> None:
        """Hold results against plain transformers, and the device's own peak against the budget."""
        self.at(budget_bytes, seed=seed)
        with DeviceMeter(self.device) as meter:
            self.check()
        assert 0 < meter.peak_bytes <= budget_bytes

    def detach(self) -> None:
        """Detach, and check that every call had a plan and that the model is as it was."""
        stats = self.handle.stats
        assert not stats.unplanned_reasons
        assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
        self.handle.detach()
        values = (*self.model.parameters(), *self.model.buffers())
        assert {v.device.type for v in values} == {"cpu"}


def subject(
    device: torch.device,
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    length: int = 7,
    split: bool = False,
    graphs: bool = False,
    **config: Any,
) -> Subject:
    """Attach a tiny model of a family, with a prompt of some length."""
    model = make_model(family, dtype, **config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return Subject(device, model, token_ids(length), split, graphs)
