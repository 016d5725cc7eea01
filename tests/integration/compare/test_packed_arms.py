"""Every engine of the comparison runs the same packed model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.compare.engine import RunRequest
from ds_finepage.compare.modelling import model_arm, modeller_of
from ds_finepage.compare.orchestrate import completed, make_prompts
from ds_finepage.compare.worker import NUM_RECORDED, Worker
from ds_finepage.modeller import Modeller
from ds_finepage.packing import op
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from ds_finepage.planning.rewrite import split
from ds_finepage.reporting.results import Run
from tests.integration.cli.models import small_model
from tests.integration.engines import one_process_deepspeed
from tests.unit.compare.runs import settings

SHAPE = {"num_hidden_layers": 4, "vocab_size": 300}
PROMPT, NEW, BUDGET = 7, 5, "60%weights"
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
PACKED = {**DS_CONFIG, "finepage": {"weights": "int4", "weights_group": 64}}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[Any]:
    with one_process_deepspeed() as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    """As large beside these weights as a slice is beside those of a large model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "SLICE_ROWS", 96)
        patch.setattr(split, "CUT_ROWS", 96)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, str(small_model(folder, **SHAPE)))
    return folder


def models_of(checkpoint: Path, ds_config: dict[str, Any]) -> Modeller:
    return modeller_of(
        checkpoint,
        settings(
            ds_config=json.dumps(ds_config),
            prompt_tokens=PROMPT,
            new_tokens=NEW,
            device_budget=BUDGET,
        ),
        1,
    )


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> Modeller:
    return models_of(checkpoint, PACKED)


@pytest.fixture
def request_of(
    checkpoint: Path, models: Modeller, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunRequest]:
    from deepspeed.runtime.zero.partition_parameters import Init

    monkeypatch.setattr(Init, "num_persisted_elements", 0)  # it counts over all models

    def make(arm: str, **changes: Any) -> RunRequest:
        given: dict[str, Any] = {
            "arm": arm,
            "model_dir": str(checkpoint),
            "ds_config": PACKED,
            "device": "cpu",
            "budget_bytes": models.budget_bytes,
            "batch": 1,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "repeats": 1,
            "settings": model_arm(ARMS[arm], models).settings,
            "prompt_ids": make_prompts(checkpoint, batch=1, prompt_tokens=PROMPT),
            **changes,
        }
        return RunRequest(**given)

    return make


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of the packed model in plain transformers; those of the other model differ."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    packed = copy.deepcopy(model)
    pack_model(packed, PackedForm(4))
    ids = torch.tensor(make_prompts(checkpoint, batch=1, prompt_tokens=PROMPT))
    found = []
    for each in (packed, model):
        with torch.no_grad():
            made = each.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                cache_implementation="static",
                disable_compile=True,
            )
        found.append(made.tolist())
    assert found[0] != found[1]
    tokens: list[list[int]] = found[0]
    return tokens


def ran(request: RunRequest, folder: Path) -> tuple[Run, list[Any]]:
    made = Worker(request)
    return made.run(folder), made.tokens


@pytest.mark.parametrize("arm", [name for name in ARMS if not ARMS[name].observes])
def test_other_systems_run_the_packed_model(
    arm: str,
    request_of: Callable[..., RunRequest],
    models: Modeller,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    found, tokens = ran(request_of(arm), tmp_path)
    assert tokens == [expected] * 3
    modelled = model_arm(ARMS[arm], models)
    found = completed(found, modelled, models.weight_bytes)
    for phase in (found.prefill, found.decode):
        if arm != "plain":
            assert phase.h2d_bytes == phase.modelled_h2d_bytes, arm
        assert (phase.h2d_bytes or 0) <= models.weight_bytes


def test_ours_packs_by_the_key_and_holds_a_share_of_the_packed_weights(
    request_of: Callable[..., RunRequest],
    checkpoint: Path,
    models: Modeller,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    whole = models_of(checkpoint, DS_CONFIG)
    assert models.weight_bytes < 0.34 * whole.weight_bytes
    assert models.budget_bytes == int(models.weight_bytes * 0.6)
    found, tokens = ran(request_of("finepage"), tmp_path)
    assert tokens == [expected] * (3 + NUM_RECORDED)
    assert found.peak_bytes and found.peak_bytes <= models.budget_bytes
    unpacked = request_of("finepage", ds_config=DS_CONFIG, budget_bytes=whole.budget_bytes)
    plain, _ = ran(unpacked, tmp_path)
    assert found.decode.h2d_bytes and plain.decode.h2d_bytes
    # In a small model the output layer weighs more than in a large one.
    assert found.decode.h2d_bytes < 0.42 * plain.decode.h2d_bytes
    bound = model_arm(ARMS["finepage"], models).decode.lower_bound_bytes
    assert bound and found.decode.h2d_bytes < 1.1 * bound


def test_modules_that_stay_are_counted_packed(checkpoint: Path) -> None:
    packed, unpacked = (
        models_of(checkpoint, each).at("3MiB").settings("accelerate-map")["modules_on_device"]
        for each in (PACKED, DS_CONFIG)
    )
    assert 0 < unpacked < packed
