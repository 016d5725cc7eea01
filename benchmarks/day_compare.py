"""All arms of ``ds-finepage compare`` on one random model, under budgets of parts of its weights.

    python benchmarks/day_compare.py --model 7B --arms ours --device cuda

Each cell is one arm, one prompt and one budget, run by the worker of ``compare``. Making a model
takes longer than running it, so all cells of a process share one, in host memory: plain
transformers first, whose tokens and logits are the right ones; then ds_finepage by ``attach``; then
the hooks of Accelerate; and last DeepSpeed, which takes the weights into its
partitions for good. What plain transformers did is kept in the folder of the day, for the next
process. The settings of ``zero-persistence`` are searched beside, in processes of their own.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from day_common import (
    DTYPE,
    SHAPES,
    device_of,
    make_llama,
    memory_of,
    parser_of,
    reason_of,
    report,
    weight_bytes_of,
)
from day_engines import ds_config, release

import ds_finepage
from ds_finepage.compare import finepage_arms, worker
from ds_finepage.compare.arms import ARMS, PLAIN
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.finepage_arms import FinepageEngine
from ds_finepage.compare.orchestrate import make_prompts
from ds_finepage.compare.worker import Worker
from ds_finepage.execution.device import device_of as kind_of
from ds_finepage.execution.probe import probe
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.integrations.deepspeed.one_process import prepare_one_process
from ds_finepage.reporting.results import ObservedPass, PhaseFigures, Run
from ds_finepage.runtime.handle import Handle

PERCENTS = (50, 90, 25, 75, 100)
"""Budgets, the most telling ones first: time may end before the list."""

PROMPTS = {2048: 4, 8192: 2}
"""Lengths of prompts, and the tokens to generate behind each."""

TINY_PERCENTS, TINY_PROMPTS = (50, 100), {24: 4}
REPEATS = 3
CLEANUP_S = 6
"""To give weights back, and pinned memory to the system."""

PROBE_SCRATCH_BYTES = 256 << 20
NO_BUDGET = "none"
EVERYTHING = 100

OURS = ("finepage", "finepage-horizon")
HOOKS = ("accelerate-map",)
MANY = 1 << 20
PERSISTENCE = "zero-persistence"
ZERO = ("zero", PERSISTENCE)

WITH_BUDGET = (*OURS, "accelerate-map", PERSISTENCE)
"""The others do the same under any budget."""

GROUPS = {"ours": (OURS,), "hooks": (HOOKS,), "zero": (ZERO,), "all": (OURS, HOOKS, ZERO)}
KEPT = "stage3_model_persistence_threshold"
STEP_BACK, MOST_TRIES = 0.04, 3
"""If ZeRO runs out of memory, it keeps so much less of all weights, and tries again."""

HERE = Path(__file__).resolve().parent
Cells = dict[str, Any]
Expected = dict[str, Any]
"""The tokens and the logits of plain transformers, and the bytes that it takes."""

Searches = dict[tuple[int, str], Future[dict[str, int]]]
"""Settings by prompt and budget."""


class Attached(FinepageEngine):
    """ds_finepage by ``attach``, under one budget and policy after another."""

    def __init__(self, model: Any, device: torch.device, budget_bytes: int) -> None:
        """Attach to a model.

        Args:
            model: The model, with its weights in host memory.
            device: Where it computes.
            budget_bytes: The first budget.
        """
        super().__init__(model, device, {})
        self.attached = ds_finepage.attach(model, device_budget=budget_bytes, device=device)

    @property
    def handle(self) -> Handle:
        """The handle of the attached model."""
        return self.attached

    def use(self, request: RunRequest) -> Engine:
        """Go on with the policy and the budget of a request; nothing is on the device then."""
        policy = ARMS[request.arm].policy
        self.notes.clear()
        self.settings = {"policy": policy}
        self.attached.replan(budget_bytes=request.budget_bytes, policy=policy)
        return self

    def place(self) -> None:
        """Do nothing; the first pass makes the arena."""

    def close(self) -> None:
        """Stop recording; the model stays attached."""
        self.attached.record(False)


class LogitsWorker(Worker):
    """A worker that also keeps the logits of the last prompt token.

    Attributes:
        keeps: False to spare the call.
        logits: Of shape (batch, vocabulary), in float32 on the CPU; None if they are not kept.
    """

    keeps = True
    logits: torch.Tensor | None = None

    def _observe(self, engine: Engine) -> list[ObservedPass]:
        passes = super()._observe(engine)
        if not self.keeps:
            return passes
        plain_generate, found = engine.model.generate, []

        def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = plain_generate(*args, **kwargs, output_logits=True, return_dict_in_generate=True)
            found.append(made.logits[0].float().cpu())
            sequences = made.sequences
            assert isinstance(sequences, torch.Tensor)
            return sequences

        with mock.patch.object(engine.model, "generate", generate):
            self._generate(engine)
        (self.logits,) = found
        return passes


class Runner:
    """Runs cells of one model, one at a time.

    Attributes:
        profile: The measured rates of the device.
    """

    def __init__(self, name: str, device: torch.device, until: float, folder: Path) -> None:
        """Make the model in host memory.

        Args:
            name: A key of ``SHAPES``.
            device: Where to run.
            until: The time of ``time.perf_counter`` after which nothing new begins.
            folder: For the model's config.
        """
        self.name, self.device, self.until, self.folder = name, device, until, folder
        self.is_tiny = name == "tiny"
        start = time.perf_counter()
        self.model = make_llama(SHAPES[name], torch.device("cpu"))
        self.model.config.save_pretrained(folder)
        self.weight_bytes = weight_bytes_of(self.model)
        scratch_bytes = (1 << 20) if self.is_tiny else PROBE_SCRATCH_BYTES
        self.profile: HardwareProfile = probe(device, scratch_bytes=scratch_bytes)
        self.prompts = TINY_PROMPTS if self.is_tiny else PROMPTS
        kept = Path(os.environ.get("GPU_DAY_FOLDER", folder)) / f"plain_{name}.pt"
        self._expected: dict[int, Expected] = torch.load(kept) if kept.exists() else {}
        self._kept = kept
        self._seen: set[tuple[str, int]] = set()  # arms and prompts whose logits were compared
        self._last_s = 0.0
        report(
            "models",
            model=name,
            weights_bytes=self.weight_bytes,
            dtype=str(DTYPE).removeprefix("torch."),
            made_s=time.perf_counter() - start,
            probe_h2d_gb_per_s=self.profile.h2d_bytes_per_s / 1e9,
            probe_memory_gb_per_s=self.profile.memory_bytes_per_s / 1e9,
        )

    @property
    def is_known(self) -> bool:
        """True if another process of this day has run plain transformers on every prompt."""
        return set(self.prompts) <= set(self._expected)

    def budgets(self, arm: str, prompt_tokens: int) -> Iterator[tuple[str, int]]:
        """Yield the budgets of an arm, in words and in bytes.

        All of 100% is what plain transformers takes; else the budget is a part of the weights.

        Args:
            arm: The name of the arm.
            prompt_tokens: Tokens of the prompt.
        """
        if arm not in WITH_BUDGET:
            yield NO_BUDGET, memory_of(self.device)[1]
            return
        for percent in TINY_PERCENTS if self.is_tiny else PERCENTS:
            nbytes = self.weight_bytes * percent // 100
            if percent == EVERYTHING and prompt_tokens in self._expected:
                nbytes = self._expected[prompt_tokens]["peak_bytes"]
            yield f"{percent}%", nbytes

    def request(self, arm: str, prompt_tokens: int, budget_bytes: int) -> RunRequest:
        """Ask the worker for one cell.

        Args:
            arm: The name of the arm.
            prompt_tokens: Tokens of the prompt.
            budget_bytes: The limit on all device bytes.
        """
        return RunRequest(
            arm=arm,
            model_dir=str(self.folder),
            ds_config=ds_config(self.device, is_tiny=self.is_tiny),
            device=str(self.device),
            budget_bytes=budget_bytes,
            batch=1,
            prompt_tokens=prompt_tokens,
            new_tokens=self.prompts[prompt_tokens],
            repeats=1 if self.is_tiny else REPEATS,
            # A device map begins with everything, and tries fewer modules until it fits.
            settings={"modules_on_device": MANY} if arm in HOOKS else {},
            prompt_ids=make_prompts(self.folder, batch=1, prompt_tokens=prompt_tokens),
        )

    def cell(self, arm: str, prompt_tokens: int, budget: str, nbytes: int, **settings: Any) -> bool:
        """Run one cell and report it; an error becomes a remark, and the next cell begins.

        Args:
            arm: The name of the arm.
            prompt_tokens: Tokens of the prompt.
            budget: The budget in words.
            nbytes: The budget.
            **settings: Of the arm.

        Returns:
            True if it took more than the budget, or ran out of memory.
        """
        cells: Cells = {"model": self.name, "engine": arm, "prompt": prompt_tokens}
        cells |= {"budget": budget, "budget_bytes": None if budget == NO_BUDGET else nbytes}
        start, took_too_much = time.perf_counter(), False
        try:
            if start + self._last_s > self.until:
                raise TimeoutError("no time is left")
            request = self.request(arm, prompt_tokens, nbytes)
            request.settings.update(settings)
            kind_of(self.device).limit_memory(nbytes)
            found = LogitsWorker(request)
            found.keeps = arm in OURS or (arm, prompt_tokens) not in self._seen
            run = found.run(self.folder)
            assert run.peak_bytes is not None
            self._seen.add((arm, prompt_tokens))
            self._last_s = time.perf_counter() - start
            took_too_much = run.peak_bytes > nbytes
            cells |= self.figures(run, found, prompt_tokens)
            if arm in OURS:
                cells["within_budget"] = not took_too_much
        except torch.OutOfMemoryError:
            took_too_much, cells["remark"] = True, "out of memory"
        except Exception as error:
            cells["remark"] = reason_of(error)
        gc.collect()
        kind_of(self.device).empty_cache()
        kind_of(self.device).limit_memory(memory_of(self.device)[1])
        cells["took_s"] = time.perf_counter() - start
        report("arms", **cells)
        return took_too_much

    def figures(self, run: Run, found: LogitsWorker, prompt_tokens: int) -> Cells:
        """Return the figures of a run; the first one for a prompt has the right tokens and logits.

        Args:
            run: The run.
            found: Its worker.
            prompt_tokens: Tokens of the prompt.
        """
        first: Expected = {
            "tokens": found.tokens[0],
            "logits": found.logits,
            "peak_bytes": run.peak_bytes,
        }
        expected = self._expected.setdefault(prompt_tokens, first)
        cells: Cells = {
            "tokens_equal": all(each == expected["tokens"] for each in found.tokens),
            "peak_bytes": run.peak_bytes,
        }
        if found.logits is not None:
            logits = expected["logits"]
            cells["logits_off"] = float((found.logits - logits).abs().max() / logits.abs().max())
        for name, phase in (("prefill", run.prefill), ("step", run.decode)):
            cells |= {f"{name}_{key}": value for key, value in phase_cells(phase).items()}
        if run.link_bytes_per_s is not None:
            cells["link_over_probe"] = run.link_bytes_per_s / self.profile.h2d_bytes_per_s
        cells["settings"] = ", ".join(f"{key} {value}" for key, value in run.settings.items())
        cells["remark"] = "; ".join(run.notes) or None
        return cells


class Bench(Runner):
    """All arms of one model."""

    def plain(self) -> None:
        """Run plain transformers, and take the weights back to host memory."""
        masters = [(weight, weight.data) for weight in self.model.parameters()]
        for prompt_tokens in self.prompts:
            with shared_model(self.model):
                self.cell(PLAIN, prompt_tokens, NO_BUDGET, memory_of(self.device)[1])
            for weight, master in masters:
                weight.data = master
            self.model.to("cpu")  # its buffers
        torch.save(self._expected, self._kept)

    def ours(self) -> None:
        """Run ds_finepage by ``attach``, and give the model back."""
        engine = Attached(self.model, self.device, self.weight_bytes // 2)
        with mock.patch.object(finepage_arms, "load", engine.use):
            self.cells_of(OURS)
        engine.handle.detach()

    def hooks(self) -> None:
        """Run the hooks of Accelerate."""
        with shared_model(self.model):
            self.cells_of(HOOKS)

    def under_deepspeed(self) -> None:
        """Let DeepSpeed take the weights, and run stock ZeRO-Inference."""
        searches = self.searches()
        where = self.partition()
        if where.type != self.device.type:
            report("remarks", remark=f"DeepSpeed knows no {self.device}, and ran on the {where}")
        with shared_model(self.model):
            for prompt_tokens in self.prompts:
                for arm in ZERO:
                    self.zero(arm, prompt_tokens, searches)
        for search in searches.values():
            search.cancel()

    def zero(self, arm: str, prompt_tokens: int, searches: Searches) -> None:
        """Run one arm of DeepSpeed.

        Args:
            arm: The name of the arm.
            prompt_tokens: Tokens of the prompt.
            searches: The settings of ``zero-persistence`` for each prompt and budget.
        """
        settings: dict[str, Any] = {}
        step_back = int(STEP_BACK * self.weight_bytes) // DTYPE.itemsize
        for budget, nbytes in self.budgets(arm, prompt_tokens):
            if arm == PERSISTENCE:
                settings = self.found(searches[prompt_tokens, budget])
            for _ in range(MOST_TRIES):
                took_too_much = self.cell(arm, prompt_tokens, budget, nbytes, **settings)
                release(self.model)
                if not took_too_much or not settings.get(KEPT):
                    break
                settings[KEPT] = max(0, settings[KEPT] - step_back)

    def searches(self) -> Searches:
        """Begin to search the settings of ``zero-persistence``, in processes beside."""
        pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2))
        profile = self.folder / "profile.json"
        codec.save(self.profile, profile)
        found: Searches = {}
        for prompt_tokens, new_tokens in self.prompts.items():
            for budget, nbytes in self.budgets(PERSISTENCE, prompt_tokens):
                words = (self.folder, profile, prompt_tokens, new_tokens, nbytes)
                command = [sys.executable, str(HERE / "day_settings.py"), *map(str, words)]
                found[prompt_tokens, budget] = pool.submit(self.search, command)
        pool.shutdown(wait=False)
        return found

    def search(self, command: list[str]) -> dict[str, int]:
        """Run a search; return the keys of ``zero_optimization``.

        Args:
            command: The command that prints them.
        """
        left = min(600.0, max(1.0, self.until - time.perf_counter()))
        made = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        if made.returncode:
            raise RuntimeError((made.stderr.strip().splitlines() or ["no output"])[-1])
        settings: dict[str, int] = json.loads(made.stdout.splitlines()[-1])
        return settings

    def found(self, search: Future[dict[str, int]]) -> dict[str, int]:
        """Wait for the result of a search; {} if it failed, which becomes a remark."""
        try:
            return search.result()
        except Exception as error:
            report("remarks", remark=f"no settings for zero-persistence: {reason_of(error)}")
            return {}

    def cells_of(self, arms: tuple[str, ...]) -> None:
        """Run all cells of some arms."""
        for arm in arms:
            for prompt_tokens in self.prompts:
                for budget, nbytes in self.budgets(arm, prompt_tokens):
                    self.cell(arm, prompt_tokens, budget, nbytes)

    def partition(self) -> torch.device:
        """Let DeepSpeed take the weights into its partitions; return its device."""
        prepare_one_process()
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        where = torch.device(get_accelerator().current_device_name())
        deepspeed.init_distributed(verbose=False)
        config = ds_config(self.device, is_tiny=self.is_tiny)
        deepspeed.zero.Init(module=self.model, config_dict_or_path=config, dtype=DTYPE)
        self.model.model.rotary_emb.to(where)
        return where


def phase_cells(phase: PhaseFigures) -> Cells:
    """Return the figures of a prefill or of a step."""
    assert phase.wall_ns is not None
    cells: Cells = {"ms": phase.wall_ns / 1e6, "h2d_bytes": phase.h2d_bytes}
    if phase.predicted_ns is not None:
        cells["predicted_ms"] = phase.predicted_ns / 1e6
    return cells


@contextmanager
def shared_model(model: Any) -> Iterator[None]:
    """Give every arm that loads a model this one."""
    modules = {arm.module for arm in ARMS.values()}
    with ExitStack() as stack:
        for module in map(import_module, sorted(modules)):
            for name in ("load_model", "load_unpacked"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=model))
        yield


def main() -> None:
    """Run the cells."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--arms", choices=GROUPS, default="all")
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.seconds - CLEANUP_S
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(worker, "save_passes"),  # figures are all that is kept
    ):
        bench = Bench(arguments.model, device_of(arguments), until, Path(folder))
        if not bench.is_known:
            bench.plain()
        groups = GROUPS[arguments.arms]
        for arms, run in ((OURS, bench.ours), (HOOKS, bench.hooks), (ZERO, bench.under_deepspeed)):
            if arms in groups:
                run()


if __name__ == "__main__":
    main()
