"""Lets the n-th allocation, copy or kernel of the test device fail, and looks at what remains.

    python -m tests.accelerator.failures docs/negative_proofs.md

runs every n that the tests take samples of, and writes the table of the document.
"""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ds_finepage
from ds_finepage.errors import FinepageError
from tests.device import loading
from tests.integration.families import SLOW_LINK, make_model, token_ids

CLEAR = (torch.OutOfMemoryError, torch.AcceleratorError, FinepageError)
"""Errors that a caller can tell apart from a fault of the program."""

MARK = "<!-- python -m tests.accelerator.failures docs/negative_proofs.md -->"
END = "<!-- end -->"
KINDS = {"alloc": "an allocation", "h2d": "a reload", "d2h": "an offload", "kernel": "a kernel"}

SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
NEW_TOKENS = 6
ENOUGH = 3
"""Runs that end before the failure is reached; later ones would not reach it either."""


@dataclass
class Found:
    """What happened, n by n.

    Attributes:
        raised: The n whose failure came out as a clear error.
        survived: The n that failed without an error: the call worked all the same.
        beyond: The n that the run did not reach.
        faults: What was wrong, in words.
        errors: Counts the messages.
    """

    raised: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)


class Tower(torch.nn.Module):
    """A small model with an embedding; it is captured in a fraction of a second."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 32)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(num_parts))

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
        (found.survived if card.counters()[kind] >= nth else found.beyond).append(nth)
    except CLEAR as error:
        found.raised.append(nth)
        found.errors[f"{type(error).__name__}: {str(error).splitlines()[0]}"] += 1
    except Exception as error:
        found.faults.append(f"{nth}: {error!r}")
    finally:
        card.fail_nth(kind, 0)


def load_and_first_pass(
    device: torch.device, kind: str, which: Iterable[int], *, num_parts: int = 2
) -> Found:
    """Let operations fail from attach to the end of the first pass, each in a run of its own."""
    torch.manual_seed(0)
    found, model = Found(), Tower(num_parts).eval()
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
        if len(found.beyond) == ENOUGH:
            break
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
        if len(found.beyond) == ENOUGH:
            break
    if handle.stats.unplanned_reasons:
        found.faults.append(f"without a plan: {handle.stats.unplanned_reasons[:1]}")
    handle.detach()
    return found


def write_table(path: Path, mark: str, end: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Write a table between the marks of a document, row by row; the first row is its head."""
    lines: list[str] = []
    for cells in rows:
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if len(lines) == 1:
            lines.append(f"|{' --- |' * len(cells)}")
        before, _, rest = path.read_text().partition(mark)
        after = rest.partition(end)[2]
        path.write_text(f"{before}{mark}\n\n" + "\n".join(lines) + f"\n\n{end}{after}")


def rows_of_the_document() -> Iterator[tuple[object, ...]]:
    """Let each of the first 200 allocations fail, and samples of the others."""
    device = loading.load()
    gc.collect()
    gc.freeze()
    yield "what fails", "while", "tried", "clear error", "no error, right", "faults"
    everything, samples = range(1, 201), range(1, 201, 10)
    for kind, which in (("alloc", everything), *((k, samples) for k in ("h2d", "d2h", "kernel"))):
        for what, found in (
            ("load and first pass", load_and_first_pass(device, kind, which, num_parts=16)),
            ("a growing cache", growing_cache(device, kind, which)),
        ):
            for line in (*found.faults, *map(str, found.errors.most_common())):
                sys.stderr.write(f"{kind}, {what}: {line}\n")
            counts = tuple(map(len, (found.raised, found.survived, found.faults)))
            yield KINDS[kind], what, counts[0] + counts[1], *counts


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), MARK, END, rows_of_the_document())
