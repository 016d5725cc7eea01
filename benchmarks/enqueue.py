"""How long the host takes to hand a decode step to the device, task by task.

    python benchmarks/enqueue.py --device cuda --out benchmarks/enqueue_DATE.json

A steady decode step is enqueued without waiting for the device, on one core. The figures are the
host's processor time, over the tasks of the step:

- ds_finepage: one run of the executor, from the arguments of the call to its results, with all
  copies, events and waits, under half of what the model needs;
- PyTorch: the same step's ops, recorded from plain transformers and called again one after another
  with the arguments that they had;
- plain transformers: its forward, with the Python of its modules.

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from day_common import device_of, parser_of, reason_of, report, synchronize
from host_time import make_model
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
        cache = self._out.past_key_values
        self._out = self._model(self._token, past_key_values=cache, use_cache=True)
        self._done += 1


@contextmanager
def one_core() -> Iterator[None]:
    """Let this thread run on one core, and threads that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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


def by_plan(
    hidden: int, layers: int, device: torch.device, num_steps: int
) -> tuple[list[float], int, int, float | None]:
    """Measure ds_finepage.

    Args:
        hidden: Size of the model.
        layers: Its layers.
        device: Where to run.
        num_steps: Steps that count.

    Returns:
        Seconds of each step; the tasks of a step; its copies and tasks together; the seconds of a
        step that the device counts as its own, None where it does not count.
    """
    model = make_model(hidden, layers)
    handle = attach(model, device_budget="1GiB", device=device)
    decoding = Decoding(model, device, num_steps)
    for _ in range(num_steps):
        decoding.prepare()
        decoding.step()
    stats = handle.stats
    handle.replan(budget_bytes=max(stats.min_budget_bytes, stats.needed_budget_bytes // 2))
    for _ in range(num_steps):
        decoding.prepare()
        decoding.step()
    spent: list[float] = []
    run: Callable[..., Any] = Executor.run

    def timed(*args: Any, **kwargs: Any) -> Any:
        before = counted().get("enqueue_ns", 0)
        start = time.thread_time()
        found = run(*args, **kwargs)
        spent.append(time.thread_time() - start)
        of_device.append(counted().get("enqueue_ns", 0) - before)
        return found

    counted = getattr(torch.get_device_module(device), "counters", dict)
    seconds: list[float] = []
    of_device: list[int] = []
    with mock.patch.object(Executor, "run", timed), one_core():
        for _ in range(3 + num_steps):
            decoding.prepare()
            spent.clear()
            decoding.step()
            seconds.append(sum(spent))
    synchronize(device)
    step = max(handle._runner.table.passes, key=lambda p: p.stats().num_runs)
    assert step.executor is not None
    num_steps_of_pass = len(step.executor._steady.merged)
    num_tasks = len(step.graph.tasks)
    handle.detach()
    device_s = statistics.median(of_device) / 1e9 or None
    return seconds[3:], num_tasks, num_steps_of_pass, device_s


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


def measure(name: str, device: torch.device, num_steps: int) -> dict[str, Any]:
    """Measure one model; return the row of the report."""
    hidden, layers = SHAPES[name]
    torch._dynamo.reset()
    ours, num_tasks, num_steps_of_pass, device_s = by_plan(hidden, layers, device, num_steps)
    forward, alone, num_ops = plain(hidden, layers, device, num_steps)

    def us(seconds: list[float], count: int) -> list[float]:
        return [q / count * 1e6 for q in statistics.quantiles(seconds)]

    cells: dict[str, Any] = {
        "model": name,
        "tasks": num_tasks,
        "tasks_and_copies": num_steps_of_pass,
    }
    for what, seconds, count in (
        ("ds_finepage", ours, num_tasks),
        ("pytorch", alone, num_ops),
        ("plain_transformers", forward, num_ops),
    ):
        low, middle, high = us(seconds, count)
        cells[f"{what}_us_a_task"] = middle
        cells[f"{what}_quartiles"] = f"{low:.1f} to {high:.1f}"
        cells[f"{what}_fastest_us"] = min(seconds) / count * 1e6
    cells["device_us_a_task"] = None if device_s is None else device_s / num_tasks * 1e6
    return cells


def main() -> None:
    """Measure all models and print them."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON there")
    arguments = parser.parse_args()
    device = device_of(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in list(SHAPES)[: 1 if arguments.tiny else None]:
        try:
            cells = measure(name, device, TINY_STEPS if arguments.tiny else STEPS)
        except Exception as error:
            cells = {"model": name, "remark": reason_of(error)}
        report("enqueue", **cells)
        rows.append({"device": device.type, **cells})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
