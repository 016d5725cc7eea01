"""A small module under a handle: what users see of plans, states and refusals."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ds_finepage
from ds_finepage.api import attach
from ds_finepage.config import DebugConfig, DeviceBudget, FinepageConfig
from ds_finepage.errors import ConfigError, FinepageError, PlanInfeasibleError
from ds_finepage.execution.device import Device
from ds_finepage.runtime import calls
from ds_finepage.runtime.device_memory import DeviceState
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.ranks import Ranks
from tests.unit.execution.parameters import scripted

WIDTH = 64


class Layers(nn.Module):
    """Three products, each with its own weight; calls back in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).relu()
        return x


@dataclasses.dataclass
class Rig:
    """An attached module, its input and its plain result."""

    model: nn.Module
    x: torch.Tensor
    plain: torch.Tensor
    handle: Handle

    def same(self) -> bool:
        with torch.no_grad():
            return torch.equal(self.model(self.x), self.plain)

    @property
    def state(self) -> DeviceState:
        return self.handle._memory.state


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig with the settings that a test gives as the parameter."""
    settings = getattr(request, "param", {})
    torch._dynamo.reset()
    model, x = Layers().eval(), torch.randn(4, WIDTH)
    with torch.no_grad():
        plain = model(x)
    made = Rig(model, x, plain, attach(model, device_budget="1GiB", device="cpu", **settings))
    yield made
    made.handle.detach()


def paged(rig: Rig) -> None:
    """Run once, and then under the least budget."""
    assert rig.same()
    rig.handle.replan(budget_bytes=rig.handle.stats.min_budget_bytes)
    assert rig.same()


def test_a_model_that_fits_is_resident(rig: Rig) -> None:
    assert rig.same() and rig.same()
    assert rig.state is DeviceState.RESIDENT
    stats = rig.handle.stats
    assert stats.num_resident_runs == 2
    assert stats.reloaded_bytes == stats.weight_bytes
    assert [p.num_runs for p in stats.passes] == [2]


def test_a_model_that_does_not_fit_is_paged(rig: Rig) -> None:
    paged(rig)
    assert rig.same()
    assert rig.state is DeviceState.PAGED
    (only,) = rig.handle.stats.passes
    assert only.last_reloaded_bytes >= only.lower_bound_bytes > 0
    ((memgraph, timeline),) = rig.handle.plans()
    assert memgraph.arena_bytes == only.arena_bytes
    assert timeline.total_ns > 0


def test_a_snapshot_of_the_counters_stays_as_it_is(rig: Rig) -> None:
    before = rig.handle.stats
    assert rig.same()
    assert before.passes == () and before.num_captures == 0
    assert rig.handle.stats.num_captures == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.budget_bytes = 1  # type: ignore[misc]


def test_the_error_names_a_budget_that_is_enough(rig: Rig) -> None:
    paged(rig)
    least = rig.handle.stats.min_budget_bytes
    rig.handle.replan(budget_bytes=least // 2)
    with torch.no_grad(), pytest.raises(PlanInfeasibleError) as error:
        rig.model(rig.x)
    assert error.value.min_budget_bytes is not None
    rig.handle.replan(budget_bytes=error.value.min_budget_bytes)
    assert rig.same()


def test_a_hook_may_make_arrays_of_the_tensors(rig: Rig) -> None:
    """The memory behind an array cannot be given back under it."""
    paged(rig)
    arrays: list[Any] = []
    rig.handle.register_op_hook(after=lambda _, results: arrays.extend(r.numpy() for r in results))
    assert rig.same() and arrays
    rig.handle.detach()
    assert rig.same()


def test_a_hook_sees_every_op_and_can_be_removed(rig: Rig) -> None:
    assert rig.same()
    seen: list[Any] = []
    remove = rig.handle.register_op_hook(before=lambda *_: seen.append(gc.isenabled()))
    assert rig.same() and rig.state is DeviceState.PAGED
    assert len(seen) == rig.handle.stats.passes[0].num_tasks > 0
    assert not any(seen) and gc.isenabled()  # a collection would walk all that a plan is made of
    remove()
    assert rig.same() and rig.state is DeviceState.RESIDENT
    assert len(seen) == rig.handle.stats.passes[0].num_tasks


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "horizon"},
        {"debug": DebugConfig(poison_vacated=True)},
        {"debug": DebugConfig(lane_delay_seed=1)},
    ],
    ids=str,
)
def test_a_model_that_fits_is_paged_as_long_as_somebody_looks_at_the_plan(
    rig: Rig, settings: dict[str, Any]
) -> None:
    assert rig.same() and rig.state is DeviceState.RESIDENT
    rig.handle.replan(**settings)
    assert rig.same() and rig.state is DeviceState.PAGED
    rig.handle.replan(policy="finepage", debug=DebugConfig())
    assert rig.same() and rig.state is DeviceState.RESIDENT


def test_a_step_of_continuous_batching_waits_for_its_arguments(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(Device, "follow_default_stream", lambda device: waited.append(device))
    for is_paged in (False, True):
        monkeypatch.setattr(calls, "has_paged_cache", lambda *_, paged=is_paged: paged)
        assert rig.same() and len(waited) == is_paged


def test_a_hook_that_replans_is_refused(rig: Rig) -> None:
    assert rig.same()
    refused = []

    def replan(task: Any, operands: Any) -> None:
        for change in (rig.handle.replan, rig.handle.refresh, rig.handle.detach):
            with pytest.raises(FinepageError, match="called while the model runs"):
                change()
            refused.append(change)

    remove = rig.handle.register_op_hook(before=replan)
    assert rig.same() and len(refused) >= 3
    remove()


def test_new_settings_keep_the_others(rig: Rig) -> None:
    settings = rig.handle._runner.settings
    rig.handle.replan(policy="horizon", debug=DebugConfig(poison_vacated=True))
    now = rig.handle._runner.settings
    changes = {"policy": "horizon", "debug": DebugConfig(poison_vacated=True)}
    config = settings.config.model_copy(update=changes)
    assert now == dataclasses.replace(settings, config=config)
    assert rig.same() and rig.same()
    assert rig.state is DeviceState.PAGED


def test_settings_that_cannot_be_used_are_refused_and_change_nothing(rig: Rig) -> None:
    before = rig.handle._runner.settings
    with pytest.raises(ConfigError, match="policy: unknown policy 'finepag'. Did you mean 'fine"):
        rig.handle.replan(policy="finepag")
    with pytest.raises(ConfigError, match="budget_bytes: 0 is less than 1. Write 1 or more."):
        rig.handle.replan(budget_bytes=0)
    assert rig.handle._runner.settings == before and rig.same()


@pytest.mark.parametrize(
    ("module", "config", "settings", "message"),
    [
        ("llama", None, {}, "attach: str is no torch.nn.Module. Give it the model itself."),
        (
            nn.Sequential(nn.ReLU(), scripted(nn.Linear(4, 4))),
            None,
            {},
            "attach: module 1 is TorchScript, and its weights cannot be paged. Give the model",
        ),
        (nn.Identity(), "6GiB", {}, "finepage: '6GiB' is not an object. Write for example"),
        (nn.Identity(), {"finepage": {"enabled": True}}, {}, "finepage: this is a whole ds_config"),
        (nn.Identity(), FinepageConfig(), {"policy": "x"}, "finepage.policy: unknown policy 'x'"),
    ],
)
def test_what_cannot_be_attached_is_refused(
    module: Any, config: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        attach(module, config, device="cpu", **settings)
    assert str(error.value).startswith(message)


def test_settings_beside_a_section_count() -> None:
    section = FinepageConfig(device_budget=DeviceBudget.parse("1GiB"))
    handle = attach(Layers(), section, device="cpu", policy="lru")
    handle.detach()
    found = handle._runner.settings.config
    assert (found.policy, found.device_budget) == ("lru", section.device_budget)


def test_a_write_without_a_sign_counts_after_refresh(rig: Rig) -> None:
    assert rig.same()
    assert rig.state is DeviceState.RESIDENT
    part: Any = rig.model.parts
    part[2].weight.detach().numpy()[:] = 0
    part[2].bias.detach().numpy()[:] = 0
    assert rig.same()
    rig.handle.refresh()
    assert not rig.same()


def test_detaching_gives_the_module_back_and_frees_the_device(rig: Rig) -> None:
    paged(rig)
    arena = rig.handle._memory._arena
    assert arena is not None and rig.handle.attached
    rig.handle.detach()
    rig.handle.detach()
    assert not rig.handle.attached and rig.same()
    assert arena.bytes.untyped_storage().nbytes() == 0
    assert rig.handle.stats.passes[0].num_runs == 2


def test_an_attached_module_keeps_its_handle_and_shows_it() -> None:
    torch._dynamo.reset()
    model = Layers().eval()
    attach(model, device_budget="1GiB", device="cpu")
    gc.collect()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    ds_finepage.assert_active(model)
    assert ds_finepage.stats(model).num_captures == 1
    with pytest.raises(ConfigError):
        ds_finepage.assert_active(copy.deepcopy(model))
    ds_finepage.handle_of(model).detach()
    with pytest.raises(ConfigError) as error:
        ds_finepage.stats(model)
    assert str(error.value).startswith("this Layers runs without ds_finepage")
    roads = "ds_finepage.attach(module, device_budget=...)", '"finepage": {"enabled": true}'
    assert all(road in str(error.value) for road in roads)


def test_nothing_keeps_a_detached_module_alive() -> None:
    torch._dynamo.reset()
    model = Layers().eval()
    handle = attach(model, device_budget="1GiB", device="cpu")
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    gone = weakref.ref(model)
    handle.detach()
    del model, handle
    gc.collect()
    assert gone() is None


class Twice(Ranks):
    """Another rank that has done the same, on twice the bytes."""

    def of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers), [2 * number for number in numbers]]


@pytest.mark.parametrize("rig", [{"ranks": Twice()}], indirect=True)
def test_every_rank_has_a_row_with_its_own_figures(rig: Rig) -> None:
    assert rig.same()
    table = rig.handle.rank_table()
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["rank"] == ["0", "1"]
    assert cells["weights"] == ["48.75 KiB", "97.50 KiB"]
    assert cells["budget"] == ["1.00 GiB", "2.00 GiB"]
    assert cells["runs"] == ["1", "2"]
    assert cells["without a plan"] == ["0", "0"]


def test_a_context_holds_around_each_call() -> None:
    torch._dynamo.reset()
    entered: list[str] = []

    class Around:
        def __enter__(self) -> None:
            entered.append("begin")

        def __exit__(self, *_: Any) -> None:
            entered.append("end")

    model = Layers().eval()
    handle = attach(model, device_budget="1GiB", device="cpu", around_call=Around)
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    handle.detach()
    assert entered == ["begin", "end"]
