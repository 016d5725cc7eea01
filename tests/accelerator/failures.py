"""Lets the n-th allocation, copy or kernel of the test device fail, and looks at what remains."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import ds_finepage
from ds_finepage.errors import FinepageError
from tests.integration.families import SLOW_LINK, make_model, token_ids

CLEAR = (torch.OutOfMemoryError, torch.AcceleratorError, FinepageError)
"""Errors that a caller can tell apart from a fault of the program."""

SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
NEW_TOKENS = 6


@dataclass
class Found:
    """What happened, n by n.

    Attributes:
        raised: The n whose failure came out as a clear error.
        faults: What was wrong, in words.
    """

    raised: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Tower(torch.nn.Module):
    """A small model with an embedding; it is captured in a fraction of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 32)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        for part in self.parts:
            h = torch.tanh(part(h)) + h
        return h


def live_bytes() -> int:
    """Return the live bytes of the device when nothing is under way."""
    gc.collect()
    torch.accelerator.synchronize()
    return int(torch.accelerator.memory_allocated())


def inject(
    found: Found, kind: str, nth: int, run: Callable[[], torch.Tensor], expected: torch.Tensor
) -> None:
    """Run once with a failure; note what comes out.

    Args:
        found: Takes it.
        kind: "alloc", "h2d", "d2h" or "kernel".
        nth: The operation that fails.
        run: The run; it returns a tensor on the CPU.
        expected: What it returns without a failure.
    """
    card = torch.get_device_module("slowcard")
    card.reset_counters()
    card.fail_nth(kind, nth)
    try:
        if not torch.equal(run(), expected):
            found.faults.append(f"{nth}: a wrong result and no error")
        if card.counters()[kind] < nth:
            found.faults.append(f"{nth}: there are not so many")
    except CLEAR:
        found.raised.append(nth)
    except Exception as error:
        found.faults.append(f"{nth}: {error!r}")
    finally:
        card.fail_nth(kind, 0)


def load_and_first_pass(device: torch.device, kind: str, which: Iterable[int]) -> Found:
    """Let operations fail from attach to the end of the first pass, each in a run of its own."""
    torch.manual_seed(0)
    found, model = Found(), Tower().eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        expected = model(ids)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    on_device = ids.to(device)
    handles: list[Any] = []

    @torch.no_grad()
    def run() -> torch.Tensor:
        if not handles:
            handles.append(ds_finepage.attach(model, device_budget="1MiB", device=device))
        result = model(on_device).cpu()
        assert isinstance(result, torch.Tensor)
        return result

    for nth in which:
        torch._dynamo.reset()
        before = live_bytes()
        inject(found, kind, nth, run, expected)
        if not handles and not all(
            v.is_cpu and torch.equal(v, values[k]) for k, v in model.state_dict().items()
        ):
            found.faults.append(f"{nth}: attach failed and changed the model")
        if not torch.equal(run(), expected):
            found.faults.append(f"{nth}: the next call is wrong")
        stats = handles[0].stats
        if stats.unplanned_reasons or stats.num_unplanned_graphs:
            found.faults.append(f"{nth}: without a plan, {stats.unplanned_reasons[:1]}")
        handles.pop().detach()
        if live_bytes() != before:
            found.faults.append(f"{nth}: {live_bytes() - before} bytes stay on the device")
    return found


def growing_cache(device: torch.device, kind: str, which: Iterable[int]) -> Found:
    """Let operations fail while a paged Llama generates with a cache that grows."""
    found, model, ids = Found(), make_model("llama", **SMALL), token_ids(7)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(ids, **settings, disable_compile=True)
    on_device = ids.to(device)
    handle = ds_finepage.attach(model, device_budget="2GiB", device=device, profile=SLOW_LINK)

    def run() -> torch.Tensor:
        result = model.generate(on_device, **settings).cpu()
        assert isinstance(result, torch.Tensor)
        return result

    run()
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    for _ in range(3):  # until every plan is made
        assert torch.equal(run(), expected)
    before = live_bytes()
    for nth in which:
        inject(found, kind, nth, run, expected)
        if not torch.equal(run(), expected):
            found.faults.append(f"{nth}: the next call is wrong")
        if live_bytes() != before:
            found.faults.append(f"{nth}: {live_bytes() - before} bytes more on the device")
    if handle.stats.unplanned_reasons:
        found.faults.append(f"without a plan: {handle.stats.unplanned_reasons[:1]}")
    handle.detach()
    return found
