"""The folder of a comparison or of a run: its figures, plans and timelines.

    DIR/results.json                 the settings, the machine, and the figures of each run
    DIR/runs/RUN/log.txt             the output of the run's process
    DIR/runs/RUN/PASS.plan.json      the plan of a pass, with its taskgraph
    DIR/runs/RUN/PASS.predicted.json its predicted timeline
    DIR/runs/RUN/PASS.measured.json  its measured timeline

RUN is ``Run.name``. The ranks after the first have folders of their own, RUN_rank1 and so on. PASS
is "prefill", "decode", or another name of a pass.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ds_finepage.checker.checker import check
from ds_finepage.errors import ConfigError
from ds_finepage.files import read_file, write_file
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.timeline import Timeline

RESULTS_FILE, RUNS_FOLDER, LOG_FILE = "results.json", "runs", "log.txt"
PACKAGES = ("accelerate", "deepspeed", "ds_finepage", "torch", "transformers")
PREFILL, DECODE = "prefill", "decode"
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """The decisions of the user; a comparison is resumed only under the same ones.

    Attributes:
        model: A checkpoint folder, or a shipped name.
        layers: Layers of a shipped model; None for all, and for a folder.
        ds_config: The user's ds_config as JSON text; "" for the default one.
        device_budget: As in a ds_config.
        batches: Sequences in the batch, one comparison each.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens to generate after it.
        arms: The names of the arms.
        hardware: The profile that times are modelled for.
        repeats: Timed calls of ``generate`` of each run; the figures are medians.
        num_ranks: Ranks that the model is cut over; budget and figures are those of one rank.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    model: str
    layers: int | None
    ds_config: str
    device_budget: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    arms: tuple[str, ...]
    hardware: str
    repeats: int
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """A prefill, or a steady decode step. A figure is None where it is not known.

    Attributes:
        h2d_bytes: Bytes copied to the device, as counted.
        d2h_bytes: Bytes copied to the host, as counted.
        wall_ns: Measured time, the median of all timed calls.
        predicted_ns: Simulated time on this machine, with measured rates and times of ops.
        modelled_ns: Simulated time on the machine of ``CompareSettings.hardware``.
        modelled_h2d_bytes: Bytes that the simulation copies to the device.
        lower_bound_bytes: The fewest bytes that any plan could copy to the device.
        lower_bound_ns: The least time of any plan on the modelled machine.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    wall_ns: int | None = None
    predicted_ns: int | None = None
    modelled_ns: int | None = None
    modelled_h2d_bytes: int | None = None
    lower_bound_bytes: int | None = None
    lower_bound_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm with one batch. If it did not run, ``reason`` says why, and figures are None.

    Attributes:
        arm: The name of the arm.
        batch: Sequences in the batch.
        reason: Why it did not run, or ran out of memory.
        out_of_memory: It exceeded the budget where that is enforced.
        tokens_equal: It generated the tokens of plain transformers.
        budget_bytes: The limit on device bytes; None for an arm without one.
        weight_bytes: Bytes of all weights.
        peak_bytes: Most live device bytes at any time, by the device's allocator.
        prefill: The figures of a prefill.
        decode: The figures of a steady decode step.
        load_ns: Time to load the model.
        first_token_ns: Time to load it, and of its first forward, with the meter on: it captures,
            measures, plans and computes.
        first_call_ns: Time of the forwards of the first call of ``generate``, with the meter on.
        link_bytes_per_s: Rate of the copies of a steady decode step, while copies were under way.
        probe_bytes_per_s: Rate of a pinned copy in the same process.
        host_bytes: Most host memory of the process.
        pinned_bytes: Pinned host memory.
        settings: Settings that the arm was run with, as the user would write them.
        notes: Remarks for the reader of the table.
        ranks: The run as each rank saw it, where there are several. The peak and the host memory
            of the run are then the most of any rank, and its other figures those of rank 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    arm: str
    batch: int
    reason: str | None = None
    out_of_memory: bool = False
    tokens_equal: bool | None = None
    budget_bytes: int | None = None
    weight_bytes: int | None = None
    peak_bytes: int | None = None
    prefill: PhaseFigures = PhaseFigures()
    decode: PhaseFigures = PhaseFigures()
    load_ns: int | None = None
    first_token_ns: int | None = None
    first_call_ns: int | None = None
    link_bytes_per_s: float | None = None
    probe_bytes_per_s: float | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    settings: dict[str, str | int | float | bool]
    notes: tuple[str, ...] = ()
    ranks: tuple[Run, ...] = ()

    @property
    def holds_budget(self) -> bool:
        """Whether it ended within its budget."""
        if self.reason is not None or self.peak_bytes is None:
            return False
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.arm}_b{self.batch}"


def names_of_ranks(run_name: str, num_ranks: int) -> list[str]:
    """Return the names of the folders of a run; that of rank 0 has the name of the run.

    Args:
        run_name: The name of the run.
        num_ranks: Its ranks.
    """
    return [run_name, *(f"{run_name}_rank{rank}" for rank in range(1, num_ranks))]


def over_ranks(runs: Sequence[Run]) -> Run:
    """Return a run on several ranks.

    Args:
        runs: What each rank found; all of them ran.
    """
    return replace(
        runs[0],
        tokens_equal=all(run.tokens_equal for run in runs),
        peak_bytes=max(run.peak_bytes or 0 for run in runs),
        host_bytes=max(run.host_bytes or 0 for run in runs),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        ranks=tuple(runs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything in ``results.json``.

    Attributes:
        settings: The user's decisions; None for the report of a single run.
        device: The device that ran it, in words, such as "cpu" or a card's name.
        versions: Packages and their versions.
        date: The day, as ``YYYY-MM-DD``.
        command: The command that repeats it.
        runs: The finished runs, in the order of the arms and batches.
        format: Raised with every change of the classes here; older ones are not read.
        kind: Names the file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    settings: CompareSettings | None
    device: str
    versions: dict[str, str]
    date: str
    command: str
    runs: tuple[Run, ...] = ()
    format: Literal[5] = 5
    kind: Literal["ds_finepage results"] = "ds_finepage results"

    @classmethod
    def of_today(
        cls, settings: CompareSettings | None, device: str, command: str, runs: tuple[Run, ...] = ()
    ) -> Results:
        """Return the results of a command that is run today, with the installed versions."""
        return cls(
            settings=settings,
            device=device,
            versions=installed_versions(),
            date=datetime.date.today().isoformat(),
            command=command,
            runs=runs,
        )

    @property
    def is_modelled(self) -> bool:
        """Whether modelled times decide which arm is fastest: on the CPU stock copies nothing."""
        return self.settings is not None and self.device == "cpu"

    def time_of(self, phase: PhaseFigures) -> int | None:
        """Return the time that an arm is judged by."""
        return phase.modelled_ns if self.is_modelled else phase.wall_ns

    def with_run(self, run: Run) -> Results:
        """Return the results with one more run; it replaces one of the same name."""
        others = tuple(r for r in self.runs if r.name != run.name)
        return replace(self, runs=(*others, run))


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that figures depend on, by name, if installed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


_ADAPTER = TypeAdapter(Results)


def save_results(results: Results, folder: Path) -> None:
    """Write ``results.json`` at once.

    Raises:
        ConfigError: It cannot be written.
    """
    write_file(folder / RESULTS_FILE, _ADAPTER.dump_json(results, indent=1) + b"\n")


def load_results(folder: Path) -> Results:
    """Read ``results.json``.

    Raises:
        ConfigError: There is none, it is of another version, or a field in it cannot be used.
    """
    path = folder / RESULTS_FILE
    try:
        text = read_file(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. 'ds-finepage compare --out DIR' writes such a folder, and so does "
            "finepage.report in a ds_config."
        ) from error
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path} is not a result of this version of ds_finepage: {where}: {first['msg']}. "
            "Compare again, into another folder."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPass:
    """A pass that ran by plan: its plan, its predicted timeline, and its measured one.

    Attributes:
        name: "prefill", "decode", or another name that is unique in its run.
        memgraph: The plan that ran.
        predicted: The timeline that was predicted for it, on this machine.
        measured: The timeline of its last steady run; None if it was not recorded.
    """

    name: str
    memgraph: MemGraph
    predicted: Timeline
    measured: Timeline | None = None


def run_folder(folder: Path, run_name: str) -> Path:
    """Return the folder of a run."""
    return folder / RUNS_FOLDER / run_name


def save_passes(passes: Sequence[ObservedPass], folder: Path) -> None:
    """Write the plans and timelines of a run.

    Args:
        passes: The passes of the run.
        folder: The run's own folder; it exists.

    Raises:
        ConfigError: A file cannot be written.
    """
    for found in passes:
        codec.save(found.memgraph, folder / f"{found.name}.plan.json")
        codec.save(found.predicted, folder / f"{found.name}.predicted.json")
        if found.measured is not None:
            codec.save(found.measured, folder / f"{found.name}.measured.json")


def load_passes(folder: Path) -> list[ObservedPass]:
    """Read the plans and timelines of a run, in the order of their names.

    Args:
        folder: The run's own folder.

    Raises:
        InvalidPlanError: A file in it cannot be used.
    """
    found = []
    for path in sorted(folder.glob("*.plan.json")):
        name = path.name.removesuffix(".plan.json")
        measured = folder / f"{name}.measured.json"
        found.append(
            ObservedPass(
                name=name,
                memgraph=check(codec.load(path, MemGraph)),
                predicted=codec.load(folder / f"{name}.predicted.json", Timeline),
                measured=codec.load(measured, Timeline) if measured.exists() else None,
            )
        )
    return found
