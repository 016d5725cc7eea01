"""How long the host takes to hand a decode step to the device, task by task.

    python benchmarks/enqueue.py --device cuda --out benchmarks/enqueue_DATE.json
    python benchmarks/enqueue.py --device cuda --graphs

A steady decode step is enqueued without waiting for the device. The process has one core. The
figures are the host's processor time, over the tasks of the step:

- ds_finepage: one run of the executor, from the arguments of the call to its results, with all
  copies, events and waits, under half of what the model needs;
- beyond the ops: the same run with ops and copies that do nothing, so what is left is our own;
- PyTorch: the same step's ops, recorded from plain transformers and called again one after another
  with the arguments that they had;
- plain transformers: its forward, with the Python of its modules.

With ``--graphs`` runs of tasks are replayed as graphs (``finepage.device_graphs``).

The median of many steps counts, with the quartiles. The fastest step tells what other programs on
the machine did not disturb. A device that counts its own share of that time, as the test device
does, tells it too.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from day_common import device_of, parser_of, reason_of, report, synchronize
from host_time import CACHE, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from ds_finepage.api import attach
from ds_finepage.execution.executor import Executor

SHAPES = {"2 layers of 128": (128, 2), "4 layers of 256": (256, 4)}
PROMPT, STEPS, TINY_STEPS = 16, 60, 6


class Ops(TorchDispatchMode):
    """Records the ops that compute, with their arguments."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a call, unless its result is a view."""
        kwargs = kwargs or {}
        returned = [r.alias_info for r in func._schema.returns]
        if all(alias is None or alias.is_write for alias in returned):
            self.calls.append(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


class Decoding:
    """A model that decodes step after step, from the same prompt again when its cache is long."""

    def __init__(self, model: Any, device: torch.device, num_steps: int) -> None:
        """Run the prompt.

        Args:
            model: The model.
            device: Where its inputs are.
            num_steps: Steps from one prompt to the next.
        """
        self._model, self._device, self._num_steps = model, device, num_steps
        self._done = num_steps

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the arguments of the next step; the device is idle then."""
        if self._done == self._num_steps:
            prompt = torch.arange(1, PROMPT + 1, device=self._device)[None]
            self._out = self._model(prompt, use_cache=True)
            self._done = 0
        self._token = self._out.logits[:, -1:].argmax(-1)
        synchronize(self._device)

    @torch.no_grad()
    def step(self) -> None:
        """Enqueue a step."""
        cache = self._out[CACHE]
        self._out = self._model(self._token, **{CACHE: cache}, use_cache=True)
        self._done += 1


@contextmanager
def one_core() -> Iterator[None]:
    """Let all threads of this process run on one core.

    The streams of the test device are threads. On a core of their own they work on the memory that
    the host reads and writes at that moment, which doubles its time. The work of a card does not.
    """
    before = os.sched_getaffinity(0)
    _bind_threads({min(before)})
    try:
        yield
    finally:
        _bind_threads(before)


def _bind_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def host_times(run: Callable[[], Any], prepare: Callable[[], Any], num_steps: int) -> list[float]:
    """Measure the processor time of this thread, step by step.

    Args:
        run: Enqueues a step.
        prepare: Called before each, without counting.
        num_steps: Steps that count, after a few to warm up.
    """
    found = []
    for _ in range(3 + num_steps):
        prepare()
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return found[3:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """What a step by plan costs the host.

    Attributes:
        step_s: Seconds of each step.
        beyond_s: The same without its ops and copies.
        device_s: The seconds of a step that the device counts as its own; None if it counts none.
        num_tasks: The tasks of a step.
        num_steps: Its tasks and copies.
    """

    step_s: list[float]
    beyond_s: list[float]
    device_s: float | None
    num_tasks: int
    num_steps: int


def by_plan(
    hidden: int, layers: int, device: torch.device, num_steps: int, *, graphs: bool
) -> Enqueued:
    """Measure ds_finepage.

    Args:
        hidden: Size of the model.
        layers: Its layers.
        device: Where to run.
        num_steps: Steps that count.
        graphs: Replay runs of tasks.
    """
    model = make_model(hidden, layers)
    handle = attach(model, device_budget="1GiB", device=device, device_graphs=graphs)
    decoding = Decoding(model, device, num_steps)
    warm_up(decoding, num_steps)
    stats = handle.stats
    handle.replan(budget_bytes=max(stats.min_budget_bytes, stats.needed_budget_bytes // 2))
    warm_up(decoding, num_steps)
    module = torch.get_device_module(device)
    counted = getattr(module, "counters", dict)
    spent: list[float] = []
    of_device: list[int] = []
    last: list[Any] = []
    run: Callable[..., Any] = Executor.run

    def timed(executor: Executor, args: Any, host_outputs: Any, residents: Any) -> Any:
        last[:] = executor, (args, host_outputs, copy(residents))
        before = counted().get("enqueue_ns", 0)
        start = time.thread_time()
        found = run(executor, args, host_outputs, residents)
        spent.append(time.thread_time() - start)
        of_device.append(counted().get("enqueue_ns", 0) - before)
        return found

    with one_core():
        with mock.patch.object(Executor, "run", timed):
            warm_up(decoding, 3)
            spent.clear()
            warm_up(decoding, num_steps)
            step_s = list(spent)
            with getattr(module, "enqueuing_timed", nullcontext)():  # it takes time of its own
                of_device.clear()
                warm_up(decoding, num_steps)
        executor, arguments = last
        nothing = {step.node.id: _nothing for step in executor._steady.merged}
        with mock.patch.multiple(executor, actions=nothing, _replayed=None):
            beyond = host_times(
                lambda: executor.run(*arguments[:2], copy(arguments[2])),
                lambda: synchronize(device),
                num_steps,
            )
    handle.detach()
    return Enqueued(
        step_s=step_s,
        beyond_s=beyond,
        device_s=statistics.median(of_device) / 1e9 or None,
        num_tasks=len(executor.memgraph.graph.tasks),
        num_steps=len(executor._steady.merged),
    )


def warm_up(decoding: Decoding, num_steps: int) -> None:
    """Run some steps."""
    for _ in range(num_steps):
        decoding.prepare()
        decoding.step()


def _nothing() -> None:
    """Stand in for an op or a copy."""


def plain(
    hidden: int, layers: int, device: torch.device, num_steps: int
) -> tuple[list[float], list[float], int]:
    """Measure plain transformers, and its ops alone.

    Args:
        hidden: Size of the model.
        layers: Its layers.
        device: Where to run.
        num_steps: Steps that count.

    Returns:
        Seconds of each forward; seconds of each step of the ops alone; the ops of a step.
    """
    model = make_model(hidden, layers).to(device)
    decoding = Decoding(model, device, num_steps)
    with one_core():
        forward = host_times(decoding.step, decoding.prepare, num_steps)
        decoding.prepare()
        with Ops() as ops:
            decoding.step()

        @torch.no_grad()
        def again() -> None:
            for call in ops.calls:
                call()

        alone = host_times(again, lambda: synchronize(device), num_steps)
    return forward, alone, len(ops.calls)


def measure(name: str, device: torch.device, num_steps: int, *, graphs: bool) -> dict[str, Any]:
    """Measure one model; return the row of the report."""
    hidden, layers = SHAPES[name]
    torch._dynamo.reset()
    ours = by_plan(hidden, layers, device, num_steps, graphs=graphs)
    forward, alone, num_ops = plain(hidden, layers, device, num_steps)
    cells: dict[str, Any] = {
        "model": name,
        "graphs": graphs,
        "tasks": ours.num_tasks,
        "tasks_and_copies": ours.num_steps,
    }
    for what, seconds, count in (
        ("ds_finepage", ours.step_s, ours.num_tasks),
        ("beyond_the_ops", ours.beyond_s, ours.num_tasks),
        ("pytorch", alone, num_ops),
        ("plain_transformers", forward, num_ops),
    ):
        low, middle, high = (q / count * 1e6 for q in statistics.quantiles(seconds))
        cells[f"{what}_us_a_task"] = middle
        cells[f"{what}_quartiles"] = f"{low:.1f} to {high:.1f}"
        cells[f"{what}_fastest_us"] = min(seconds) / count * 1e6
    if ours.device_s is not None:
        cells["device_us_a_task"] = ours.device_s / ours.num_tasks * 1e6
    return cells


def main() -> None:
    """Measure all models and print them."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON there")
    parser.add_argument("--graphs", action="store_true", help="replay runs of tasks")
    arguments = parser.parse_args()
    device = device_of(arguments)
    torch.set_num_threads(1)
    names = ("torch", "transformers")
    rows: list[dict[str, Any]] = [{"device": device.type, **{n: version(n) for n in names}}]
    for name in list(SHAPES)[: 1 if arguments.tiny else None]:
        try:
            num_steps = TINY_STEPS if arguments.tiny else STEPS
            cells = measure(name, device, num_steps, graphs=arguments.graphs)
        except Exception as error:
            cells = {"model": name, "remark": reason_of(error)}
        report("enqueue", **cells)
        rows.append(cells)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
