"""The seam into DeepSpeed's engine: in once, out again, and there for engines that ask for it."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed import seam, shard_loading
from ds_finepage.integrations.deepspeed.offload import FinepageOffload
from ds_finepage.integrations.deepspeed.shard_loading import Pending
from tests.unit.execution.packed import packed_linear

SUPPORTED: dict[str, Any] = {"finepage": {"enabled": True, "device_budget": "1GiB"}}


class Stock:
    """What the engine builds without us."""


def engine_module() -> Any:
    """Make a module like DeepSpeed's, whose engine says what it would build."""
    module: Any = ModuleType("engine")

    class DeepSpeedEngine:
        def __init__(self, settings: dict[str, Any], stage: int = 3) -> None:
            self.client_optimizer = None
            self.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
            self._config = SimpleNamespace(
                _param_dict=settings,
                zero_optimization_stage=stage,
                zero_config=SimpleNamespace(
                    offload_param=SimpleNamespace(device="cpu"), zero_quantized_weights=False
                ),
            )

        def _do_sanity_check(self) -> str:
            return "checked"

        def _configure_tensor_parallel(self, model: Any, tp_config: Any) -> str:
            if tp_config is not None:
                raise AssertionError(tp_config)
            return "cut"

        def _configure_distributed_model(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

        def _configure_zero_optimizer(self, optimizer: Any, *, fails: bool = False) -> Any:
            if fails:
                raise RuntimeError("theirs")
            return optimizer, module.DeepSpeedZeRoOffload

    module.DeepSpeedEngine = DeepSpeedEngine
    module.DeepSpeedZeRoOffload = Stock
    return module


@pytest.fixture
def engines() -> Any:
    module = engine_module()
    seam.install(module)
    return module


def built(engines: Any, settings: dict[str, Any]) -> type:
    optimizer, found = engines.DeepSpeedEngine(settings)._configure_zero_optimizer("theirs")
    assert optimizer == "theirs"
    return found


def test_an_engine_that_asks_for_it_builds_ours_with_its_settings(engines: Any) -> None:
    found = built(engines, SUPPORTED)
    assert issubclass(found, FinepageOffload)
    assert str(found.finepage_config.device_budget) == str(1 << 30)
    assert engines.DeepSpeedZeRoOffload is Stock


@pytest.mark.parametrize("settings", ({}, {"finepage": {"enabled": False}}), ids=str)
def test_every_other_engine_stays_stock(engines: Any, settings: dict[str, Any]) -> None:
    assert built(engines, settings) is Stock


def test_an_error_while_it_is_built_leaves_the_name_as_it_was(engines: Any) -> None:
    with pytest.raises(RuntimeError, match="theirs"):
        engines.DeepSpeedEngine(SUPPORTED)._configure_zero_optimizer(None, fails=True)
    assert engines.DeepSpeedZeRoOffload is Stock
    assert built(engines, {}) is Stock


def test_a_planned_engine_gets_a_model_without_tensor_subclasses(engines: Any) -> None:
    apart = engines.DeepSpeedEngine(SUPPORTED)._configure_distributed_model(packed_linear(2, 2))
    assert apart == ["bias", "weight_numbers", "weight_scale_values"]
    stock = engines.DeepSpeedEngine({})._configure_distributed_model(model=packed_linear(2, 2))
    assert stock == ["weight", "bias"]


def test_a_model_is_packed_before_deepspeed_has_it_and_may_be_cast(engines: Any) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 2))
    model.is_quantized = True  # as transformers says
    seen = []

    def take(engine: Any, model: Any) -> list[str]:
        seen.append(model.is_quantized)
        return [name for name, _ in model.named_parameters()]

    engines = engine_module()
    engines.DeepSpeedEngine._configure_distributed_model = take
    seam.install(engines)
    settings = {"finepage": {**SUPPORTED["finepage"], "weights": "int4"}}
    found = engines.DeepSpeedEngine(settings)._configure_distributed_model(model)
    assert found == ["0.numbers", "0.scales", "0.minima", "0.bias"]
    assert seen == [False] and model.is_quantized is True
    assert engines.DeepSpeedEngine(SUPPORTED)._configure_distributed_model(model) == found
    assert seen == [False, False]


def test_nvme_means_the_files_of_the_checkpoint(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO itself would copy the weights to other files; a stock engine does so."""
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 1)
    given = {**SUPPORTED, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    for settings, expected in ((given, "cpu"), ({**given, "finepage": {}}, "nvme")):
        engine = engines.DeepSpeedEngine(settings)
        engine._config.zero_config.offload_param.device = "nvme"
        assert engine._do_sanity_check() == "checked"
        assert engine._config.zero_config.offload_param.device == expected
        found = engine._config._param_dict["zero_optimization"]
        assert found == {"stage": 3, "offload_param": {"device": expected}}
    assert given["zero_optimization"]["offload_param"] == {"device": "nvme"}


ZERO = "_config.zero_config"
REFUSED: dict[str, tuple[Any, str]] = {
    "client_optimizer": (object(), "an optimizer was given"),
    "_config._param_dict": ({**SUPPORTED, "optimizer": {}}, "an optimizer was given"),
    "_config.zero_optimization_stage": (2, "stage is 2"),
    f"{ZERO}.offload_param": (None, "is 'none'"),
    f"{ZERO}.offload_param.device": ("disk", "is 'disk'. Set it to 'cpu' or 'nvme'"),
    f"{ZERO}.zero_quantized_weights": (True, "cannot read quantized"),
}


@pytest.mark.parametrize("place", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_built(
    engines: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 1)
    engine, stock = engines.DeepSpeedEngine(SUPPORTED), engines.DeepSpeedEngine({})
    assert engine._do_sanity_check() == "checked"
    value, message = REFUSED[place]
    *outer, name = place.split(".")
    for changed in (engine, stock):
        setattr(functools.reduce(getattr, outer, changed), name, value)
    with pytest.raises(ConfigError, match=message):
        engine._do_sanity_check()
    stock._config._param_dict = {}
    assert stock._do_sanity_check() == "checked"


def test_tensor_parallelism_over_a_part_of_the_ranks_is_refused(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 2)
    settings = {**SUPPORTED, "tensor_parallel": {"autotp_size": 3}}
    with pytest.raises(ConfigError, match="there are 2, and .*autotp_size is 3. Set it to 2 or"):
        engines.DeepSpeedEngine(settings)._do_sanity_check()
    stock = engines.DeepSpeedEngine({"tensor_parallel": {"autotp_size": 3}})
    assert stock._do_sanity_check() == "checked"


@pytest.mark.parametrize("name", ["zero_hpz_partition_size", "mics_shard_size"])
def test_partitions_over_a_part_of_the_ranks_are_refused(
    engines: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = {**SUPPORTED, "zero_optimization": {name: 2}}
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 1)
    assert engines.DeepSpeedEngine(settings)._do_sanity_check() == "checked"
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 2)
    assert engines.DeepSpeedEngine(SUPPORTED)._do_sanity_check() == "checked"
    with pytest.raises(ConfigError, match=f"unset zero_optimization.{name}"):
        engines.DeepSpeedEngine(settings)._do_sanity_check()


@pytest.mark.parametrize(("settings", "waits"), [(SUPPORTED, True), ({}, False)])
def test_an_engine_with_finepage_compares_its_setup_with_other_ranks(
    engines: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], waits: bool
) -> None:
    found = []
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 1)
    monkeypatch.setattr(
        seam, "compare_setups", lambda ds_config, check: found.append((ds_config, check()))
    )
    engines.DeepSpeedEngine(settings)._do_sanity_check()
    assert found == [(settings, waits)]


def test_a_model_that_cannot_be_cut_is_refused_by_name(engines: Any) -> None:
    model = torch.nn.Linear(2, 2)
    assert engines.DeepSpeedEngine(SUPPORTED)._configure_tensor_parallel(model, None) == "cut"
    message = "AutoTP cannot cut Linear over the ranks: theirs Say in .* leave tensor_parallel out"
    with pytest.raises(ConfigError, match=message):
        engines.DeepSpeedEngine(SUPPORTED)._configure_tensor_parallel(model, "theirs")
    with pytest.raises(AssertionError, match="theirs"):
        engines.DeepSpeedEngine({})._configure_tensor_parallel(model, "theirs")


def unread_model() -> torch.nn.Module:
    """Make a model as a load for tensor parallelism leaves it."""
    model = torch.nn.Linear(2, 4, device="meta", bias=False)
    values: Any = None
    setattr(model.weight, shard_loading.PENDING, Pending(values, model.weight.data))
    return model


def test_the_part_that_autotp_leaves_is_noted(engines: Any) -> None:
    model = unread_model()
    model.weight.data = model.weight.data.chunk(2)[1]
    engines.DeepSpeedEngine(SUPPORTED)._configure_tensor_parallel(model, None)
    assert getattr(model.weight, shard_loading.PENDING).part == (range(2, 4), range(2))
    model.weight.data = torch.cat(model.weight.data.chunk(2, dim=1))
    with pytest.raises(ConfigError, match="weight cannot be loaded shard by shard: AutoTP cuts it"):
        engines.DeepSpeedEngine(SUPPORTED)._configure_tensor_parallel(model, None)


@pytest.mark.parametrize("changes", ({"enabled": False}, {"weights": "int8"}, {}))
def test_an_unread_model_is_refused_where_it_stays_unread(
    engines: Any, changes: dict[str, Any]
) -> None:
    """Nothing has cut it in the last case."""
    engine = engines.DeepSpeedEngine({"finepage": {**SUPPORTED["finepage"], **changes}})
    with pytest.raises(ConfigError, match="weight is not read yet: the model was loaded under an"):
        engine._configure_distributed_model(unread_model())


def test_a_version_without_tensor_parallelism_is_left_alone() -> None:
    module = engine_module()
    del module.DeepSpeedEngine._configure_tensor_parallel
    seam.install(module)
    assert not hasattr(module.DeepSpeedEngine, "_configure_tensor_parallel")


@pytest.mark.parametrize(("settings", "removed"), [(SUPPORTED, [1]), ({}, [])])
def test_every_pass_is_compared_so_deepspeeds_check_of_the_first_goes(
    engines: Any, settings: dict[str, Any], removed: list[int]
) -> None:
    engine, found = engines.DeepSpeedEngine(settings), []
    engine.first_dataloader_check = SimpleNamespace(remove=lambda: found.append(1))
    engine._configure_zero_optimizer("theirs")
    assert found == removed


class Plain(torch.nn.Module):
    """A model whose root has no weights, so that its hooks run outside of what is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Weighted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


def hook(*_: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("make", "settings", "skips"),
    [
        (Plain, SUPPORTED, True),
        (Plain, {}, False),
        (Weighted, SUPPORTED, False),
        (torch.nn.Sequential, SUPPORTED, False),
    ],
)
def test_the_compiler_skips_hooks_outside_of_what_is_captured(
    engines: Any, make: Any, settings: dict[str, Any], skips: bool
) -> None:
    engine = engines.DeepSpeedEngine(settings)
    engine.module = make()
    other = engine.module.register_forward_hook(hook)
    engine.module_forward_pre_hook = engine.module.register_forward_pre_hook(hook)
    engine.module_forward_post_hook = engine.module.register_forward_hook(hook)
    engine._configure_zero_optimizer("theirs")
    (before,) = engine.module._forward_pre_hooks.values()
    theirs, after = engine.module._forward_hooks.values()
    assert (before is hook, after is hook) == (not skips, not skips)
    assert theirs is hook
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    assert list(engine.module._forward_hooks) == [other.id]
    engine._configure_zero_optimizer("theirs")  # hooks that are gone


def test_installing_twice_is_installing_once() -> None:
    module = engine_module()
    before = identities(module.DeepSpeedEngine)
    seam.install(module)
    once = identities(module.DeepSpeedEngine)
    assert once != before
    seam.install(module)
    assert identities(module.DeepSpeedEngine) == once


def identities(owner: type) -> dict[str, int]:
    """Return the identity of each member; a wrapper compares equal to the method it wraps."""
    return {name: id(member) for name, member in vars(owner).items()}


def test_a_module_that_is_still_being_imported_stays_as_it_is() -> None:
    module = ModuleType("engine")
    before = dict(vars(module))
    seam.install(module)
    assert vars(module) == before
