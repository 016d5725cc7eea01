"""The setups of several ranks: each says what it has, and those that want to compare."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from ds_finepage.errors import ConfigError, RankError
from ds_finepage.execution.collectives import RankParts
from ds_finepage.integrations.deepspeed import ranks
from ds_finepage.runtime.parted_ranks import PartedRanks
from ds_finepage.runtime.ranks import ONE_RANK

CONFIG: dict[str, Any] = {
    "finepage": {"enabled": True, "device_budget": "1GiB"},
    "tensor_parallel": {"autotp_size": 2},
}


class Two:
    """A store that two ranks have; rank 0 runs here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = HashStore()
        self.store.set_timeout(timedelta(milliseconds=20))
        monkeypatch.setattr("deepspeed.comm.is_initialized", lambda: True)
        monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 2)
        monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
        monkeypatch.setattr("ds_finepage._compat.torch._get_default_store", lambda: self.store)
        monkeypatch.setattr(ranks, "_engines", iter([0, 1]))

    def rank_1_has(self, value: Any, number: str = "0/1", kind: str = ranks.VALUE) -> None:
        self.store.set(f"{ranks.STORE_KEY}/{number}/1", json.dumps({kind: value}))

    def rank_0_has(self, number: str = "0/1", kind: str = ranks.VALUE) -> Any:
        (found,) = json.loads(self.store.get(f"{ranks.STORE_KEY}/{number}/0")).items()
        assert found[0] == kind
        return found[1]


@pytest.fixture(name="two")
def _two(monkeypatch: pytest.MonkeyPatch) -> Two:
    return Two(monkeypatch)


def compare(config: dict[str, Any] = CONFIG) -> None:
    ranks.compare_setups(config, lambda: True)


def test_the_same_setup_goes_on(two: Two) -> None:
    two.rank_1_has(ranks.facts_of(CONFIG))
    compare()
    two.rank_1_has(ranks.facts_of(CONFIG), number="1/1")
    compare()  # of the next engine
    assert two.rank_0_has() == two.rank_0_has("1/1") == ranks.facts_of(CONFIG)


def test_what_differs_is_named_with_the_ranks(two: Two) -> None:
    theirs = {"finepage": {"enabled": False}, "tensor_parallel": {"autotp_size": 2}}
    versions = {"version of torch": "1.0", "version of ds_finepage": "9.9"}
    two.rank_1_has({**ranks.facts_of(theirs), **versions})
    with pytest.raises(RankError) as caught:
        compare()
    text = str(caught.value)
    assert "differ in finepage.enabled: rank 0 has True, rank 1 has False." in text
    assert "differ in finepage.device_budget: rank 0 has '1GiB', rank 1 has None." in text
    for name, value in versions.items():
        here = two.rank_0_has()[name]
        assert f"differ in {name}: rank 0 has '{here}', rank 1 has '{value}'" in text
    assert "autotp_size" not in text


def test_a_setup_that_another_rank_refuses_is_refused_here(two: Two) -> None:
    two.rank_1_has("unknown key", kind=ranks.FAILED)
    with pytest.raises(RankError, match="rank 1 refuses its setup: unknown key"):
        compare()


def test_a_rank_that_does_not_come_is_named(two: Two) -> None:
    with pytest.raises(RankError, match="rank 1 has not come: .* must import ds_finepage"):
        compare()


def test_the_others_learn_of_a_refusal_here(two: Two) -> None:
    def refuse() -> bool:
        raise ConfigError("unknown key")

    with pytest.raises(ConfigError):
        ranks.compare_setups(CONFIG, refuse)
    assert two.rank_0_has(kind=ranks.FAILED) == "unknown key"


def test_a_stock_engine_waits_for_no_other_and_says_what_it_has(two: Two) -> None:
    ranks.compare_setups({}, lambda: False)
    assert two.rank_0_has()["tensor_parallel.autotp_size"] == 1


@pytest.mark.parametrize("name", ["is_initialized", "get_world_size"])
def test_one_rank_needs_no_store(two: Two, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"deepspeed.comm.{name}", lambda: name == "get_world_size")
    compare()
    assert two.store.num_keys() == 0


@pytest.mark.parametrize("is_initialized", [True, False])
def test_one_rank_is_alone(monkeypatch: pytest.MonkeyPatch, is_initialized: bool) -> None:
    monkeypatch.setattr("deepspeed.comm.is_initialized", lambda: is_initialized)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 1 if is_initialized else 2)
    assert ranks.ranks_of_model(nn.Linear(2, 2)) is ONE_RANK


def partitioned(group: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.ds_tensor, parameter.ds_process_group = torch.zeros(2), group  # type: ignore[attr-defined]
    return model


def test_ranks_that_hold_the_weights_together_are_those_of_their_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ds_finepage.execution import rank_channel

    group = SimpleNamespace(group_name="three", size=4)
    monkeypatch.setattr("deepspeed.comm.is_initialized", lambda: True)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda group=None: 4)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda group=None: 2 if group else 0)
    monkeypatch.setattr(rank_channel, "RankChannel", lambda group: ["channel of", group])
    model = partitioned(group)
    found: Any = ranks.ranks_of_model(model)
    assert isinstance(found, PartedRanks) and found._channel == ["channel of", "three"]
    assert ranks.parts_of(model.weight) == RankParts(2, 4, "three")
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda group=None: 1 if group else 4)
    assert ranks.parts_of(model.weight) is None


def test_several_ranks_are_those_of_the_tensor_parallel_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.utils import groups

    from ds_finepage.execution import rank_channel

    monkeypatch.setattr("deepspeed.comm.is_initialized", lambda: True)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda group=None: 1 if group else 2)
    monkeypatch.setattr(rank_channel, "RankChannel", lambda group: ["channel of", group])
    group = SimpleNamespace(group_name="seven")
    # DeepSpeed 0.16 has no such group, and cuts no models.
    monkeypatch.setattr(groups, "get_tensor_model_parallel_group", lambda: group, raising=False)
    found: Any = ranks.ranks_of_model(partitioned(group))
    assert found._channel == ["channel of", "seven"] and not found.collects_weights


def test_ranks_gather_values_round_by_round(two: Two) -> None:
    meetings = ranks.Meetings()
    two.rank_1_has("b")
    assert meetings.gather("a") == ["a", "b"]
    two.rank_1_has(None, number="0/2")
    assert meetings.gather([1, 2]) == [[1, 2], None]
    two.rank_1_has("no such file", number="0/3", kind=ranks.FAILED)
    with pytest.raises(RankError, match="rank 1 refuses its setup: no such file"):
        meetings.gather(0)


def test_an_error_of_this_rank_reaches_the_others(two: Two) -> None:
    meetings = ranks.Meetings()
    two.rank_1_has(0)
    meetings.gather(0)
    meetings.fail(OSError("no such file"))
    assert two.rank_0_has("0/2", ranks.FAILED) == "no such file"
