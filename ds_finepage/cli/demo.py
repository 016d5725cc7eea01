"""Show both engines side by side on a small model.

Makes a Llama checkpoint with a tokenizer (random weights from a fixed seed, nothing is downloaded)
and runs examples/generate.py on it, each time in a process of its own: by plain transformers, for
tokens to compare with; by stock ZeRO-Inference; and by ds_finepage under a budget. The ds_configs
of the two engines differ in finepage.enabled alone. The demo uses the accelerator if there is one.
With --weights int4 all three run the same packed model. With --ranks 2 both engines run on two
ranks of this machine, each with its own shard of the model (tensor parallelism).

Exit status: 0; 1 if tokens differ or the budget was exceeded; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import ds_finepage
from ds_finepage.cli.demo_results import (
    ENGINES,
    DemoResult,
    EngineResult,
    has_accelerator,
    print_results,
    problems_of_ranks,
)
from ds_finepage.cli.instruments import Reading
from ds_finepage.cli.options import add_weights, one_form_of, refuse_packed_ranks
from ds_finepage.cli.output import add_json
from ds_finepage.compare.checkpoint import LlamaShape, config_of
from ds_finepage.compare.children import Children
from ds_finepage.compare.processes import last_line, require_ranks, run_process, run_ranks
from ds_finepage.config import FinepageConfig
from ds_finepage.errors import ConfigError, FinepageError, RankError
from ds_finepage.graph.packed import UNPACKED
from ds_finepage.planning.policies import RUNNABLE

PROMPT = "The planner never sees torch; the executor never decides."
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
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="start N ranks, each with its shard of the model; the budget is that of one rank "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep checkpoint, ds_configs and logs there"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ds-finepage demo``."""
    shape = shape_of(arguments)
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
        console = Console(stderr=True)
        demo = Demo(folder, settings, arguments.new_tokens, console, num_ranks=arguments.ranks)
        results = demo.run(shape)
    if arguments.json:
        found = [result.as_json() for result in results]
        print(json.dumps(found[0] if len(found) == 1 else {"ranks": found}))
    else:
        print_results(results)
    problems = problems_of_ranks(results)
    for problem in problems:
        print(f"ds-finepage: {problem}", file=sys.stderr)
    if arguments.keep is not None and not arguments.json:
        print(f"\nBy hand:\n\n    {by_hand(arguments.keep, arguments.ranks)}")
    return 1 if problems else 0


def shape_of(arguments: argparse.Namespace) -> LlamaShape:
    """Return the model of the demo.

    Args:
        arguments: The options.

    Raises:
        ConfigError: The ranks cannot be started, or the model cannot be cut over them.
    """
    shape, num_ranks = TINY if arguments.tiny else LlamaShape(), arguments.ranks
    require_ranks(num_ranks)
    refuse_packed_ranks(num_ranks, one_form_of(arguments))
    if num_ranks == 1:
        return shape
    from ds_finepage.capture.shards import require_heads  # imports torch

    require_heads(config_of(shape), num_ranks, "the demo's Llama")
    return replace(shape, dtype="float32")


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


def by_hand(folder: Path, num_ranks: int) -> str:
    """Return the command that runs ds_finepage on a kept folder."""
    folder = folder.resolve()
    words = ["deepspeed", "--num_gpus", str(num_ranks), str(example("generate.py"))]
    words += ["--model", str(folder / "model"), "--prompt", PROMPT]
    words += ["--deepspeed", "--deepspeed_config", str(folder / "finepage.json")]
    return shlex.join(words)


class Demo:
    """The runs of one demo in one folder."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        num_new_tokens: int,
        console: Console,
        *,
        num_ranks: int = 1,
    ) -> None:
        """Prepare a demo.

        Args:
            folder: An empty folder.
            settings: The ``finepage`` section without ``enabled``.
            num_new_tokens: Tokens to generate in each call.
            console: Shows the progress.
            num_ranks: Ranks that run an engine together.
        """
        self._children = Children()
        self._num_ranks = num_ranks
        self._folder = folder
        self._model = folder / "model"
        self._settings = settings
        self._num_new_tokens = num_new_tokens
        self._console = console
        # Half of the cores compute; the others serve the transfer lanes. Sums, and so the tokens,
        # depend on the number of threads, so every run has the same.
        threads = str(max(1, (os.cpu_count() or 1) // 2 // num_ranks))
        self._environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",  # the last line of a log is then the last that was written
        }

    def run(self, shape: LlamaShape) -> list[DemoResult]:
        """Run the demo; return the figures of each rank.

        Args:
            shape: The model.

        Raises:
            FinepageError: A process failed.
            KeyboardInterrupt: The user has interrupted it.
        """
        with self._step("making a Llama checkpoint"):
            shape_json = json.dumps(asdict(shape))
            self._python(
                "checkpoint", "-m", "ds_finepage.compare.checkpoint", self._model, shape_json
            )
            for name in ENGINES:
                self._write_config(name, shape.dtype)
        pool = ThreadPoolExecutor(max_workers=2)  # these runs are not timed
        with self._step("plain transformers for reference; both engines with a memory meter"):
            try:
                plain = pool.submit(self._generate, "plain", self._engine_options("plain"))
                metered = {name: pool.submit(self._meter, name) for name in ENGINES}
                expected = plain.result()[0]["tokens"]
                readings = {name: future.result() for name, future in metered.items()}
            except BaseException:
                self._children.end()  # its threads wait for them, and hear of no interrupt
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        ranks: list[dict[str, EngineResult]] = [{} for _ in range(self._num_ranks)]
        for name, title in ENGINES.items():
            with self._step(title):
                runs = self._generate(name, self._engine_options(name))
            for engines, run, (reading, tokens) in zip(ranks, runs, readings[name], strict=True):
                engines[name] = EngineResult(
                    **asdict(reading),
                    tokens_equal=run["tokens"] == tokens == expected,
                    wall_s=round(run["seconds"][0], 3),
                    wall_again_s=round(run["seconds"][-1], 3),
                )
        return [self._result(engines) for engines in ranks]

    def _result(self, engines: dict[str, EngineResult]) -> DemoResult:
        ours = engines["finepage"]
        assert ours.budget_bytes is not None
        return DemoResult(
            budget_bytes=ours.budget_bytes,
            weight_bytes=ours.weight_bytes,
            engines=engines,
            weights=self._settings.get("weights"),
        )

    def _write_config(self, name: str, dtype: str) -> None:
        ranks = {"tensor_parallel": {"autotp_size": self._num_ranks}}
        ds_config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": has_accelerator()},
            },
            **(ranks if self._num_ranks > 1 else {}),
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

    def _meter(self, name: str) -> list[tuple[Reading, list[int]]]:
        """Run the example under instruments; return the reading and the tokens of each rank."""
        metered = f"{name}_metered"
        written = self._generate(metered, self._engine_options(name), is_metered=True)
        readings = [file.with_suffix(".reading") for file in self._outputs(metered)]
        return [
            (Reading(**json.loads(reading.read_text())), each["tokens"])
            for reading, each in zip(readings, written, strict=True)
        ]

    def _outputs(self, name: str) -> list[Path]:
        """Return the file that each rank of a run writes; plain transformers runs on one."""
        if self._num_ranks == 1 or name == "plain":
            return [self._folder / f"{name}_output.json"]
        return [self._folder / f"{name}_rank{n}_output.json" for n in range(self._num_ranks)]

    def _generate(
        self, name: str, options: Sequence[str | Path] = (), *, is_metered: bool = False
    ) -> list[dict[str, Any]]:
        """Run examples/generate.py on every rank; return the object that each wrote.

        Args:
            name: Of the logs and the outputs.
            options: More options of the example.
            is_metered: Run it under instruments.
        """
        given: list[str | Path] = ["--model", self._model, "--prompt", PROMPT, *options]
        given += ["--new-tokens", str(self._num_new_tokens), "--calls", str(NUM_CALLS)]
        outputs = self._outputs(name)
        commands: list[list[str | Path]] = []
        for output in outputs:
            command: list[str | Path] = []
            if is_metered:
                command = ["-m", "ds_finepage.cli.instruments", output.with_suffix(".reading")]
            commands.append([*command, example("generate.py"), *given, "--json", output])
        if len(commands) == 1:
            self._python(name, *commands[0])
        else:
            self._ranks(name, commands)
        return [json.loads(output.read_text()) for output in outputs]

    def _ranks(self, name: str, commands: Sequence[Sequence[str | Path]]) -> None:
        """Run the processes of all ranks to their end, each with its output in a log.

        Raises:
            RankError: One failed, or all together took too long.
        """
        logs = [self._folder / f"{name}_rank{rank}.log" for rank in range(len(commands))]
        try:
            run_ranks(commands, logs, self._environment, children=self._children)
        except RankError as error:
            raise RankError(f"the run {name!r}: {error} (--keep DIR keeps all logs.)") from error

    def _python(self, name: str, *arguments: str | Path) -> None:
        """Run a Python process to its end, with its output in a log.

        Raises:
            FinepageError: It failed.
            KeyboardInterrupt: It was interrupted.
        """
        log = self._folder / f"{name}.log"
        status = run_process(
            arguments, log, self._environment, folder=self._folder, children=self._children
        )
        if status:
            raise FinepageError(
                f"the process {name!r} ended with status {status}: {last_line(log)} "
                "(--keep DIR keeps the whole log.)"
            )

    @contextmanager
    def _step(self, text: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._console.status(text):
            yield
        self._console.print(f"{text}: {time.perf_counter() - start:.1f} s", highlight=False)
