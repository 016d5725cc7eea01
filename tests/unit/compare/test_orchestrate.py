"""Runs come one after the other, are kept as soon as they are finished, and never run twice."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ds_finepage.compare import modelling, orchestrate
from ds_finepage.compare.engine import REQUESTS, RunRequest
from ds_finepage.compare.orchestrate import Comparison, checkpoint_in, make_prompts
from ds_finepage.compare.worker import RUN_FILE, RUNS, TOKENS_FILE
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.planning.baselines.accelerate import MapSettings
from ds_finepage.reporting.results import (
    LOG_FILE,
    CompareSettings,
    PhaseFigures,
    Results,
    load_results,
    run_folder,
)
from tests.unit.compare.runs import DS_CONFIG, results, run, settings

TOKENS = [[[1, 2, 3]], [[1, 2, 3]]]


class FakeModeller:
    """Models every policy alike; a budget of less than 10% is too small."""

    budget_bytes, weight_bytes = 1000, 2000
    tuned: tuple[str, ...] = ()  # policies that search settings, and need more as well
    broken: tuple[str, ...] = ()  # policies with a fault
    large: tuple[str, ...] = ("zero", "finepage")  # policies that need more than 5% of the weights

    def __init__(self, folder: Path, settings: CompareSettings, batch: int) -> None:
        self.is_small = settings.device_budget == "5%weights"

    def at(self, device_budget: str) -> FakeModeller:
        other = copy.copy(self)
        other.is_small = False
        return other

    def engine(self, policy: str) -> MapSettings | None:
        if self.is_small and policy in self.tuned:
            raise PlanInfeasibleError(f"no settings of {policy} have room")
        return MapSettings(7) if policy == "zero" else None

    def figures(self, policy: str, engine: Any) -> tuple[PhaseFigures, PhaseFigures]:
        assert engine == (MapSettings(7) if policy == "zero" else None)
        if policy in self.broken:
            raise IndexError("no such buffer\nand more")
        if self.is_small and policy in self.large:
            raise PlanInfeasibleError(f"{policy} has no room", min_budget_bytes=len(policy))
        prefill = PhaseFigures(modelled_ns=len(policy), lower_bound_bytes=3)
        return prefill, PhaseFigures(modelled_ns=2 * len(policy))


class Fake:
    """Stands for the processes of the arms.

    Attributes:
        requests: Of all workers so far.
        tokens: By arm, where they are not ``TOKENS``.
        act: Called with the name of each arm before it writes anything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[RunRequest] = []
        self.tokens: dict[str, Any] = {}
        self.act: Callable[[str], None] = lambda name: None
        self.writes = True
        self.console = io.StringIO()

    def run_process(self, arguments: Sequence[str], log: Path, *, num_ranks: int = 1) -> int:
        log.write_text("loading\nKilled by something\n")
        request = REQUESTS.validate_json(Path(arguments[2]).read_bytes())
        self.requests.append(request)
        self.act(request.arm)
        if not self.writes:
            return -9
        folder = Path(arguments[-1])
        phase = PhaseFigures(h2d_bytes=5, wall_ns=9)
        found = run(request.arm, batch=request.batch, prefill=phase, decode=phase)
        (folder / RUN_FILE).write_bytes(RUNS.dump_json(found))
        (folder / TOKENS_FILE).write_text(json.dumps(self.tokens.get(request.arm, TOKENS)))
        return 0

    def comparison(self, start: Results | None = None, **changes: Any) -> Comparison:
        start = start or results(**changes)
        assert start.settings is not None
        return Comparison(
            start.settings,
            self.folder,
            Console(file=self.console),
            device="cpu",
            start=start,
        )

    @property
    def arms(self) -> list[tuple[str, int]]:
        return [(request.arm, request.batch) for request in self.requests]


def installed(made: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let comparisons in the folder run no other processes, and model nothing themselves."""
    monkeypatch.setattr(orchestrate, "run_process", made.run_process)
    monkeypatch.setattr(orchestrate, "modeller_of", FakeModeller)
    (made.folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(Comparison, "_checkpoint", lambda self: made.folder)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    made = Fake(tmp_path)
    installed(made, monkeypatch)
    return made


def test_every_arm_runs_once_with_the_same_request(fake: Fake) -> None:
    found = fake.comparison(batches=(1, 2)).run()
    order = [(arm, batch) for batch in (1, 2) for arm in ("plain", "zero", "finepage")]
    assert fake.arms == order == [(r.arm, r.batch) for r in found.runs]
    assert found == load_results(fake.folder)
    plain, zero, ours, *_ = fake.requests
    assert plain.prompt_ids == zero.prompt_ids and len(plain.prompt_ids[0]) == 8
    assert zero.settings == {"modules_on_device": 7} and ours.settings == {}
    same = dataclasses.replace(zero, arm="finepage", settings={})
    assert ours == same
    assert ours.ds_config == DS_CONFIG and ours.budget_bytes == 1000
    assert len(fake.requests[-1].prompt_ids) == 2


def test_a_run_gets_the_figures_of_the_simulator(fake: Fake) -> None:
    ours = fake.comparison().run().runs[-1]
    assert ours.weight_bytes == 2000 and ours.tokens_equal is True
    assert (ours.prefill.modelled_ns, ours.decode.modelled_ns) == (8, 16)
    assert (ours.prefill.h2d_bytes, ours.prefill.wall_ns) == (5, 9)
    assert ours.prefill.lower_bound_bytes == 3 and ours.decode.lower_bound_bytes is None


def test_tokens_are_compared_with_those_of_plain_transformers(fake: Fake) -> None:
    fake.tokens = {"zero": [[[1, 2, 3]], [[1, 2, 4]]]}
    found = fake.comparison().run()
    assert [r.tokens_equal for r in found.runs] == [True, False, True]
    fake.tokens = {"plain": [[[5]], [[5]]]}
    found = fake.comparison().run()
    assert [r.tokens_equal for r in found.runs] == [True, False, False]
    assert all(r.notes == () for r in found.runs)


def test_without_plain_the_first_arm_takes_its_place(fake: Fake) -> None:
    fake.tokens = {"finepage": [[[5]]]}
    found = fake.comparison(arms=("zero", "finepage")).run()
    assert [r.tokens_equal for r in found.runs] == [True, False]
    assert found.runs[-1].notes == ("its tokens were compared with those of zero",)


def test_a_process_that_dies_is_a_row_and_the_next_arm_runs(fake: Fake) -> None:
    def act(name: str) -> None:
        fake.writes = name != "zero"

    fake.act = act
    _, zero, ours = fake.comparison().run().runs
    assert zero.reason == "the process ended with status -9: Killed by something"
    assert zero.tokens_equal is None and ours.tokens_equal is True


def test_finished_runs_are_kept_when_the_user_interrupts(fake: Fake) -> None:
    def act(name: str) -> None:
        if name == "finepage":
            raise KeyboardInterrupt

    fake.act = act
    with pytest.raises(KeyboardInterrupt):
        fake.comparison().run()
    kept = load_results(fake.folder)
    assert [r.arm for r in kept.runs] == ["plain", "zero"]
    fake.act = lambda name: None
    fake.requests.clear()
    found = fake.comparison(kept).run()
    assert [name for name, _ in fake.arms] == ["finepage"]
    assert [r.arm for r in found.runs] == ["plain", "zero", "finepage"]
    assert found.runs[:2] == kept.runs and found.runs[-1].tokens_equal is True


def test_a_finished_comparison_asks_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake.comparison().run()
    monkeypatch.setattr(Comparison, "_checkpoint", lambda self: pytest.fail("it asks for a model"))
    assert fake.comparison(found).run() == found


def test_a_full_disk_loses_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def full(descriptor: int) -> None:
        if len(fake.requests) == 2:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot write .*results.json: .*No space left"):
        fake.comparison().run()
    assert [r.arm for r in load_results(fake.folder).runs] == ["plain"]


def test_a_budget_below_every_arms_least_is_refused_before_any_run(fake: Fake) -> None:
    with pytest.raises(PlanInfeasibleError, match="zero needs 4 B .* Raise --device-budget") as e:
        fake.comparison(device_budget="5%weights").run()
    assert e.value.min_budget_bytes == 4
    assert "with batch 1 no arm can hold the device budget of 1000 B (1000 bytes)" in str(e.value)
    assert fake.requests == []


def test_an_arm_that_cannot_hold_the_budget_is_modelled_without_one(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModeller, "large", ("zero",))
    _, zero, ours = fake.comparison(device_budget="5%weights").run().runs
    assert zero.prefill.modelled_ns == 4
    assert zero.notes == ("cannot hold the budget by its model, and is modelled without one",)
    assert ours.notes == ()


def test_an_arm_without_settings_that_hold_the_budget_does_not_run(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModeller, "large", ())
    monkeypatch.setattr(FakeModeller, "tuned", ("zero",))
    _, zero, ours = fake.comparison(device_budget="5%weights").run().runs
    assert zero.reason == "no settings of zero have room" and ours.reason is None
    assert [name for name, _ in fake.arms] == ["plain", "finepage"]


# Faults of one arm, or of the simulator, are rows.


def test_a_fault_of_one_policy_is_a_note_of_its_arm(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModeller, "broken", ("zero",))
    plain, zero, ours = fake.comparison().run().runs
    assert zero.notes == ("not modelled: IndexError: no such buffer",)
    assert zero.reason is None and zero.decode == PhaseFigures(h2d_bytes=5, wall_ns=9)
    assert fake.requests[1].settings == {"modules_on_device": 7}
    assert plain.notes == () == ours.notes and ours.decode.modelled_ns == 16


def test_a_fault_in_the_search_of_settings_is_the_reason_of_its_arm(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(self: FakeModeller, policy: str) -> None:
        if policy == "zero":
            raise KeyError(policy)

    monkeypatch.setattr(FakeModeller, "engine", engine)
    _, zero, ours = fake.comparison().run().runs
    assert zero.reason == "not modelled: KeyError: 'zero'" and zero.notes == ()
    assert ours.reason is None and [name for name, _ in fake.arms] == ["plain", "finepage"]


@pytest.mark.parametrize("fault", ["no process", "no figures", "no tokens"])
def test_a_fault_around_the_process_of_an_arm_is_its_reason(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def run_one(arguments: Sequence[str], log: Path, **options: Any) -> int:
        status = fake.run_process(arguments, log)
        if fake.requests[-1].arm == "zero" and fault == "no process":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if fake.requests[-1].arm == "zero":
            name = RUN_FILE if fault == "no figures" else TOKENS_FILE
            (Path(arguments[-1]) / name).write_text("{")
        return status

    monkeypatch.setattr(orchestrate, "run_process", run_one)
    plain, zero, ours = fake.comparison().run().runs
    named = {"no process": "BlockingIOError: ", "no figures": "ValidationError: 1 "}
    assert str(zero.reason).startswith(named.get(fault, "JSONDecodeError: "))
    assert plain.tokens_equal is True is ours.tokens_equal
    assert zero.budget_bytes == 1000 and zero.weight_bytes == 2000


def test_files_of_an_earlier_try_are_gone(fake: Fake) -> None:
    folder = run_folder(fake.folder, "zero_b1")
    folder.mkdir(parents=True)
    (folder / RUN_FILE).write_text("old")
    fake.writes = False
    assert fake.comparison(arms=("zero",)).run().runs[0].reason is not None
    assert sorted(path.name for path in folder.iterdir()) == [LOG_FILE, "request.json"]


def test_a_folder_that_cannot_be_made_is_an_error(fake: Fake) -> None:
    (fake.folder / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="cannot make .*runs"):
        fake.comparison().run()


# Checkpoints.


def test_a_shipped_name_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Fake(tmp_path)
    calls: list[tuple[Path, str, int]] = []

    def make(folder: Path, model: str, num_layers: int) -> None:
        calls.append((folder, model, num_layers))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(orchestrate, "make_checkpoint", make)
    for _ in range(2):
        assert made.comparison()._checkpoint() == tmp_path / "model"
    assert calls == [(tmp_path / "model.part", "llama-7b", 2)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("it has no room"), "^it has no room$"),
        (OSError(28, "No space left on device"), "^OSError: .*No space left on device$"),
    ],
)
def test_a_checkpoint_that_cannot_be_made_is_refused(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, *_: object) -> None:
        folder.mkdir()
        raise error

    monkeypatch.setattr(orchestrate, "make_checkpoint", fail)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            Fake(tmp_path).comparison()._checkpoint()
        assert not (tmp_path / "model").exists()
        (tmp_path / "model.part").rmdir()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").touch()
    found = Fake(tmp_path).comparison(model=str(tmp_path), layers=None)._checkpoint()
    assert found == tmp_path


CONFIG = {"model_type": "llama", "vocab_size": 77, "hidden_size": 64, "num_attention_heads": 4}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read model config"):
        checkpoint_in(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=r"has no weights \(\*.safetensors.*llama-7b"):
        checkpoint_in(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert checkpoint_in(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("ds_config", "hardware", "expected"),
    [
        ({"bf16": {"enabled": True}}, "a100-80gb", "bfloat16"),
        ({"bf16": {"enabled": True}}, "t4", "float16"),  # which is as large, and fast there
        ({"bf16": {"enabled": False}}, "t4", "float32"),
    ],
)
def test_the_dtype_that_runs_is_modelled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ds_config: dict[str, Any],
    hardware: str,
    expected: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(modelling, "Modeller", lambda *_, **given: given)
    asked = settings(ds_config=json.dumps(ds_config), hardware=hardware)
    given: Any = modelling.modeller_of(tmp_path, asked, 1)
    assert (given["dtype"], given["hardware"]) == (expected, hardware)


def test_prompts_are_the_same_every_time_and_differ_from_row_to_row(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first, again = (make_prompts(tmp_path, batch=2, prompt_tokens=9) for _ in "01")
    assert first == again and len(first) == 2 and {len(row) for row in first} == {9}
    assert first[0] != first[1] and max(map(max, first)) < 77
