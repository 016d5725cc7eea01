"""The host waits for the device between passes only, and where a wait is part of the plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ds_finepage.execution.reload_sources import ReloadSources
from ds_finepage.execution.routed import RoutedReload
from tests.accelerator.subjects import Subject, subject
from tests.integration.families import token_ids

NUM_STEPS = 4


class Steps:
    """Decode steps of one generation, all of which run the same plan."""

    def __init__(self, found: Subject) -> None:
        self._model = found.model
        self._ids = token_ids(1).to(found.device)
        with torch.no_grad():
            out = self._model(token_ids(17).to(found.device), use_cache=True)
        self._cache = out.past_key_values
        for _ in range(NUM_STEPS):
            self.run()

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            out = self._model(self._ids, past_key_values=self._cache, use_cache=True)
        found: torch.Tensor = out.logits
        return found


def waits_of(card: Any, steps: Steps) -> Counter[str]:
    """Run one step; return the functions in which the host waited, and how often."""
    with card.syncs_recorded() as found:
        steps.run()
    known = {"gather_rows": ReloadSources.gather_rows, "__call__": RoutedReload.__call__}
    names: Counter[str] = Counter()
    for reason, stack in found:
        (name, *_) = [n for n in known if f", in {n}\n" in stack.rpartition("ds_finepage")[2]] or [
            f"{reason}: {stack}"
        ]
        names[name] += 1
    return names


@pytest.mark.parametrize("share", (0, 1))
def test_a_decode_step_waits_for_its_tokens_alone(
    device: torch.device, card: Any, share: int
) -> None:
    """The rows of an embedding are chosen in host memory, which is once a pass, before it."""
    found = subject(device, "llama")
    steps = Steps(found)
    found.at(found.budgets[share])
    steps = Steps(found)
    assert waits_of(card, steps) == {"gather_rows": 1}
    found.detach()


def test_a_decode_step_with_all_weights_on_the_device_never_waits(
    device: torch.device, card: Any
) -> None:
    found = subject(device, "llama")
    steps = Steps(found)
    card.set_sync_debug_mode("error")
    steps.run()
    card.set_sync_debug_mode("default")
    found.detach()


def test_a_decode_step_waits_once_for_each_reload_of_chosen_experts(
    device: torch.device, card: Any
) -> None:
    found = subject(device, "mixtral", num_local_experts=8)
    Steps(found)
    found.at(found.budgets[0])
    steps = Steps(found)
    step = max((m for m, _ in found.handle.plans()), key=lambda m: len(m.routed))
    print(waits_of(card, steps), len(step.routed), step.routed)
    found.detach()
