"""Runs one arm with one batch in a process of its own.

    python -m ds_finepage.compare.worker REQUEST.json FOLDER

First two calls of ``generate`` are counted: copies are real, and a meter reads the device's
allocator from just before the engine moves anything onto the device. The second one is steady. Then
the timed calls run without the meter. Last, one call is recorded for the timelines.

FOLDER gets ``run.json`` with the figures, ``tokens.json``, and the plans of the passes. An error of
the engine is a run too, with its reason.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from pydantic import TypeAdapter

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.engine import Engine, RunRequest, load_request
from ds_finepage.compare.stopwatch import Forward, Stopwatch, median_ns
from ds_finepage.errors import reason_of
from ds_finepage.execution.device import device_of
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.probe import probe
from ds_finepage.files import write_file
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Timeline
from ds_finepage.integrations.deepspeed.one_process import (
    makes_partitions_late,
    use_device_of_rank,
)
from ds_finepage.reporting.results import (
    DECODE,
    PREFILL,
    ObservedPass,
    PhaseFigures,
    Run,
    save_passes,
)

RUN_FILE, TOKENS_FILE = "run.json", "tokens.json"
NUM_COUNTED = 2
"""Counted calls: the first one captures, plans and traces; the second one is steady."""
NUM_RECORDED = 3
"""Recorded calls: a pass knows the time before its lanes begin from its second recorded run on."""

RUNS: TypeAdapter[Run] = TypeAdapter(Run)
USAGE = "usage: python -m ds_finepage.compare.worker REQUEST.json FOLDER"


@dataclass(slots=True)
class Counted:
    """The figures of the counted calls.

    Attributes:
        load_ns: Time to load the model and to place it on the device.
        first_token_ns: Time from the first call of ``generate`` to the end of its prefill.
        capture_ns: The part of it that went to capture; None if the engine cannot tell.
        plan_ns: The part of it that went to planning.
        peak_bytes: Most live device bytes.
        forwards: The forwards of the last call.
    """

    load_ns: int = 0
    first_token_ns: int = 0
    capture_ns: int | None = None
    plan_ns: int | None = None
    peak_bytes: int = 0
    forwards: tuple[Forward, ...] = ()


class Worker:
    """One run.

    Attributes:
        tokens: The tokens of every call.
    """

    def __init__(self, request: RunRequest) -> None:
        """Prepare a run."""
        self.tokens: list[list[list[int]]] = []
        self._request = request
        self._ids = torch.tensor(request.prompt_ids)

    def run(self, folder: Path) -> Run:
        """Run the arm; write the plans of its passes.

        Args:
            folder: The folder of the run.

        Raises:
            FinepageError: The engine could not run, or ran without a plan.
        """
        request = self._request
        module = import_module(ARMS[request.arm].module)  # which takes seconds
        start = time.perf_counter_ns()
        engine: Engine = module.load(request)
        try:
            counted = self._count(engine, start)
            timed = [self._generate(engine) for _ in range(request.repeats)]
            passes = self._observe(engine)
            save_passes(passes, folder)
            rate = probe(engine.device).h2d_bytes_per_s
            return self._figures(engine, counted, timed, passes, rate)
        finally:
            engine.close()

    def _generate(self, engine: Engine, watch: Stopwatch | None = None) -> list[Forward]:
        """Generate once; return the forwards."""
        request, watch = self._request, watch or Stopwatch(engine)
        ids = self._ids.to(engine.device)
        with watch.watching(), torch.no_grad():
            found = engine.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.new_tokens,
                min_new_tokens=request.new_tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=True,  # compiled code would round differently
            )
        self.tokens.append(found.tolist())
        return watch.forwards

    def _count(self, engine: Engine, start_ns: int) -> Counted:
        """Place the model, and generate with the meter on."""
        found = Counted()

        def split() -> None:
            found.capture_ns, found.plan_ns = engine.split_ns()

        meter, is_late = DeviceMeter(engine.device), makes_partitions_late(engine.device.type)
        with ExitStack() as stack:
            if not is_late:
                stack.enter_context(meter)
            stack.enter_context(engine.counting())
            engine.place()
            if is_late:
                stack.enter_context(meter)
            placed_ns = time.perf_counter_ns()
            found.load_ns = placed_ns - start_ns
            first = Stopwatch(engine, on_first=split)
            self._generate(engine, first)
            assert first.first_end_ns is not None, "generate calls the model"
            found.first_token_ns = first.first_end_ns - placed_ns
            for _ in range(NUM_COUNTED - 1):
                found.forwards = tuple(self._generate(engine))
        found.peak_bytes = meter.peak_bytes
        return found

    def _observe(self, engine: Engine) -> list[ObservedPass]:
        if not (self._request.observes and ARMS[self._request.arm].observes):
            return []
        engine.record()
        for _ in range(NUM_RECORDED):
            self._generate(engine)
        return list(engine.observed())

    def _figures(
        self,
        engine: Engine,
        counted: Counted,
        timed: list[list[Forward]],
        passes: list[ObservedPass],
        probe_rate: float,
    ) -> Run:
        prefill_ns = median_ns([call[0] for call in timed])
        # The first step follows another pass.
        decode_ns = median_ns([step for call in timed for step in call[2:] or call[1:]])
        if counted.plan_ns is not None and counted.capture_ns is None:
            counted.capture_ns = max(0, counted.first_token_ns - counted.plan_ns - prefill_ns)
        by_name = {found.name: found for found in passes}
        decode = by_name.get(DECODE)
        return Run(
            arm=self._request.arm,
            batch=self._request.batch,
            budget_bytes=self._request.budget_bytes,
            peak_bytes=counted.peak_bytes,
            prefill=_phase(counted.forwards[0], prefill_ns, by_name.get(PREFILL)),
            decode=_phase(counted.forwards[-1], decode_ns, decode),
            load_ns=counted.load_ns,
            capture_ns=counted.capture_ns,
            plan_ns=counted.plan_ns,
            link_bytes_per_s=_link_rate(decode, counted.forwards[-1]),
            probe_bytes_per_s=probe_rate,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            pinned_bytes=device_of(engine.device).pinned_bytes,
            settings=dict(engine.settings),
            notes=tuple(engine.notes),
        )


def _phase(counted: Forward, wall_ns: int, observed: ObservedPass | None) -> PhaseFigures:
    return PhaseFigures(
        h2d_bytes=counted.h2d_bytes,
        d2h_bytes=counted.d2h_bytes,
        wall_ns=wall_ns,
        predicted_ns=None if observed is None else observed.predicted.total_ns,
    )


def _link_rate(observed: ObservedPass | None, counted: Forward) -> float | None:
    """Return the rate of a step's copies while copies were under way; None if not recorded."""
    if observed is None or observed.measured is None or not counted.h2d_bytes:
        return None
    busy = busy_ns(observed.measured, Lane.H2D)
    return counted.h2d_bytes * 1e9 / busy if busy else None


def busy_ns(timeline: Timeline, lane: Lane) -> int:
    """Return the time during which a lane had work."""
    return sum(span.end_ns - span.start_ns for span in timeline.spans if span.lane is lane)


def main(arguments: list[str]) -> None:
    """Run a request, and write what came of it; a rank of several that failed also says so."""
    if len(arguments) != 2:
        sys.exit(USAGE)
    request, folder = load_request(Path(arguments[0])), Path(arguments[1])
    logging.basicConfig(level=logging.INFO)
    use_device_of_rank()
    device = device_of(request.device)
    worker = Worker(request)
    try:
        device.limit_memory(request.budget_bytes)
        found = worker.run(folder)
    except Exception as error:
        traceback.print_exc()
        found = Run(
            arm=request.arm,
            batch=request.batch,
            budget_bytes=request.budget_bytes,
            reason=reason_of(error),
            out_of_memory=isinstance(error, torch.OutOfMemoryError),
            settings={},
        )
    write_file(folder / TOKENS_FILE, json.dumps(worker.tokens))
    write_file(folder / RUN_FILE, RUNS.dump_json(found))
    if found.reason is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit(1)  # the other ranks wait for this one


if __name__ == "__main__":
    main(sys.argv[1:])
