"""Runs the arms one after the other, each in a process of its own, and keeps what is finished."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ds_finepage.capture.models import default_dtype, load_model_config
from ds_finepage.capture.shipped import model_names
from ds_finepage.compare.arms import ARMS, PLAIN, Arm
from ds_finepage.compare.engine import RunRequest, save_request
from ds_finepage.compare.loading import dtype_of
from ds_finepage.compare.models import (
    WHOLE_ON_ONE,
    Modelled,
    Models,
    outline_of,
    require_some_arm,
)
from ds_finepage.compare.processes import environment, last_line, run_process, run_ranks
from ds_finepage.compare.prompts import Prompts, make_prompts
from ds_finepage.compare.worker import RUN_FILE, RUNS, TOKENS_FILE
from ds_finepage.config import SECTION
from ds_finepage.errors import ConfigError, RankError, reason_of
from ds_finepage.files import read_file
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.profiles import load_profile
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
RANKS_LIMIT_S = 4 * 3600.0
"""Time for all ranks of one arm."""

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint of a comparison.

    Attributes:
        folder: Its folder.
        vocab_size: Rows of its embedding.
    """

    folder: Path
    vocab_size: int


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
        make_modeller: Callable[..., Any],
    ) -> None:
        """Prepare a comparison.

        Args:
            settings: The user's decisions.
            folder: Where everything is kept.
            console: Shows the progress.
            device: Where to compute, as torch names it.
            start: The results so far; runs that are finished stay.
            make_modeller: The class :class:`ds_finepage.compare.modelling.Modeller`.
        """
        self.results = start
        self._settings = settings
        self._folder = folder
        self._console = console
        self._device = device
        self._ds_config: dict[str, Any] = json.loads(settings.ds_config)
        self._make_modeller = make_modeller

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

    def _checkpoint(self) -> Checkpoint:
        """Return the checkpoint to run; make it if it is a shipped name."""
        name = self._settings.model
        if name not in model_names():
            return checkpoint_in(Path(name))
        folder, unfinished = self._folder / MODEL_FOLDER, self._folder / f"{MODEL_FOLDER}.part"
        if not folder.exists():
            with self._step(f"making random weights for {name}"):
                module = "ds_finepage.compare.checkpoint"
                layers = str(self._settings.layers or 0)
                log = self._folder / "model.log"
                status = run_process(["-m", module, str(unfinished), name, layers], log)
                if status:
                    raise ConfigError(last_line(log).removeprefix("ds_finepage: "))
                unfinished.rename(folder)
        return checkpoint_in(folder)

    # Batches.

    def _run_batch(self, checkpoint: Checkpoint, batch: int, arms: Sequence[Arm]) -> None:
        settings = self._settings
        prompts = make_prompts(
            checkpoint.folder,
            vocab_size=checkpoint.vocab_size,
            batch=batch,
            prompt_tokens=settings.prompt_tokens,
        )
        with self._step(f"batch {batch}: modelling {len(arms)} arms on {settings.hardware}"):
            models = self._models(checkpoint, batch)
            whole = Modelled(settings={}, why_not=WHOLE_ON_ONE)
            modelled = {
                arm.name: whole if ranks_of(arm, settings) < settings.num_ranks else models.of(arm)
                for arm in arms
            }
        if models.why_not is not None:
            self._say(f"batch {batch}: {models.why_not}")
        if not any(run.batch == batch for run in self.results.runs):
            pairs = [(arm, modelled[arm.name]) for arm in arms]
            require_some_arm(pairs, budget_bytes=models.budget_bytes, batch=batch)
        for arm in arms:
            found = modelled[arm.name]
            with self._step(f"batch {batch}: {arm.title}"):
                run = self._run_arm(checkpoint, arm, batch, models.budget_bytes, found, prompts)
                self._keep(self.results.with_run(completed(run, found, models.weight_bytes)))
            if run.reason is not None:
                self._say(f"  did not run: {run.reason}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _models(self, checkpoint: Checkpoint, batch: int) -> Models:
        settings = self._settings

        def make(device_budget: str) -> Any:
            return self._make_modeller(
                str(checkpoint.folder),
                batch=batch,
                prompt_tokens=settings.prompt_tokens,
                new_tokens=settings.new_tokens,
                device_budget=device_budget,
                hardware=settings.hardware,
                dtype=modelled_dtype(checkpoint.folder, self._ds_config, settings.hardware),
                num_ranks=settings.num_ranks,
                **modelled_options(self._ds_config),
            )

        return Models(
            make, settings.device_budget, partial(outline_of, checkpoint.folder, settings)
        )

    # Arms.

    def _run_arm(
        self,
        checkpoint: Checkpoint,
        arm: Arm,
        batch: int,
        budget_bytes: int,
        modelled: Modelled,
        prompts: Prompts,
    ) -> Run:
        """Run one arm, and compare its tokens. A fault is the reason in its row.

        Args:
            checkpoint: The model.
            arm: The arm.
            batch: Sequences in the batch.
            budget_bytes: The limit on all device bytes.
            modelled: What the simulator says of it.
            prompts: Token ids, a row for each sequence.

        Raises:
            ConfigError: A file of the comparison cannot be written or read.
        """
        empty = Run(arm=arm.name, batch=batch, budget_bytes=budget_bytes, settings={})
        if arm.why_one_rank and self._settings.num_ranks > 1:
            return replace(empty, reason=arm.why_one_rank)
        if not modelled.can_run:
            return replace(empty, reason=str(modelled.refusal or modelled.why_not))
        settings = self._settings
        try:
            if arm.missing is not None:
                return replace(empty, reason=arm.missing)
            request = RunRequest(
                arm=arm.name,
                model_dir=str(checkpoint.folder),
                ds_config=self._ds_config,
                device=self._device,
                budget_bytes=budget_bytes,
                batch=batch,
                prompt_tokens=settings.prompt_tokens,
                new_tokens=settings.new_tokens,
                repeats=settings.repeats,
                settings=dict(modelled.settings),
                observes=arm.observes,
                prompt_ids=prompts,
            )
            if ranks_of(arm, settings) > 1:
                return self._on_ranks(request, empty)
            return self._in_a_process(request, empty)
        except ConfigError:
            raise  # the folder cannot be used, so no arm could go on
        except Exception as error:
            _log.warning("cannot run %s", arm.name, exc_info=True)
            return replace(empty, reason=reason_of(error))

    def _in_a_process(self, request: RunRequest, empty: Run) -> Run:
        """Run one arm in a process of its own, and compare its tokens."""
        folder = run_folder(self._folder, empty.name)
        return self._judged(run_in_a_process(request, empty, folder), folder)

    def _on_ranks(self, request: RunRequest, empty: Run) -> Run:
        """Run one arm on all ranks, and compare the tokens of each."""
        names = names_of_ranks(empty.name, self._settings.num_ranks)
        folders = [run_folder(self._folder, name) for name in names]
        try:
            runs = run_on_ranks(request, folders)
        except RankError as error:
            return replace(empty, reason=str(error))
        return over_ranks([self._judged(*each) for each in zip(runs, folders, strict=True)])

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
        found = {f.name: getattr(simulated, f.name) for f in fields(PhaseFigures)}
        return replace(counted, **{k: v for k, v in found.items() if v is not None})

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


def checkpoint_in(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises:
        ConfigError: There is none: no config, or no weights.
    """
    config = load_model_config(str(folder))
    if not folder.is_dir() or not any(any(folder.glob(each)) for each in WEIGHT_FILES):
        raise ConfigError(
            f"{folder} has no weights ({', '.join(WEIGHT_FILES)}). Give the folder of a whole "
            f"checkpoint, or a shipped name, which gets random weights: {', '.join(model_names())}."
        )
    return Checkpoint(folder.resolve(), config.get_text_config().vocab_size)


def modelled_dtype(folder: Path, ds_config: Mapping[str, Any], hardware: str) -> str:
    """Return the dtype to model: the one that runs, or the fast one of the same size.

    Args:
        folder: The folder of the checkpoint.
        ds_config: The user's ds_config.
        hardware: The profile that times are modelled for.

    Raises:
        ConfigError: The config or the profile cannot be used.
    """
    config = load_model_config(str(folder))
    config.dtype = dtype_of(ds_config)
    return default_dtype(config, load_profile(hardware))


def modelled_options(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a ds_config that a model of its run depends on, beside the budget."""
    section = ds_config.get(SECTION, {})
    return {
        "split": bool(section.get("split")),
        "weights": section.get("weights"),
        "weights_group": section.get("weights_group", GROUP),
    }


def tokens_of(folder: Path) -> list[Any]:
    """Return the tokens of every call of a run."""
    found = json.loads(read_file(folder / TOKENS_FILE))
    assert isinstance(found, list)
    return found


def ranks_of(arm: Arm, settings: CompareSettings) -> int:
    """Return how many ranks run an arm; plain transformers is there for its tokens."""
    return 1 if arm.name == PLAIN else settings.num_ranks


def run_in_a_process(request: RunRequest, empty: Run, folder: Path) -> Run:
    """Run one arm in a process of its own.

    Args:
        request: The run.
        empty: The run without figures.
        folder: Of the run.

    Raises:
        ConfigError: The folder cannot be used.
    """
    log = folder / LOG_FILE
    status = run_process(prepared(request, folder), log)
    if not (folder / RUN_FILE).exists():
        return replace(empty, reason=f"the process ended with status {status}: {last_line(log)}")
    return RUNS.validate_json(read_file(folder / RUN_FILE))


def run_on_ranks(request: RunRequest, folders: Sequence[Path]) -> list[Run]:
    """Run one arm on several ranks; return the run of each.

    Args:
        request: The run of every rank.
        folders: Of each rank.

    Raises:
        ConfigError: A folder cannot be used.
        RankError: A rank failed, or the ranks took too long.
    """
    commands = [prepared(request, folder) for folder in folders]
    logs = [folder / LOG_FILE for folder in folders]
    run_ranks(commands, logs, environment(), limit_s=RANKS_LIMIT_S)
    return [RUNS.validate_json(read_file(folder / RUN_FILE)) for folder in folders]


def prepared(request: RunRequest, folder: Path) -> list[str]:
    """Write a request into an empty folder; return Python's arguments that run it.

    Args:
        request: The run.
        folder: Of the run, or of one rank of it.

    Raises:
        ConfigError: The folder or the request cannot be written.
    """
    make_empty(folder)
    path = folder / "request.json"
    save_request(request, path)
    return ["-m", "ds_finepage.compare.worker", str(path), str(folder)]


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
