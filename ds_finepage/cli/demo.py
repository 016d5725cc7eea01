"""Show both engines side by side on a small model.

Makes a Llama checkpoint with a tokenizer (random weights from a fixed seed, nothing is downloaded)
and runs examples/generate.py on it, each time in a process of its own: by plain transformers, for
tokens to compare with; by stock ZeRO-Inference; and by ds_finepage under a budget. The ds_configs
of the two engines differ in finepage.enabled alone. The demo uses the accelerator if there is one.
With --weights int4 all three run the same packed model.

Exit status: 0; 1 if tokens differ or the budget was exceeded; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import ds_finepage
from ds_finepage.cli.instruments import Reading
from ds_finepage.cli.options import add_weights, one_form_of
from ds_finepage.cli.output import add_json
from ds_finepage.cli.output import show as show_table
from ds_finepage.compare.checkpoint import LlamaShape
from ds_finepage.config import FinepageConfig
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.graph.packed import UNPACKED
from ds_finepage.planning.policies import RUNNABLE
from ds_finepage.units import format_bytes

PROMPT = "The planner never sees torch; the executor never decides."
ENGINES = {"zero_inference": "stock ZeRO-Inference", "finepage": "ds_finepage"}
NUM_CALLS = 2
"""Calls of ``generate`` in each run. The first captures and plans; the second only runs."""

MIN_NEW_TOKENS = 4
"""With fewer tokens no decode step is steady: the first one follows the prefill."""

TINY = LlamaShape(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=1024,
)
"""For tests of this command: the same steps in little time."""


JSON_KEYS = (
    "tokens_equal",
    "peak_bytes",
    "prefill_reloaded_bytes",
    "decode_reloaded_bytes",
    "decode_lower_bound_bytes",
    "wall_s",
)
"""The figures of an engine in ``--json``."""

FOOTNOTE = """\
Peak: a meter reads the allocator, in a run of its own, from just before deepspeed.initialize on. It
counts all device bytes, but not the host copy of the weights. Reloads: of the last prefill and the
last decode step. Stock has no budget; its peak follows from its default prefetch settings. Times
are of generate alone, without the meter. ds_finepage captures and plans in the first call."""

FOOTNOTE_CPU = """\
On the CPU a fetch of stock ZeRO-Inference copies nothing (the meter makes it copy), while
ds_finepage really copies: compare the bytes here, and times on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult(Reading):
    """The figures of one engine.

    ``wall_s`` is the time of the first call of ``generate``, capture and planning included.
    ``wall_again_s`` is that of the last call.
    """

    tokens_equal: bool
    wall_s: float
    wall_again_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The figures of both engines; ``weights`` names the packed form of the weights, if any."""

    budget_bytes: int
    weight_bytes: int
    engines: dict[str, EngineResult]
    weights: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one object for ``--json``; figures that are None are left out."""
        engines = {}
        for name, engine in self.engines.items():
            figures = asdict(engine)
            engines[name] = {k: figures[k] for k in JSON_KEYS if figures[k] is not None}
        return {
            "budget_bytes": self.budget_bytes,
            "weight_bytes": self.weight_bytes,
            **({} if self.weights is None else {"weights": self.weights}),
            "engines": engines,
        }


def problems_of(result: DemoResult) -> list[str]:
    """List the faults of a result, in words."""
    problems = [
        f"the tokens of {ENGINES[name]} differ from those of plain transformers"
        for name, engine in result.engines.items()
        if not engine.tokens_equal
    ]
    peak_bytes = result.engines["finepage"].peak_bytes
    if peak_bytes > result.budget_bytes:
        problems.append(
            f"ds_finepage had {peak_bytes} bytes on the device; the budget is "
            f"{result.budget_bytes} bytes"
        )
    return problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ds-finepage demo``."""
    add_json(parser)
    parser.add_argument(
        "--budget",
        default="40%weights",
        help="ds_finepage's device budget, as in finepage.device_budget (default: %(default)s)",
    )
    parser.add_argument("--policy", default="finepage", help="default: %(default)s")
    add_weights(parser)
    parser.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep checkpoint, ds_configs and logs there"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ds-finepage demo``."""
    shape = TINY if arguments.tiny else LlamaShape()
    settings = {
        "device_budget": arguments.budget,
        "policy": arguments.policy,
        **packing_of(arguments, shape),
    }
    FinepageConfig.from_dict(settings, policies=RUNNABLE)  # refuse before any work
    if arguments.new_tokens < MIN_NEW_TOKENS:
        raise ConfigError(
            f"--new-tokens: {arguments.new_tokens} is too few for a steady decode step. "
            f"Write at least {MIN_NEW_TOKENS}."
        )
    with work_folder(arguments.keep) as folder:
        demo = Demo(folder, settings, arguments.new_tokens, Console(stderr=True))
        result = demo.run(shape)
    if arguments.json:
        print(json.dumps(result.as_json()))
    else:
        print_result(result)
    problems = problems_of(result)
    for problem in problems:
        print(f"ds-finepage: {problem}", file=sys.stderr)
    if arguments.keep is not None and not arguments.json:
        print(f"\nBy hand:\n\n    {by_hand(arguments.keep)}")
    return 1 if problems else 0


def packing_of(arguments: argparse.Namespace, shape: LlamaShape) -> dict[str, Any]:
    """Return the keys of the section that pack the weights; none if they are not to be packed.

    Args:
        arguments: The options.
        shape: The model.

    Raises:
        ConfigError: The form cannot be used, or does not suit the model.
    """
    form = one_form_of(arguments)
    if form in (None, UNPACKED):
        return {}
    from ds_finepage.packing.form import PackedForm  # imports torch

    for width in (shape.hidden_size, shape.intermediate_size):
        PackedForm.parse(str(form), arguments.weights_group).require((1, width))
    return {"weights": form, "weights_group": arguments.weights_group}


@contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """Yield an empty folder: the one to keep, or a temporary one.

    Raises:
        ConfigError: The folder to keep is a file, or not empty.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ds-finepage-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep: {keep} exists and is not an empty folder. Name a new one.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def example(name: str) -> Path:
    """Return the path of an example: in the installed package, or beside it in a checkout."""
    package = Path(ds_finepage.__file__).parent
    installed = package / "examples" / name
    return installed if installed.exists() else package.parent / "examples" / name


def by_hand(folder: Path) -> str:
    """Return the command that runs ds_finepage on a kept folder."""
    folder = folder.resolve()
    words = ["deepspeed", "--num_gpus", "1", str(example("generate.py"))]
    words += ["--model", str(folder / "model"), "--prompt", PROMPT]
    words += ["--deepspeed", "--deepspeed_config", str(folder / "finepage.json")]
    return shlex.join(words)


class Demo:
    """The runs of one demo in one folder."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], num_new_tokens: int, console: Console
    ) -> None:
        """Prepare a demo.

        Args:
            folder: An empty folder.
            settings: The ``finepage`` section without ``enabled``.
            num_new_tokens: Tokens to generate in each call.
            console: Shows the progress.
        """
        self._folder = folder
        self._model = folder / "model"
        self._settings = settings
        self._num_new_tokens = num_new_tokens
        self._console = console
        # Half of the cores compute; the others serve the transfer lanes. Sums, and so the tokens,
        # depend on the number of threads, so every run has the same.
        threads = str(max(1, (os.cpu_count() or 1) // 2))
        self._environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",  # the last line of a log is then the last that was written
        }

    def run(self, shape: LlamaShape) -> DemoResult:
        """Run the demo."""
        with self._step("making a Llama checkpoint"):
            shape_json = json.dumps(asdict(shape))
            self._python(
                "checkpoint", "-m", "ds_finepage.compare.checkpoint", self._model, shape_json
            )
            for name in ENGINES:
                self._write_config(name)
        pool = ThreadPoolExecutor(max_workers=2)  # these runs are not timed
        with self._step("plain transformers for reference; both engines with a memory meter"):
            try:
                plain = pool.submit(self._generate, "plain", self._engine_options("plain"))
                metered = {name: pool.submit(self._meter, name) for name in ENGINES}
                expected = plain.result()["tokens"]
                readings = {name: future.result() for name, future in metered.items()}
            finally:
                pool.shutdown(cancel_futures=True)
        engines = {}
        for name, title in ENGINES.items():
            with self._step(title):
                run = self._generate(name, self._engine_options(name))
            reading, tokens = readings[name]
            engines[name] = EngineResult(
                **asdict(reading),
                tokens_equal=run["tokens"] == tokens == expected,
                wall_s=round(run["seconds"][0], 3),
                wall_again_s=round(run["seconds"][-1], 3),
            )
        ours = engines["finepage"]
        assert ours.budget_bytes is not None
        return DemoResult(
            budget_bytes=ours.budget_bytes,
            weight_bytes=ours.weight_bytes,
            engines=engines,
            weights=self._settings.get("weights"),
        )

    def _write_config(self, name: str) -> None:
        ds_config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": has_accelerator()},
            },
            "finepage": {"enabled": name == "finepage", **self._settings},
        }
        (self._folder / f"{name}.json").write_text(json.dumps(ds_config, indent=2))

    def _engine_options(self, name: str) -> list[str | Path]:
        """Return the options of the example that choose an engine and pack the weights."""
        found: list[str | Path] = []
        if name in ENGINES:
            found = ["--deepspeed", "--deepspeed_config", self._folder / f"{name}.json"]
        if "weights" in self._settings:
            found += ["--weights", self._settings["weights"]]
            found += ["--weights-group", str(self._settings["weights_group"])]
        return found

    def _meter(self, name: str) -> tuple[Reading, list[int]]:
        """Run the example under instruments; return the reading and the tokens."""
        output = self._folder / f"{name}_reading.json"
        before: list[str | Path] = ["-m", "ds_finepage.cli.instruments", output]
        written = self._generate(f"{name}_metered", self._engine_options(name), before)
        return Reading(**json.loads(output.read_text())), written["tokens"]

    def _generate(
        self, name: str, options: Sequence[str | Path] = (), before: Sequence[str | Path] = ()
    ) -> dict[str, Any]:
        """Run examples/generate.py; return the object that it wrote.

        Args:
            name: Of the log and the output.
            options: More options of the example.
            before: Python's arguments before the example.
        """
        output = self._folder / f"{name}_output.json"
        given: list[str | Path] = ["--model", self._model, "--prompt", PROMPT, "--json", output]
        given += ["--new-tokens", str(self._num_new_tokens), "--calls", str(NUM_CALLS)]
        self._python(name, *before, example("generate.py"), *given, *options)
        written = json.loads(output.read_text())
        assert isinstance(written, dict)
        return written

    def _python(self, name: str, *arguments: str | Path) -> None:
        """Run a Python process to its end, with its output in a log.

        Raises:
            FinepageError: It failed.
            KeyboardInterrupt: It was interrupted.
        """
        log = self._folder / f"{name}.log"
        with log.open("w") as stream:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        if done.returncode == -signal.SIGINT:  # the whole process group was interrupted
            raise KeyboardInterrupt
        if done.returncode != 0:
            last = log.read_text().strip().rpartition("\n")[2]
            raise FinepageError(
                f"the process {name!r} ended with status {done.returncode}: {last} "
                "(--keep DIR keeps the whole log.)"
            )

    @contextmanager
    def _step(self, text: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._console.status(text):
            yield
        self._console.print(f"{text}: {time.perf_counter() - start:.1f} s", highlight=False)


def print_result(result: DemoResult) -> None:
    """Print the table."""
    stock, ours = (result.engines[name] for name in ENGINES)
    form = "" if result.weights is None else f" in {result.weights}"
    table = Table(title=f"Llama, {format_bytes(result.weight_bytes)} of weights{form}")
    table.add_column("engine")
    for title in ENGINES.values():
        table.add_column(title, justify="right")
    table.add_column("limit or bound", justify="right")

    def add(label: str, attribute: str, show: Callable[[Any], str], limit: str = "") -> None:
        values = [show(getattr(engine, attribute)) for engine in (stock, ours)]
        table.add_row(label, *values, limit)

    def bound(lower_bound_bytes: int | None) -> str:
        return "" if lower_bound_bytes is None else f">= {format_bytes(lower_bound_bytes)}"

    add("tokens equal to plain transformers", "tokens_equal", ("no", "yes").__getitem__)
    limit = f"<= {format_bytes(result.budget_bytes)} (budget)"
    add("peak device bytes", "peak_bytes", format_bytes, limit)
    limit = bound(ours.prefill_lower_bound_bytes)
    add("reloaded in a prefill", "prefill_reloaded_bytes", format_bytes, limit)
    limit = bound(ours.decode_lower_bound_bytes)
    add("reloaded in a steady decode step", "decode_reloaded_bytes", format_bytes, limit)
    add("wall time, first call", "wall_s", "{:.2f} s".format)
    add("wall time, second call", "wall_again_s", "{:.2f} s".format)
    show_table(table)
    print(FOOTNOTE)
    if not has_accelerator():
        print(FOOTNOTE_CPU)


def has_accelerator() -> bool:
    """Return True if the runs use an accelerator."""
    import torch

    return torch.accelerator.is_available()
