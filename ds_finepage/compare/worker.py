"""Runs one arm with one batch in a process of its own.

    python -m ds_finepage.compare.worker REQUEST.json FOLDER...

First two calls of ``generate`` are counted: copies are real, and a meter reads the device's
allocator from just before the engine moves anything onto the device. The second one is steady. Then
the timed calls run without the meter. Last, one call is recorded for the timelines.

The FOLDER of this rank gets ``run.json`` with the figures, ``tokens.json``, and the plans of the
passes. An error of the engine is a run too, with its reason.
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
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ds_finepage.compare.arms import ARMS, DRAFTED
from ds_finepage.compare.engine import REQUESTS, Engine, RunRequest
from ds_finepage.compare.stopwatch import Forward, a_token, median_ns, timed_forwards
from ds_finepage.errors import reason_of
from ds_finepage.execution.device import device_of
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.probe import probe
from ds_finepage.files import read_file, write_file
from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.integrations.deepspeed.one_process import (
    makes_partitions_late,
    use_device_of_rank,
)
from ds_finepage.planning.bounds import lower_bound_bytes
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

    def _generate(self, engine: Engine) -> list[Forward]:
        """Generate once; return the forwards."""
        request = self._request
        ids = self._ids.to(engine.device)
        start = time.perf_counter_ns()
        with timed_forwards(engine) as forwards, torch.no_grad():
            found = engine.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.new_tokens,
                min_new_tokens=request.new_tokens,
                do_sample=False,
                cache_implementation=None if request.arm == DRAFTED else "static",
                disable_compile=True,  # compiled code would round differently
            )
        self.tokens.append(found.tolist())
        if request.arm == DRAFTED:  # a pass may yield several tokens
            wall_ns = time.perf_counter_ns() - start
            engine.notes = [f"{request.new_tokens / len(forwards):.1f} tokens a pass"]
            return [forwards[0], a_token(forwards, wall_ns, request.new_tokens)]
        return forwards

    def _count(self, engine: Engine, start_ns: int) -> tuple[dict[str, Any], list[Forward]]:
        """Place the model, and generate with the meter on; return figures and the last forwards.

        Args:
            engine: The engine.
            start_ns: When it began to load the model.
        """
        meter, is_late = DeviceMeter(engine.device), makes_partitions_late(engine.device.type)
        with ExitStack() as stack:
            if not is_late:
                stack.enter_context(meter)
            stack.enter_context(engine.counting())
            engine.place()
            if is_late:
                stack.enter_context(meter)
            load_ns = time.perf_counter_ns() - start_ns
            first = forwards = self._generate(engine)
            for _ in range(NUM_COUNTED - 1):
                forwards = self._generate(engine)
        found = {
            "load_ns": load_ns,
            "first_token_ns": load_ns + first[0].wall_ns,
            "first_call_ns": sum(forward.wall_ns for forward in first),
            "peak_bytes": meter.peak_bytes,
        }
        return found, forwards

    def _observe(self, engine: Engine) -> list[ObservedPass]:
        if not ARMS[self._request.arm].observes:
            return []
        engine.record()
        for _ in range(NUM_RECORDED):
            self._generate(engine)
        return list(engine.observed())

    def _figures(
        self,
        engine: Engine,
        counted: tuple[dict[str, Any], list[Forward]],
        timed: list[list[Forward]],
        passes: list[ObservedPass],
        probe_rate: float,
    ) -> Run:
        found, forwards = counted
        prefill_ns = median_ns([call[0] for call in timed])
        # The first step follows another pass.
        decode_ns = median_ns([step for call in timed for step in call[2:] or call[1:]])
        by_name = {each.name: each for each in passes}
        decode = by_name.get(DECODE)
        return Run(
            **found,
            arm=self._request.arm,
            batch=self._request.batch,
            budget_bytes=self._request.budget_bytes,
            prefill=_phase(forwards[0], prefill_ns, by_name.get(PREFILL)),
            decode=_phase(forwards[-1], decode_ns, decode),
            link_bytes_per_s=_link_rate(decode, forwards[-1]),
            probe_bytes_per_s=probe_rate,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            pinned_bytes=device_of(engine.device).pinned_bytes,
            settings=dict(engine.settings),
            notes=tuple(engine.notes),
        )


def _phase(counted: Forward, wall_ns: int, observed: ObservedPass | None) -> PhaseFigures:
    return PhaseFigures(
        lower_bound_bytes=None if observed is None else bound_of(observed.memgraph),
        h2d_bytes=counted.h2d_bytes,
        d2h_bytes=counted.d2h_bytes,
        wall_ns=wall_ns,
        predicted_ns=None if observed is None else observed.predicted.total_ns,
    )


def bound_of(memgraph: MemGraph) -> int:
    """Return the fewest bytes that any plan of a pass could reload in the arena of this one."""
    return lower_bound_bytes(memgraph.graph, memgraph.arena_bytes, memgraph.alignment)


def _link_rate(observed: ObservedPass | None, counted: Forward) -> float | None:
    """Return the rate of a step's copies while copies were under way; None if not recorded."""
    if observed is None or observed.measured is None or not counted.h2d_bytes:
        return None
    busy = observed.measured.busy_ns(Lane.H2D)
    return counted.h2d_bytes * 1e9 / busy if busy else None


def failed_run(request: RunRequest, reason: str, *, out_of_memory: bool = False) -> Run:
    """Return a run that has no figures, but a reason."""
    return Run(
        arm=request.arm,
        batch=request.batch,
        budget_bytes=request.budget_bytes,
        reason=reason,
        out_of_memory=out_of_memory,
        settings={},
    )


def main(arguments: list[str]) -> None:
    """Run a request, and write what came of it; a rank of several that failed also says so."""
    path, *folders = map(Path, arguments)
    request = REQUESTS.validate_json(read_file(path))
    folder = folders[int(os.environ.get("RANK", "0"))]
    logging.basicConfig(level=logging.INFO)
    use_device_of_rank()
    device = device_of(request.device)
    worker = Worker(request)
    try:
        if request.is_limited:
            device.limit_memory(request.budget_bytes)
        found = worker.run(folder)
    except Exception as error:
        traceback.print_exc()
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        found = failed_run(request, reason_of(error), out_of_memory=out_of_memory)
    write_file(folder / TOKENS_FILE, json.dumps(worker.tokens))
    write_file(folder / RUN_FILE, RUNS.dump_json(found))
    if found.reason is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit(1)  # the other ranks wait for this one


if __name__ == "__main__":
    main(sys.argv[1:])
