"""The seam, through real ``deepspeed.initialize`` calls in one process on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.engine import detach
from ds_finepage.integrations.transformers import price
from tests.integration.engines import TINY_WEIGHTS, ds_config, python
from tests.integration.families import logits, make_model, token_ids, tokens

pytestmark = pytest.mark.usefixtures("deepspeed")

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
PROMPT = token_ids(7)
NUM_TOKENS = 6
FULL_BUDGET = "400%weights"

Initialize = Callable[..., Any]


def planned_config(**section: Any) -> dict[str, Any]:
    section = {"enabled": True, "device_budget": FULL_BUDGET, **section}
    return ds_config(section, zero=TINY_WEIGHTS)


@pytest.fixture
def initialize(deepspeed: Any) -> Iterator[Initialize]:
    """``initialize(model, ds_config)`` that destroys its engines after the test."""
    engines = []

    def make(model: torch.nn.Module, config: Any, **kwargs: Any) -> Any:
        engine, *_ = deepspeed.initialize(model=model, config=config, **kwargs)
        engines.append(engine)
        return engine

    torch._dynamo.reset()
    yield make
    for engine in reversed(engines):
        engine.destroy()


def is_stock(engine: Any) -> bool:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return type(engine.optimizer) is DeepSpeedZeRoOffload


def num_stock_hooks(engine: Any) -> int:
    return len(engine.optimizer.forward_hooks)


# Stock stays stock.


@pytest.mark.parametrize(
    "section", [None, {"enabled": False}, {"enabled": False, "device_budget": "40%weights"}]
)
def test_without_finepage_an_engine_is_exactly_stock(initialize: Initialize, section: Any) -> None:
    model = make_model("llama")
    expected = logits(model, PROMPT)
    engine = initialize(model, ds_config(section, zero=TINY_WEIGHTS))
    assert is_stock(engine) and num_stock_hooks(engine) > len(list(model.modules())) / 2
    assert model._compiled_call_impl is None
    assert torch.equal(engine(PROMPT).logits, expected)
    with pytest.raises(ConfigError, match="this engine runs stock DeepSpeed"):
        ds_finepage.assert_active(engine)
    with pytest.raises(ConfigError, match='"finepage": {"enabled": true}'):
        ds_finepage.stats(engine)
    detach(engine)  # nothing to do
    assert is_stock(engine)


# One engine with plans.


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """What plain transformers returns."""
    model = make_model("llama")
    return {"logits": logits(model, PROMPT), "tokens": tokens(model, PROMPT, NUM_TOKENS)}


@pytest.fixture(scope="module")
def planned(deepspeed: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    engine, *_ = deepspeed.initialize(
        model=make_model("llama"), config=planned_config(device_budget="120%weights")
    )
    yield engine
    engine.destroy()


def test_forward_and_generate(planned: Any, plain: dict[str, torch.Tensor]) -> None:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    ds_finepage.assert_active(planned)
    assert isinstance(planned.optimizer, DeepSpeedZeRoOffload) and not is_stock(planned)
    assert torch.equal(planned(PROMPT).logits, plain["logits"])
    assert torch.equal(tokens(planned.module, PROMPT, NUM_TOKENS), plain["tokens"])
    stats = ds_finepage.stats(planned)
    assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
    assert stats.budget_bytes == stats.weight_bytes * 120 // 100
    assert stats == ds_finepage.handle_of(planned).stats


# Engines of their own.


def test_a_draft_of_the_call_runs_in_the_budget(
    initialize: Initialize, plain: dict[str, torch.Tensor]
) -> None:
    draft = make_model("llama")
    engine = initialize(make_model("llama"), planned_config(device_budget="170%weights"))
    given = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "assistant_model": draft}
    assert torch.equal(engine.module.generate(PROMPT, **given), plain["tokens"])
    stats = ds_finepage.stats(engine)
    assert stats.draft_bytes == sum(p.nbytes for p in draft.parameters())
    assert stats.num_accepted == stats.num_drafted > 0


def test_a_stand_in_of_a_partitioned_model_drafts_and_leaves_it_as_it_was(
    initialize: Initialize, plain: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(price.Price, "length", lambda self: 6)  # whatever the times are
    asked = planned_config(device_budget="85%weights", draft="stand-in", weights_group=16)
    engine = initialize(make_model("llama"), asked)
    homes = {name: p.ds_tensor.data_ptr() for name, p in engine.module.named_parameters()}
    given = {"max_new_tokens": 4 * NUM_TOKENS, "do_sample": False, "disable_compile": True}
    expected = make_model("llama").generate(PROMPT, **given)
    for _ in range(2):
        assert torch.equal(engine.module.generate(PROMPT, **given), expected)
    stats = ds_finepage.stats(engine)
    assert 0 < stats.num_accepted <= stats.num_drafted and not stats.unplanned_reasons
    assert 0 < stats.draft_bytes < stats.budget_bytes
    ds_finepage.handle_of(engine).take_draft(None)
    assert torch.equal(engine.module.generate(PROMPT, **given), expected)
    detach(engine)
    parameters = dict(engine.module.named_parameters())
    assert {name: p.ds_tensor.data_ptr() for name, p in parameters.items()} == homes
    assert not any(p.numel() for p in parameters.values())  # as ZeRO leaves them
    assert torch.equal(tokens(engine.module, PROMPT, NUM_TOKENS), plain["tokens"])


def test_detach_gives_back_stock_zero_inference(
    initialize: Initialize, plain: dict[str, torch.Tensor]
) -> None:
    model = make_model("llama")
    engine = initialize(model, planned_config())
    assert torch.equal(engine(PROMPT).logits, plain["logits"])
    detach(engine)
    with pytest.raises(ConfigError, match="stock"):
        ds_finepage.assert_active(engine)
    assert model._compiled_call_impl is None
    assert num_stock_hooks(engine) > 0
    assert all(p.numel() == 0 for p in model.parameters())  # partitioned, as stock keeps them
    assert torch.equal(engine(PROMPT).logits, plain["logits"])
    assert torch.equal(tokens(model, PROMPT, NUM_TOKENS), plain["tokens"])
    detach(engine)


def test_two_engines_side_by_side(initialize: Initialize, plain: dict[str, torch.Tensor]) -> None:
    ours = initialize(make_model("llama"), planned_config())
    stock = initialize(make_model("llama"), ds_config({"enabled": False}, zero=TINY_WEIGHTS))
    assert is_stock(stock) and not is_stock(ours)
    for _ in range(2):
        for engine in (ours, stock):
            assert torch.equal(engine(PROMPT).logits, plain["logits"])
    assert ds_finepage.stats(ours).num_unplanned_modules == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_runs(initialize: Initialize, path: Path) -> None:
    model = make_model("llama", torch.bfloat16, num_hidden_layers=3)
    expected = logits(model, PROMPT)
    config = json.loads(path.read_text())
    engine = initialize(model, config)  # DeepSpeed would not close the file
    assert is_stock(engine) is not config["finepage"]["enabled"]
    assert torch.equal(engine(PROMPT).logits, expected)


# Refusals.


def refused(initialize: Initialize, config: dict[str, Any]) -> str:
    """Return the message of the ConfigError; the model is as it was."""
    model = torch.nn.Linear(8, 8)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError) as error:
        initialize(model, config)
    assert torch.equal(model.weight, before) and not hasattr(model.weight, "ds_tensor")
    return str(error.value)


ON = {"enabled": True}


def test_a_budget_above_the_device_is_refused(initialize: Initialize) -> None:
    """Weights count, so this is known only once DeepSpeed has made its partitions."""
    with pytest.raises(ConfigError, match="'1099511627776000' is 1024000.00 GiB .* the device has"):
        initialize(torch.nn.Linear(8, 8), planned_config(device_budget="1000TiB"))


def test_fp16_where_the_device_has_none_is_refused(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    assert '"bf16": {"enabled": true}' in refused(initialize, ds_config(ON, fp16={"enabled": True}))


# Installing.


ORDERS = {
    "ours last": "import deepspeed, ds_finepage",
    "ours first": "import ds_finepage, deepspeed",
    "not ours": "import deepspeed",
}


def test_the_order_of_imports_does_not_matter() -> None:
    """Each order in a process that is forked before DeepSpeed is imported."""
    code = """
import os, sys, torch, transformers

def is_in(order):
    exec(order)
    from deepspeed.runtime.engine import DeepSpeedEngine
    found = vars(DeepSpeedEngine)["_configure_zero_optimizer"]
    return type(found).__name__ == "SeamWrapper"  # to import ours would put it there

for order in sys.argv[1:]:
    if (child := os.fork()) == 0:
        os._exit(3 + is_in(order))
    print("in:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 3)
"""
    done = python(code, *ORDERS.values())
    # Some versions of DeepSpeed print warnings there, too.
    found = [line for line in done.stdout.splitlines() if line.startswith("in:")]
    assert found == [f"in: {int(order != 'not ours')}" for order in ORDERS]
