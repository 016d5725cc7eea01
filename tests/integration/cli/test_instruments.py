"""What is counted of a run, and that each figure gets to its own place in the demo."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from rich.console import Console
from torch import nn

import ds_finepage.run
from ds_finepage._compat.torch import _profiler_enabled
from ds_finepage.cli import demo, main
from ds_finepage.cli.demo import TINY, Demo
from ds_finepage.cli.demo_results import DemoResult, print_results
from ds_finepage.cli.instruments import Reading, read, reading_of
from ds_finepage.compare.counting import FetchCounter
from ds_finepage.errors import FinepageError, PlanInfeasibleError, RankError
from ds_finepage.execution import meter
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.stats import Counters, PassStats, Stats


def pass_stats(reloaded: int, lower_bound: int) -> PassStats:
    return PassStats(
        name="pass",
        num_tasks=1,
        arena_bytes=0,
        non_arena_bytes=0,
        min_budget_bytes=0,
        needed_budget_bytes=0,
        lower_bound_bytes=lower_bound,
        last_reloaded_bytes=reloaded,
    )


def stats_with(*passes: PassStats, reasons: tuple[str, ...] = ()) -> Stats:
    counters = {**asdict(Counters()), "unplanned_reasons": reasons}
    return Stats(budget_bytes=600, weight_bytes=1500, passes=passes, **counters)


def engine_with(stats: Stats) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(finepage=SimpleNamespace(stats=stats)))


def test_the_first_pass_is_the_prefill_and_the_last_a_decode_step() -> None:
    stats = stats_with(pass_stats(11, 12), pass_stats(13, 14), pass_stats(15, 16))
    assert reading_of(engine_with(stats), 17, FetchCounter()) == Reading(
        peak_bytes=17,
        prefill_reloaded_bytes=11,
        prefill_lower_bound_bytes=12,
        decode_reloaded_bytes=15,
        decode_lower_bound_bytes=16,
        budget_bytes=600,
        weight_bytes=1500,
    )


def test_a_run_without_plans_has_no_reading() -> None:
    stats = stats_with(pass_stats(11, 12), reasons=("this", "that"))
    with pytest.raises(FinepageError, match="ran without a plan: this; that"):
        reading_of(engine_with(stats), 17, FetchCounter())


class Fetching(nn.Module):
    """Fetches in each forward, as stock hooks do."""

    def __init__(self, fetches: FetchCounter) -> None:
        super().__init__()
        self.fetches = fetches
        self.weight = nn.Parameter(torch.zeros(2))
        self.weight.ds_tensor = self.weight.data

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.fetches._count(100 * input_ids.shape[-1] + 1)
        self.fetches._count(7)
        return input_ids


def test_of_stock_the_last_prefill_and_the_last_decode_step_count() -> None:
    fetches = FetchCounter()
    module = Fetching(fetches)
    fetches._count(10**6)  # outside of any forward
    fetches.watch(module)
    for length in (5, 1, 1, 3, 1):
        module(torch.zeros(1, length))
    module(input_ids=torch.zeros(1, 1))
    found = reading_of(SimpleNamespace(optimizer=None, module=module), 17, fetches)
    assert found == Reading(
        peak_bytes=17, prefill_reloaded_bytes=308, decode_reloaded_bytes=108, weight_bytes=8
    )


def test_a_script_that_fails_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(**kwargs: Any) -> tuple[Any]:
        return (SimpleNamespace(optimizer=SimpleNamespace(finepage=None), module=nn.Identity()),)

    def script(arguments: list[str]) -> None:
        deepspeed.initialize()
        raise PlanInfeasibleError("no room", min_budget_bytes=1)

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(FetchCounter, "install", lambda self: None)
    monkeypatch.setattr(ds_finepage.run, "main", script)
    with pytest.raises(PlanInfeasibleError):
        read("script.py", [])
    assert deepspeed.initialize is initialize
    left = meter._running.get()
    if left is not None:  # Python would crash at its exit, and the tests have no status then
        left.__exit__(None, None, None)
    assert left is None
    with DeviceMeter(torch.device("cpu")):  # raises while another meter is on
        pass


STOCK = Reading(peak_bytes=21, prefill_reloaded_bytes=22, decode_reloaded_bytes=23, weight_bytes=24)
OURS = Reading(
    peak_bytes=31,
    prefill_reloaded_bytes=32,
    prefill_lower_bound_bytes=33,
    decode_reloaded_bytes=34,
    decode_lower_bound_bytes=35,
    budget_bytes=36,
    weight_bytes=37,
)
TOKENS = [1, 2, 3]


SECONDS = {"plain": [9.0, 9.5], "zero_inference": [1.0, 0.5], "finepage": [2.0, 0.25]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Demo:
    """Make a demo that runs no process."""
    readings = {"zero_inference": STOCK, "finepage": OURS}
    monkeypatch.setattr(Demo, "_python", lambda *args: None)
    monkeypatch.setattr(
        Demo,
        "_generate",
        lambda self, name, options=(): [{"tokens": TOKENS, "seconds": SECONDS[name]}],
    )
    monkeypatch.setattr(Demo, "_meter", lambda self, name: [(readings[name], TOKENS)])
    return Demo(tmp_path, {"device_budget": "40%weights"}, 8, Console(file=io.StringIO()))


def test_an_interrupt_ends_the_runs_that_other_threads_wait_for(
    fake: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = Event(), Event()
    heard: list[bool] = []

    def meter(self: Demo, name: str) -> None:
        begun.set()
        heard.append(over.wait(timeout=10.0))

    def generate(self: Demo, name: str, options: object = ()) -> None:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "_meter", meter)
    monkeypatch.setattr(Demo, "_generate", generate)
    monkeypatch.setattr(fake._children, "end", over.set)
    with pytest.raises(KeyboardInterrupt):
        fake.run(TINY)
    assert heard and all(heard)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_processes_of_a_demo_end_with_it(
    tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_finepage.compare.children.subprocess.Popen", None)
    made = Demo(tmp_path, {}, 8, Console(file=io.StringIO()), num_ranks=num_ranks)
    made._children.end()
    with pytest.raises(FinepageError, match="starts no more processes"):
        made._generate("finepage")


def test_a_process_that_fails_ends_the_demo(tmp_path: Path) -> None:
    made = Demo(tmp_path, {}, 8, Console(file=io.StringIO()))
    with pytest.raises(FinepageError, match="ended with status 3"):
        made._python("failed", "-c", "raise SystemExit(3)")


def test_each_figure_of_the_demo_is_that_of_its_engine_and_pass(fake: Demo) -> None:
    (found,) = (result.as_json() for result in fake.run(TINY))
    assert found == {
        "budget_bytes": 36,
        "weight_bytes": 37,
        "engines": {
            "zero_inference": {
                "tokens_equal": True,
                "peak_bytes": 21,
                "prefill_reloaded_bytes": 22,
                "decode_reloaded_bytes": 23,
                "wall_s": 1.0,
            },
            "finepage": {
                "tokens_equal": True,
                "peak_bytes": 31,
                "prefill_reloaded_bytes": 32,
                "decode_reloaded_bytes": 34,
                "decode_lower_bound_bytes": 35,
                "wall_s": 2.0,
            },
        },
    }


def test_each_line_of_the_table_shows_its_own_figure(
    fake: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    print_results(fake.run(TINY))
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}
    assert shown["tokens equal to plain transformers"] == ["yes", "yes", ""]
    assert shown["peak device bytes"] == ["21 B", "31 B", "<= 36 B (budget)"]
    assert shown["reloaded in a prefill"] == ["22 B", "32 B", ">= 33 B"]
    assert shown["reloaded in a steady decode step"] == ["23 B", "34 B", ">= 35 B"]
    assert shown["wall time, first call"] == ["1.00 s", "2.00 s", ""]
    assert shown["wall time, second call"] == ["0.50 s", "0.25 s", ""]


def test_other_tokens_with_the_meter_are_other_tokens(
    fake: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Demo, "_meter", lambda self, name: [(OURS, TOKENS if name == "finepage" else [1, 2, 4])]
    )
    (found,) = fake.run(TINY)
    assert found.engines["finepage"].tokens_equal
    assert not found.engines["zero_inference"].tokens_equal


def test_the_two_engines_get_configs_that_differ_in_one_setting(fake: Demo) -> None:
    fake.run(TINY)
    configs = {
        name: json.loads((fake._folder / f"{name}.json").read_text()) for name in demo.ENGINES
    }
    sections = {name: config.pop("finepage") for name, config in configs.items()}
    assert configs["finepage"] == configs["zero_inference"]
    assert sections["finepage"] == {"enabled": True, "device_budget": "40%weights"}
    assert sections["zero_inference"] == {"enabled": False, "device_budget": "40%weights"}


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DemoResult]:
    """Run a demo of two ranks without a process; the figures of rank 1 are larger by 100."""

    def write(output: Path, reading: Path | None, engine: str, rank: int) -> None:
        output.write_text(json.dumps({"tokens": TOKENS, "seconds": SECONDS[engine]}))
        if reading is not None:
            found = {"zero_inference": STOCK, "finepage": OURS}[engine]
            reading.write_text(json.dumps(asdict(replace(found, peak_bytes=50 + 100 * rank))))

    def run_ranks(commands: Any, logs: list[Path], variables: Any, **_: Any) -> None:
        for rank, command in enumerate(commands):
            engine = Path(command[command.index("--deepspeed_config") + 1]).stem
            reading = command[2] if command[0] == "-m" else None
            write(Path(command[-1]), reading, engine, rank)
            assert logs[rank].name.endswith(f"_rank{rank}.log")
            assert variables["HF_HUB_OFFLINE"] == "1"

    def python(self: Demo, name: str, *command: Any) -> None:
        if name == "plain":
            write(Path(command[-1]), None, name, 0)

    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    monkeypatch.setattr(Demo, "_python", python)
    settings = {"device_budget": "40%weights"}
    console = Console(file=io.StringIO())
    return Demo(tmp_path, settings, 8, console, num_ranks=2).run(replace(TINY, dtype="float32"))


def test_each_rank_has_its_own_figures(
    of_ranks: list[DemoResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [r.engines["finepage"].peak_bytes for r in of_ranks] == [50, 150]
    assert all(e.tokens_equal for r in of_ranks for e in r.engines.values())
    print_results(of_ranks)
    out = capsys.readouterr().out
    assert "37 B of weights a rank, over 2 ranks" in out
    lines = [line.split("│") for line in out.splitlines() if "│" in line]
    shown = {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}
    assert shown["peak device bytes, rank 0"] == ["50 B", "50 B", "<= 36 B (budget)"]
    assert shown["peak device bytes, rank 1"] == ["150 B", "150 B", "<= 36 B (budget)"]
    config = json.loads((tmp_path / "zero_inference.json").read_text())
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert config["bf16"] == {"enabled": False}


def test_a_fault_of_one_rank_is_a_fault_of_the_demo(
    of_ranks: list[DemoResult], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Demo, "run", lambda self, shape: of_ranks)
    assert main(["demo", "--tiny", "--ranks", "2", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"ranks": [result.as_json() for result in of_ranks]}
    assert [line[:20] for line in captured.err.splitlines()] == [
        "ds-finepage: rank 0:",
        "ds-finepage: rank 1:",
    ]


def test_a_rank_that_fails_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_ranks(*args: Any, **options: Any) -> None:
        raise RankError("rank 1 ended with status 3: gone")

    made = Demo(tmp_path, {}, 8, Console(file=io.StringIO()), num_ranks=2)
    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    with pytest.raises(RankError, match=r"^the run 'finepage': rank 1 ended with .*--keep DIR"):
        made._generate("finepage")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: 0 is less than 1."),
        (["--ranks", "3"], "3 ranks do not divide the 4 attention heads of the demo's Llama"),
        (["--ranks", "2", "--weights", "int4"], "packed weights are not cut over ranks"),
    ],
)
def test_ranks_that_cannot_run_are_refused_before_any_work(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Demo, "run", lambda self, shape: pytest.fail("it began to work"))
    assert main(["demo", "--tiny", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("world_size", "begins"), [("1", True), ("2", False)])
def test_partitions_of_several_ranks_are_no_device_bytes_on_the_cpu(
    world_size: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    engine = SimpleNamespace(optimizer=SimpleNamespace(finepage=None), module=nn.Identity())

    def initialize(**kwargs: Any) -> tuple[Any]:
        found.append(_profiler_enabled())
        return (engine,)

    def script(arguments: list[str]) -> None:
        deepspeed.initialize()
        found.append(_profiler_enabled())

    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(FetchCounter, "install", lambda self: None)
    monkeypatch.setattr(ds_finepage.run, "main", script)
    read("script.py", [])
    assert found == [begins, True]
