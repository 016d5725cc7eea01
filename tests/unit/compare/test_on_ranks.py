"""A comparison on several ranks: who runs on how many, and that no figure of a rank is lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ds_finepage.compare import orchestrate
from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.engine import REQUESTS
from ds_finepage.compare.orchestrate import WHOLE_ON_ONE
from ds_finepage.compare.worker import RUN_FILE, RUNS, TOKENS_FILE
from ds_finepage.reporting.results import (
    PhaseFigures,
    load_results,
    over_ranks,
    run_folder,
    save_passes,
)
from ds_finepage.reporting.tables import tables
from tests.commands import Cli
from tests.unit.compare.runs import results, run
from tests.unit.compare.test_cli_compare import Compared, call, compared
from tests.unit.compare.test_orchestrate import TOKENS, Fake, installed
from tests.unit.reporting.folders import RESULTS, make_folder, observed

__all__ = ["call", "compared"]
RANKS = pytest.mark.parametrize("rank", (0, 1))


class FakeRanks(Fake):
    """Stands for the processes of all ranks; rank 1 copies 6 bytes, and rank 0 copies 5."""

    def run_process(self, arguments: Sequence[str], log: Path, *, num_ranks: int = 1) -> int:
        if num_ranks == 1:
            return super().run_process(arguments, log)
        _, _, path, *folders = map(Path, arguments)
        assert len(folders) == num_ranks and log.parent == folders[0]
        for rank, folder in enumerate(folders):
            request = REQUESTS.validate_json(path.read_bytes())
            self.requests.append(request)
            self.act(request.arm)
            phase = PhaseFigures(h2d_bytes=5 + rank, wall_ns=9)
            more: dict[str, Any] = {"prefill": phase, "decode": phase, "peak_bytes": 40 - rank}
            found = run(request.arm, host_bytes=7 + rank, notes=(f"on {rank}", "both"), **more)
            found = dataclasses.replace(found, reason=self.reasons.get(f"{request.arm} {rank}"))
            tokens = self.tokens.get(f"{request.arm} {rank}", TOKENS)
            (folder / RUN_FILE).write_bytes(RUNS.dump_json(found))
            (folder / TOKENS_FILE).write_text(json.dumps(tokens))
        return 0

    reasons: ClassVar[dict[str, str]] = {}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRanks:
    made = FakeRanks(tmp_path)
    installed(made, monkeypatch)
    return made


def test_every_arm_but_plain_runs_on_all_ranks(ranks: FakeRanks) -> None:
    found = ranks.comparison(num_ranks=2).run()
    assert [name for name, _ in ranks.arms] == ["plain", "zero", "zero", "finepage", "finepage"]
    assert ranks.requests[1] == ranks.requests[2]
    plain, zero, ours = found.runs
    assert [len(each.ranks) for each in found.runs] == [0, 2, 2]
    assert plain.notes == (WHOLE_ON_ONE,)
    assert plain.decode.modelled_ns is None and ours.decode.modelled_ns == 16
    assert [each.decode.h2d_bytes for each in ours.ranks] == [5, 6]
    assert [each.peak_bytes for each in ours.ranks] == [40, 39]
    assert (ours.peak_bytes, ours.host_bytes, ours.tokens_equal) == (40, 8, True)
    assert ours.notes == ("on 0", "both", "on 1")
    assert load_results(ranks.folder) == found


@RANKS
def test_tokens_of_every_rank_count(ranks: FakeRanks, rank: int) -> None:
    ranks.tokens = {f"finepage {rank}": [[[5]], [[5]]]}
    _, zero, ours = ranks.comparison(num_ranks=2).run().runs
    assert zero.tokens_equal and not ours.tokens_equal
    assert [each.tokens_equal for each in ours.ranks] == [rank != 0, rank != 1]


def test_an_arm_of_one_rank_says_why(ranks: FakeRanks) -> None:
    arms = tuple(name for name, arm in ARMS.items() if arm.why_one_rank)
    assert arms == ("accelerate-map", "finepage-draft")
    found = ranks.comparison(arms=(*arms, "zero"), num_ranks=2).run()
    for each in found.runs[:-1]:
        assert each.reason == ARMS[each.arm].why_one_rank
    assert "moves whole layers of one process, and has no ranks" in found.runs[0].reason
    assert "transformers assists a generation on one rank" in found.runs[1].reason
    assert found.runs[-1].reason is None
    assert [arm for arm, _ in ranks.arms] == ["zero", "zero"]


def test_ranks_that_fail_are_a_row_and_the_next_arm_runs(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRanks, "reasons", {"zero 1": "gone"})
    _, zero, ours = ranks.comparison(num_ranks=2).run().runs
    assert zero.reason == "rank 1: gone"
    assert ours.reason is None


def test_a_rank_that_writes_nothing_is_a_row(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_process(arguments: Sequence[str], log: Path, **options: Any) -> int:
        ranks.run_process(arguments, log, **options)
        (Path(arguments[-1]) / RUN_FILE).unlink()
        log.write_text("Killed by something\n")
        return -9

    monkeypatch.setattr(orchestrate, "run_process", run_process)
    (zero,) = ranks.comparison(arms=("zero",), num_ranks=2).run().runs
    assert zero.reason == "the process ended with status -9: Killed by something"


def test_the_table_has_a_line_for_each_rank(ranks: FakeRanks) -> None:
    found = ranks.comparison(num_ranks=2).run()
    (table,) = (t for t in tables(found, 1) if t.title.startswith("Ranks, counted"))
    rows = {run.arm: tuple(show(run) for _, show in table.columns[1:]) for run in table.runs}
    assert list(rows) == ["zero, rank 0", "zero, rank 1", "finepage, rank 0", "finepage, rank 1"]
    assert rows["finepage, rank 1"] == ("yes", "39 B", "6 B", "-", "6 B", "-", "8 B")
    one = ranks.comparison(results(arms=("zero",))).run()
    assert not [t for t in tables(one, 1) if t.title.startswith("Ranks")]


def test_a_trace_has_a_process_for_each_rank(tmp_path: Path, cli: Cli) -> None:
    *others, ours = RESULTS.runs
    two = dataclasses.replace(RESULTS, runs=(*others, over_ranks([ours, ours])))
    folder = make_folder(tmp_path / "results", two)
    of_rank = run_folder(folder, "finepage_b1_rank1")
    of_rank.mkdir()
    save_passes([observed()], of_rank)
    cli("trace", folder)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        f"finepage_b1{rank} decode, {how}"
        for rank in ("", "_rank1")
        for how in ("predicted", "measured")
    ]


# Options.


def test_ranks_are_in_the_ds_config_and_compute_in_float32(compared: Compared, call: Cli) -> None:
    call("--ranks", "2")
    (start,) = compared.starts
    assert start.settings is not None and start.settings.num_ranks == 2
    ds_config = json.loads(start.settings.ds_config)
    assert ds_config["tensor_parallel"] == {"autotp_size": 2}
    assert ds_config["bf16"] == {"enabled": False}
    assert start.command.endswith("--ranks 2")


def test_the_users_ds_config_keeps_its_dtype(compared: Compared, call: Cli, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    given = {"bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 2, "more": 1}}
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    path.write_text(json.dumps({**given, "zero_optimization": zero}))
    call("--ranks", "2", "--ds-config", path)
    settings = compared.starts[0].settings
    assert settings is not None
    found = json.loads(settings.ds_config)
    assert {key: found[key] for key in given} == given
    call("--ranks", "4", "--ds-config", path, status=2)
