"""Recorded runs on an accelerator: the same results, fewer launches, and nothing left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.config import DebugConfig
from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.replay import Graphs
from tests.accelerator.subjects import Subject, subject
from tests.integration.families import logits
from tests.unit.execution.graphs import ACTIVATION, INPUT, Draft


@pytest.fixture(scope="module")
def llama(device: torch.device) -> Iterator[Subject]:
    found = subject(device, "llama", graphs=True, num_hidden_layers=1)
    yield found
    found.detach()


def graphs_of(found: Subject) -> Graphs:
    graphs = found.handle._memory._graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, Graphs)
    return graphs


def test_passes_that_are_replayed_give_equal_results_within_the_budget(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, and tokens whose KV cache grows: twice each, so that the second one replays."""
    found = subject(device, "mixtral", graphs=True, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        for budget_bytes in found.budgets:
            found.check_at(budget_bytes)
            found.check()
            assert graphs_of(found)._replays
    assert not [m for m in caplog.messages if "cannot be recorded" in m]
    found.detach()


def test_a_replayed_pass_has_fewer_launches(llama: Subject, card: Any) -> None:
    llama.at(llama.budgets[1])
    launches = []
    for _ in range(3):
        card.reset_counters()
        logits(llama.model, llama.ids)
        counts = card.counters()
        launches.append((counts["kernel"] + counts["d2d"] + counts["replay"], counts["replay"]))
    (direct, none), _, (fewer, replays) = launches
    assert none == 0 < replays
    assert fewer < direct


def test_a_replayed_pass_never_waits(llama: Subject, card: Any) -> None:
    llama.at(llama.budgets[0])
    for _ in range(2):
        logits(llama.model, llama.ids)
    card.reset_counters()
    with card.syncs_recorded() as waits:
        logits(llama.model, llama.ids)
    assert card.counters()["replay"]
    assert all("gather_rows" in stack for _, stack in waits)


@pytest.mark.parametrize("share", (0, 1))
def test_replayed_passes_race_with_nothing(llama: Subject, card: Any, share: int) -> None:
    with card.races_found() as races:
        llama.at(llama.budgets[share])
        for _ in range(2):
            llama.check()
        assert card.counters()["replay"]
    assert races == []


def test_delayed_lanes_change_nothing(llama: Subject, card: Any) -> None:
    llama.at(llama.budgets[0])
    llama.check()
    for seed in range(3):
        for kind in ("h2d", "replay"):
            card.set_delay(kind, random_ns=2_000_000, seed=seed)
        llama.check()


@pytest.mark.parametrize("later", (False, True))
def test_a_replay_that_fails_is_an_error_and_the_next_call_is_right(
    llama: Subject, card: Any, later: bool
) -> None:
    llama.at(llama.budgets[0])
    for nth in (1, 3):
        llama.check()
        for _ in range(2):  # steady passes alone are replayed
            logits(llama.model, llama.ids)
        card.fail_nth("replay", nth, later=later)
        with pytest.raises(RuntimeError, match="injected failure"):
            logits(llama.model, llama.ids).cpu()
        card.fail_nth("replay", 0)
        llama.check()


def test_debug_checks_come_between_the_tasks(llama: Subject, card: Any) -> None:
    llama.at(llama.budgets[0], seed=1)
    card.reset_counters()
    for _ in range(2):
        llama.check()
    assert card.counters()["replay"] == 0
    llama.at(llama.budgets[0])
    llama.handle.replan(debug=DebugConfig())


def test_new_weights_are_seen_by_replayed_passes(llama: Subject) -> None:
    llama.at(llama.budgets[2])
    for _ in range(2):
        llama.check()
    before = llama.model.lm_head.weight.detach().clone()
    state = {"lm_head.weight": before * 2}
    llama.model.load_state_dict(state, strict=False)
    assert torch.equal(logits(llama.model, llama.ids).cpu(), llama.logits * 2)
    llama.model.load_state_dict({"lm_head.weight": before}, strict=False)
    llama.check()


def test_graphs_go_with_the_arena(device: torch.device) -> None:
    found = subject(device, "llama", graphs=True, num_hidden_layers=1)

    def fill(budget_bytes: int) -> None:
        found.handle.replan(budget_bytes=budget_bytes)
        for _ in range(2):
            logits(found.model, found.ids)

    fill(found.budgets[0])
    graphs = graphs_of(found)
    assert graphs._replays
    found.handle.replan(budget_bytes=found.budgets[1])
    assert not graphs._replays
    fill(found.budgets[1])
    assert graphs_of(found) is graphs and graphs._replays
    found.detach()
    assert not graphs._replays


@pytest.mark.parametrize("num_streams", (1, 2))
def test_memory_that_libraries_keep_is_counted_for_each_stream(
    llama: Subject, device: torch.device, num_streams: int
) -> None:
    kept: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(4096, dtype=torch.uint8, device=x.device))
        return x + 1

    draft = Draft()
    x, y = draft.tensor(INPUT, 8), draft.tensor(ACTIVATION, 8)
    draft.task("finepage_keeping.keeps.default", x, out=(y,))
    with torch.library._scoped_library("finepage_keeping", "DEF") as made:
        made.define("keeps(Tensor x) -> Tensor")
        made.impl("keeps", keeps, "CompositeExplicitAutograd")
        meter = OpMeter(device, num_streams=num_streams)
        meter.with_costs(draft.graph((x,), (y,)))
    assert meter.library_bytes == 4096 * num_streams
    assert llama.handle._runner.table.maker.meter._num_streams == 2


def test_work_that_fails_ends_its_recording(device: torch.device) -> None:
    found = device_of(device)
    assert isinstance(found, Accelerator)
    stream, values = found.new_stream(), torch.ones(4, device=device)

    def stop() -> None:
        values.mul_(3)
        raise ValueError("stop")

    found.synchronize()
    with pytest.raises(ValueError, match="stop"):
        found.record(stop, stream)
    replay = found.record(lambda: values.mul_(2), stream)
    assert values.cpu().tolist() == [1] * 4
    replay()
    assert values.cpu().tolist() == [2] * 4


def test_the_cpu_has_no_graphs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert not device_of("cpu").has_graphs
    model = torch.nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING):
        ds_finepage.attach(model, device_budget="1MiB", device="cpu", device_graphs=True)
    assert "finepage.device_graphs has no effect: cpu has no graphs" in caplog.messages
