"""Runs the arms one after the other, each in a process of its own, and keeps what is finished."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ds_finepage.capture.models import load_model_config
from ds_finepage.capture.shipped import model_names
from ds_finepage.compare.arms import ARMS, PLAIN, Arm
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.compare.engine import REQUESTS, Prompts, RunRequest
from ds_finepage.compare.modelling import Modelled, model_arm, modeller_of, require_some_arm
from ds_finepage.compare.processes import last_line, run_process
from ds_finepage.compare.worker import RUN_FILE, RUNS, TOKENS_FILE, failed_run
from ds_finepage.errors import ConfigError, reason_of
from ds_finepage.files import read_file, write_file
from ds_finepage.reporting.results import (
    LOG_FILE,
    CompareSettings,
    PhaseFigures,
    Results,
    Run,
    names_of_ranks,
    over_ranks,
    run_folder,
    save_results,
)

MODEL_FOLDER = "model"
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
WHOLE_ON_ONE = "not modelled, for it runs whole on one rank, to have its tokens"
SEED = 0

_log = logging.getLogger(__name__)


class Comparison:
    """One comparison in one folder.

    Invariant: after each run the figures of all finished runs are in ``results.json``.
    """

    def __init__(
        self,
        settings: CompareSettings,
        folder: Path,
        console: Console,
        *,
        device: str,
        start: Results,
        limits_stock: bool = True,
    ) -> None:
        """Prepare a comparison.

        Args:
            settings: The user's decisions.
            folder: Where everything is kept.
            console: Shows the progress.
            device: Where to compute, as torch names it.
            start: The results so far; runs that are finished stay.
            limits_stock: Arms that do not run by plan have the budget enforced too.
        """
        self.results = start
        self._settings = settings
        self._folder = folder
        self._console = console
        self._device = device
        self._ds_config: dict[str, Any] = json.loads(settings.ds_config)
        self._limits_stock = limits_stock

    def run(self) -> Results:
        """Run what is not finished; return the results of everything.

        Raises:
            ConfigError: The model, its tokenizer or a setting cannot be used, or a file cannot be
                written.
            PlanInfeasibleError: No arm can hold the budget.
            KeyboardInterrupt: The user has interrupted it; finished runs are kept.
        """
        finished = {run.name for run in self.results.runs}
        left = {
            batch: [
                ARMS[name]
                for name in self._settings.arms
                if Run(arm=name, batch=batch, settings={}).name not in finished
            ]
            for batch in self._settings.batches
        }
        if any(left.values()):
            checkpoint = self._checkpoint()
            for batch, arms in left.items():
                if arms:
                    self._run_batch(checkpoint, batch, arms)
        self._keep(self.results)
        return self.results

    def _keep(self, results: Results) -> None:
        """Take results over, in the order of the settings, once they are in the file."""
        order = [(batch, arm) for batch in self._settings.batches for arm in self._settings.arms]
        runs = sorted(results.runs, key=lambda run: order.index((run.batch, run.arm)))
        results = replace(results, runs=tuple(runs))
        save_results(results, self._folder)
        self.results = results

    # The model.

    def _checkpoint(self) -> Path:
        """Return the checkpoint to run; make it if there is only its shape."""
        name = self._settings.model
        if Path(name).is_dir():
            return checkpoint_in(Path(name))
        folder, unfinished = self._folder / MODEL_FOLDER, self._folder / f"{MODEL_FOLDER}.part"
        if not folder.exists():
            with self._step(f"making random weights for {Path(name).name}"):
                try:
                    make_checkpoint(unfinished, name, self._settings.layers or 0)
                except Exception as error:  # of any library; the disk may be full
                    raise ConfigError(reason_of(error)) from error
                unfinished.rename(folder)
        return checkpoint_in(folder)

    # Batches.

    def _run_batch(self, checkpoint: Path, batch: int, arms: Sequence[Arm]) -> None:
        settings = self._settings
        with self._step(f"batch {batch}: modelling {len(arms)} arms on {settings.hardware}"):
            modeller = modeller_of(checkpoint, settings, batch)
            whole = Modelled(why_not=WHOLE_ON_ONE)
            modelled = {
                arm: whole
                if ranks_of(arm, settings) < settings.num_ranks
                else model_arm(arm, modeller)
                for arm in arms
            }
        if not any(run.batch == batch for run in self.results.runs):
            require_some_arm(modelled, budget_bytes=modeller.budget_bytes, batch=batch)
        prompts = make_prompts(checkpoint, batch=batch, prompt_tokens=settings.prompt_tokens)
        for arm, found in modelled.items():
            with self._step(f"batch {batch}: {arm.title}"):
                run = self._run_arm(checkpoint, arm, found, modeller.budget_bytes, prompts)
                self._keep(self.results.with_run(completed(run, found, modeller.weight_bytes)))
            if run.reason is not None:
                self._say(f"  did not run: {run.reason}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _run_arm(
        self, checkpoint: Path, arm: Arm, modelled: Modelled, budget_bytes: int, prompts: Prompts
    ) -> Run:
        """Run one arm, and compare its tokens. A fault is the reason in its row.

        Args:
            checkpoint: The folder of the model.
            arm: The arm.
            modelled: What the simulator says of it.
            budget_bytes: The limit on all device bytes.
            prompts: Token ids, a row for each sequence.

        Raises:
            ConfigError: A file of the comparison cannot be written or read.
        """
        settings = self._settings
        empty = Run(arm=arm.name, batch=len(prompts), budget_bytes=budget_bytes, settings={})
        if arm.why_one_rank and settings.num_ranks > 1:
            return replace(empty, reason=arm.why_one_rank)
        if not modelled.can_run:
            return replace(empty, reason=str(modelled.refusal or modelled.why_not))
        request = RunRequest(
            arm=arm.name,
            model_dir=str(checkpoint),
            ds_config=self._ds_config,
            device=self._device,
            budget_bytes=budget_bytes,
            batch=len(prompts),
            prompt_tokens=settings.prompt_tokens,
            new_tokens=settings.new_tokens,
            repeats=settings.repeats,
            settings=dict(modelled.settings),
            prompt_ids=prompts,
            is_limited=arm.observes or self._limits_stock,
        )
        names = names_of_ranks(empty.name, ranks_of(arm, settings))
        folders = [run_folder(self._folder, name) for name in names]
        try:
            runs = run_in_processes(request, folders)
            judged = [self._judged(*each) for each in zip(runs, folders, strict=False)]
        except ConfigError:
            raise  # the folder cannot be used, so no arm could go on
        except Exception as error:
            _log.warning("cannot run %s", arm.name, exc_info=True)
            return replace(empty, reason=reason_of(error))
        return over_ranks(judged) if len(judged) > 1 else judged[0]

    def _judged(self, run: Run, folder: Path) -> Run:
        """Compare the tokens of a run with those of plain transformers.

        If plain transformers did not run, the first run of the batch takes its place.
        """
        if run.reason is not None:
            return run
        tokens = tokens_of(folder)
        ran = [r for r in self.results.runs if r.batch == run.batch and r.reason is None]
        reference = next((r for r in ran if r.arm == PLAIN), ran[0] if ran else run)
        expected = (
            tokens if reference is run else tokens_of(run_folder(self._folder, reference.name))
        )
        notes = run.notes
        if reference.arm != PLAIN and run.arm != PLAIN:
            notes = (*notes, f"its tokens were compared with those of {reference.arm}")
        return replace(run, tokens_equal=all(t == expected[0] for t in tokens), notes=notes)

    @contextmanager
    def _step(self, text: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._console.status(text):
            yield
        took = time.perf_counter() - start
        self._say(f"{text}: {took:.1f} s")


def completed(run: Run, modelled: Modelled, weight_bytes: int) -> Run:
    """Return a run with the figures that the simulator has of it.

    Args:
        run: The run.
        modelled: What the simulator says of it.
        weight_bytes: Bytes of all weights.
    """

    def both(counted: PhaseFigures, simulated: PhaseFigures) -> PhaseFigures:
        found = {f.name: getattr(counted, f.name) for f in fields(PhaseFigures)}
        return replace(simulated, **{k: v for k, v in found.items() if v is not None})

    notes = run.notes
    if modelled.refusal is not None and run.reason is None:
        notes = (*notes, "cannot hold the budget by its model, and is modelled without one")
    if modelled.why_not is not None and run.reason is None:
        notes = (*notes, modelled.why_not)
    return replace(
        run,
        weight_bytes=weight_bytes,
        prefill=both(run.prefill, modelled.prefill),
        decode=both(run.decode, modelled.decode),
        notes=notes,
    )


def checkpoint_in(folder: Path) -> Path:
    """Return the folder of a checkpoint.

    Raises:
        ConfigError: There is none: no config, or no weights.
    """
    load_model_config(str(folder))
    if not folder.is_dir() or not any(any(folder.glob(each)) for each in WEIGHT_FILES):
        raise ConfigError(
            f"{folder} has no weights ({', '.join(WEIGHT_FILES)}). Give the folder of a whole "
            f"checkpoint, or a shipped name, which gets random weights: {', '.join(model_names())}."
        )
    return folder.resolve()


def make_prompts(checkpoint: Path, *, batch: int, prompt_tokens: int) -> Prompts:
    """Return random token ids of a model from a fixed seed, a row for each sequence."""
    vocab_size = load_model_config(str(checkpoint)).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocab_size, (batch, prompt_tokens), generator=generator)
    return tuple(map(tuple, ids.tolist()))


def tokens_of(folder: Path) -> list[Any]:
    """Return the tokens of every call of a run."""
    found = json.loads(read_file(folder / TOKENS_FILE))
    assert isinstance(found, list)
    return found


def ranks_of(arm: Arm, settings: CompareSettings) -> int:
    """Return how many ranks run an arm; plain transformers is there for its tokens."""
    return 1 if arm.name == PLAIN else settings.num_ranks


def run_in_processes(request: RunRequest, folders: Sequence[Path]) -> list[Run]:
    """Run one arm in a process of its own, or in one a rank; return the run of each.

    If ranks fail, the first one that did comes alone, with its reason.

    Args:
        request: The run of every rank.
        folders: Of each rank; the first one has the log.

    Raises:
        ConfigError: A folder cannot be used.
    """
    for folder in folders:
        make_empty(folder)
    path, log = folders[0] / "request.json", folders[0] / LOG_FILE
    write_file(path, REQUESTS.dump_json(request))
    command = ["-m", "ds_finepage.compare.worker", str(path), *map(str, folders)]
    status = run_process(command, log, num_ranks=len(folders))
    files = [folder / RUN_FILE for folder in folders]
    written = sorted((file for file in files if file.exists()), key=lambda f: f.stat().st_mtime_ns)
    runs = {file: RUNS.validate_json(read_file(file)) for file in written}
    for file, run in runs.items():
        if run.reason is not None:
            where = f"rank {files.index(file)}: " if len(files) > 1 else ""
            return [replace(run, reason=f"{where}{run.reason}")]
    if len(runs) < len(files):
        reason = f"the process ended with status {status}: {last_line(log)}"
        return [failed_run(request, reason)]
    return [runs[file] for file in files]


def make_empty(folder: Path) -> None:
    """Make the folder of a run, without files of an earlier try.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error}") from error
