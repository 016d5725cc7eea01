"""The options of ``ds-finepage compare``, its folder and its exit status."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli import compare as command
from ds_finepage.compare.arms import ARMS
from ds_finepage.reporting.results import RESULTS_FILE, CompareSettings, Results, save_results
from tests.commands import Cli
from tests.unit.compare.runs import DS_CONFIG, results, run

OURS = run("finepage", 20, 30, tokens_equal=True)
OPTIONS = ("--model", "llama-7b", "--layers", "2", "--prompt", "8", "--new", "5", "--repeats", "1")


class Compared:
    """Stands for the comparison itself.

    Attributes:
        starts: What each call started from.
        runs: What each call finds.
    """

    def __init__(self) -> None:
        self.starts: list[Results] = []
        self.folders: list[Path] = []
        self.runs: tuple[Any, ...] = (OURS,)
        self.error: BaseException | None = None

    def __call__(
        self, settings: CompareSettings, folder: Path, start: Results, **_: Any
    ) -> Results:
        assert start.settings == settings
        self.starts.append(start)
        self.folders.append(folder)
        found = start
        for each in self.runs:
            found = found.with_run(each)
        save_results(found, folder)
        if self.error is not None:
            raise self.error
        return found


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    made = Compared()
    monkeypatch.setattr(command, "compare", made)
    monkeypatch.setattr(command, "device_type", lambda: "cpu")
    return made


@pytest.fixture
def call(compared: Compared, cli: Cli) -> Cli:
    """Calls ``compare`` with few tokens of a model of two layers."""
    return cli.of("compare", *OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--new", "3"), "--new: 3 is too few. Write at least 4"),
        (("--prompt", "1"), "--prompt: 1 is too few. Write at least 2"),
        (("--repeats", "0"), "--repeats: 0 is too few"),
        (("--batch", "1,x"), "--batch: 'x' is not a whole number of 1 or more"),
        (("--arms", "zeros"), "unknown arm 'zeros'. Did you mean 'zero'"),
        (("--hardware", "t5"), "t5"),
        (("--device-budget", "50%"), "--device-budget: '50%' is ambiguous"),
        (("--layers", "0"), "--layers: 0 cannot be used"),
        (("--model", "."), "--layers: 2 cannot be used"),
        (
            ("--ds-config", "no.json"),
            "--ds-config: cannot read no.json: No such file or directory. configs/finepage_cpu",
        ),
        (("--model", "nosuch"), "unknown model 'nosuch'. Known: deepseek-v3"),
        (("--resume",), "--resume goes on in a folder. Name it by --out"),
        (("--ranks", "0"), "--ranks: 0 is less than 1."),
        (("--ranks", "3"), "3 ranks do not divide the 32 attention heads of llama-7b"),
        (("--ranks", "2", "--weights", "int4"), "packed weights are not cut over ranks"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(
    compared: Compared, call: Cli, options: tuple[str, ...], message: str
) -> None:
    call.refuses(*options, says=message)
    assert compared.starts == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not for ZeRO-Inference"),
        ('{"zero_optimization": {"stage": 2}}', "is not for ZeRO-Inference"),
        ('{"zero_optimization": {"stage": 3}}', "is not for ZeRO-Inference"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, '
            '"finepage": {"plicy": "x"}}',
            "unknown key 'plicy'",
        ),
    ],
)
def test_a_ds_config_that_cannot_be_used_is_refused(
    call: Cli, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    call.refuses("--ds-config", path, says=message)


def test_the_ds_config_is_the_users_or_that_of_the_examples(compared: Compared, call: Cli) -> None:
    example = Path(__file__).parents[3] / "configs" / "finepage_cpu.json"
    call("--ds-config", example)
    call()
    given, default = (json.loads(s.settings.ds_config) for s in compared.starts if s.settings)
    assert given == json.loads(example.read_text())
    assert default == {k: v for k, v in given.items() if k != "finepage"}
    call("--ds-config", example, "--device-budget", "6GiB")
    budgets = [s.settings.device_budget for s in compared.starts if s.settings]
    assert budgets == ["40%weights", "50%weights", str(6 << 30)]


@pytest.mark.parametrize(
    ("found", "status", "message"),
    [
        (OURS, 0, ""),
        (run("zero", peak_bytes=5000, tokens_equal=True), 0, ""),
        (run("zero", tokens_equal=False), 1, "the tokens of zero differ"),
        (run("finepage", peak_bytes=1001), 1, "finepage had 1001 bytes on the device"),
    ],
)
def test_the_exit_status_judges_the_results(
    compared: Compared, call: Cli, found: Any, status: int, message: str
) -> None:
    compared.runs = (found,)
    assert message in call(status=status).err


def test_the_tables_the_winner_and_what_they_mean_are_printed(call: Cli) -> None:
    out = call("--batch", "1,8").out
    assert "Bytes, counted: batch 1" in out and "Time, modelled for t4: batch 1" in out
    assert "Batch 1, prefill: finepage is fastest" in out
    assert "do not compare engines by them" in out


def test_json_is_all_of_the_output(call: Cli) -> None:
    found = call.json()
    assert found["runs"][0]["arm"] == "finepage" and found["device"] == "cpu"
    assert set(found["versions"]) >= {"torch", "deepspeed", "transformers"}


@pytest.mark.parametrize(
    ("words", "arms"),
    [((), ("plain", "zero", "zero-persistence", "finepage")), (("--arms", "all"), tuple(ARMS))],
)
def test_stock_tuned_stock_and_ours_run_unless_more_is_asked(
    compared: Compared, call: Cli, words: tuple[str, ...], arms: tuple[str, ...]
) -> None:
    call(*words)
    assert compared.starts[0].settings.arms == arms


@pytest.mark.parametrize(
    "options", [("--arms", "zero,finepage"), ("--weights", "int8", "--weights-group", "32")]
)
def test_the_command_repeats_the_comparison(
    compared: Compared, cli: Cli, call: Cli, tmp_path: Path, options: tuple[str, ...]
) -> None:
    call(*options, "--out", tmp_path / "kept")
    words = shlex.split(compared.starts[0].command)
    assert words[:2] == ["ds-finepage", "compare"]
    cli.refuses(*words[1:], says="has results")
    cli(*words[1:], "--resume")
    assert compared.starts[1].settings == compared.starts[0].settings


# Packed weights.


def test_the_form_of_the_weights_is_part_of_the_ds_config(
    compared: Compared, call: Cli, tmp_path: Path
) -> None:
    """So every arm and every model of a pass finds it there."""
    given = {**DS_CONFIG, "finepage": {"weights": "int8", "weights_group": 32, "split": True}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    for options in (
        (),
        ("--weights", "int4"),
        ("--weights", "int4", "--weights-group", "128"),
        ("--weights", "bf16"),
    ):
        call("--ds-config", path, *options)
    call("--weights", "int4")
    sections = [json.loads(s.settings.ds_config)["finepage"] for s in compared.starts if s.settings]
    assert sections == [
        {"weights": "int8", "weights_group": 32, "split": True},
        {"weights": "int4", "weights_group": 64, "split": True},
        {"weights": "int4", "weights_group": 128, "split": True},
        {"split": True},
        {"weights": "int4", "weights_group": 64},
    ]
    path.write_text(json.dumps({**DS_CONFIG, "finepage": {"weights": "int8"}}))
    call("--ds-config", path, "--weights", "bf16")
    last = compared.starts[-1].settings
    assert last is not None and json.loads(last.ds_config) == DS_CONFIG
    commands = [start.command for start in compared.starts]
    assert commands[2].endswith("--weights int4 --weights-group 128")


def test_sixteen_bits_are_not_had_from_a_ds_config_of_another_dtype(
    call: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**DS_CONFIG, "bf16": {"enabled": False}}))
    message = "bf16 is not the dtype of the ds_config"
    call.refuses("--ds-config", path, "--weights", "bf16", says=message)


# Folders.


def test_without_a_folder_nothing_is_kept(compared: Compared, call: Cli) -> None:
    call()
    assert compared.folders[0].name.startswith("ds-finepage-")
    assert not compared.folders[0].exists()


def test_a_folder_with_other_things_is_not_used(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    call.refuses("--out", tmp_path, says="exists and is not an empty folder")
    call.refuses("--out", tmp_path / "letter.txt" / "below", says="cannot make")


def test_results_are_not_overwritten_but_resumed(
    compared: Compared, call: Cli, tmp_path: Path
) -> None:
    failed = run("static", reason="needs a package", peak_bytes=None)
    too_large = run("zero", reason="out of memory", peak_bytes=None, out_of_memory=True)
    compared.runs = (OURS, failed, too_large)
    call("--out", tmp_path)
    call.refuses("--out", tmp_path, says="has results. Go on with --resume")
    call("--out", tmp_path, "--resume")
    assert [r.arm for r in compared.starts[1].runs] == ["finepage", "zero"]


def test_a_resumed_comparison_has_the_same_settings(
    compared: Compared, call: Cli, tmp_path: Path
) -> None:
    call("--out", tmp_path)
    says = "new_tokens was 5 and is 9; hardware was 't4' and is 'v100-16gb'"
    call.refuses("--out", tmp_path, "--resume", "--new", "9", "--hardware", "v100-16gb", says=says)
    assert len(compared.starts) == 1


def test_the_report_of_a_single_run_is_no_comparison(call: Cli, tmp_path: Path) -> None:
    save_results(dataclasses.replace(results(), settings=None), tmp_path)
    call.refuses("--out", tmp_path, "--resume", says="is the report of a single run")


def test_an_interrupt_says_where_the_finished_runs_are(
    compared: Compared, call: Cli, tmp_path: Path
) -> None:
    compared.error = KeyboardInterrupt()
    interrupted = call("--out", tmp_path, status=130)
    assert f"finished runs are in {tmp_path}; --resume goes on" in interrupted.err
    assert "--resume" not in call(status=130).err


def test_results_of_another_version_are_refused(call: Cli, tmp_path: Path) -> None:
    call("--out", tmp_path)
    path = tmp_path / RESULTS_FILE
    path.write_text(path.read_text().replace('"format": 5', '"format": 99'))
    says = "of this version of ds_finepage: format: Input should be 5"
    call.refuses("--out", tmp_path, "--resume", says=says)
    assert '"format": 99' in path.read_text()
