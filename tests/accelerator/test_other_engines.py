"""Accelerate as an arm on an accelerator: real copies, and the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage.compare import accelerate_arm
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.execution.meter import DeviceMeter
from tests.accelerator.subjects import plain_on
from tests.integration.engines import load_arm, static_tokens
from tests.integration.families import make_model, token_ids
from tests.unit.compare.runs import request

NUM_TOKENS, BATCH, PROMPT_TOKENS = 4, 2, 12
PINNED = {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": True}}}

pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
"""They show transformers parameters that are elsewhere."""


@pytest.fixture(scope="module")
def plain() -> Any:
    """Return a tiny Llama."""
    return make_model("llama")


@pytest.fixture(scope="module")
def model_dir(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    plain.save_pretrained(found)
    return found


def generate(model: Any, device: torch.device) -> torch.Tensor:
    ids = token_ids(PROMPT_TOKENS, batch=BATCH).to(device)
    return static_tokens(model, ids, NUM_TOKENS).cpu()


def request_of(
    model_dir: Path, device: torch.device, budget_bytes: int, **changes: Any
) -> RunRequest:
    shape = {"batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NUM_TOKENS}
    given = {"device": str(device), "budget_bytes": budget_bytes, **shape, **changes}
    return request("accelerate-map", model_dir, **given)


def modules(num: int) -> dict[str, Any]:
    return {"settings": {"modules_on_device": num}}


def weight_bytes_of(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_tokens_are_equal_bytes_count_and_the_peak_is_within_the_budget(
    device: torch.device, plain: Any, model_dir: Path
) -> None:
    expected = generate(plain.to(plain_on(device)), plain_on(device))
    weight_bytes = weight_bytes_of(plain)
    asked = request_of(model_dir, device, weight_bytes * 9 // 10, **modules(100))
    engine = load_arm(asked)
    with DeviceMeter(device) as meter, engine.counting():
        engine.place()
        assert torch.equal(generate(engine.model, device), expected)
        before, _ = engine.copied()
        assert torch.equal(generate(engine.model, device), expected)
        h2d_bytes, d2h_bytes = engine.copied()
    assert meter.peak_bytes <= asked.budget_bytes and d2h_bytes == 0
    assert torch.equal(generate(engine.model, device), expected)
    assert meter.live_bytes > 0
    assert before is not None and h2d_bytes is not None
    assert 0 < h2d_bytes - before < NUM_TOKENS * weight_bytes
    engine.close()
    assert {p.device.type for p in engine.model.parameters()} == {"cpu"}
    assert generate(engine.model, torch.device("cpu")).shape == expected.shape


def test_a_map_that_takes_more_than_was_estimated_keeps_fewer_modules(
    device: torch.device, plain: Any, model_dir: Path
) -> None:
    def kept(budget_bytes: int, num: int) -> Any:
        asked = request_of(model_dir, device, budget_bytes, **modules(num))
        return load_arm(asked).settings["modules_on_device"]

    most_bytes = weight_bytes_of(plain) * 9 // 10
    assert 0 < kept(most_bytes, 100) < 100
    assert (kept(1, 100), kept(most_bytes, 2)) == (0, 2)


def test_a_map_that_runs_out_of_memory_keeps_fewer_modules(
    device: torch.device, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fails_once(engine: Engine) -> None:
        tries.append(engine.settings["modules_on_device"])
        if len(tries) == 1:
            raise torch.OutOfMemoryError("no room")
        place(engine)

    place = accelerate_arm.DeviceMapEngine.place
    monkeypatch.setattr(accelerate_arm.DeviceMapEngine, "place", fails_once)
    engine = load_arm(request_of(model_dir, device, 1 << 40, **modules(2)))
    assert tries == [2, 1] and engine.settings["modules_on_device"] == 1


@pytest.mark.parametrize("pins", [False, True])
def test_weights_are_pinned_if_the_ds_config_says_so(
    device: torch.device, model_dir: Path, pins: bool
) -> None:
    engine = load_arm(request_of(model_dir, device, 1, ds_config=PINNED if pins else {}))
    assert all(p.is_pinned() is pins for p in engine.model.parameters())
    assert bool(engine.notes) is pins
