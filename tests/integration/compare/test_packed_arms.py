"""Every engine of the comparison runs the same packed model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.compare.modelling import model_arm, modeller_of
from ds_finepage.compare.worker import NUM_RECORDED
from ds_finepage.errors import ConfigError
from ds_finepage.modeller import Modeller
from ds_finepage.packing import op
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from ds_finepage.planning.rewrite import split
from tests.integration.cli.models import small_model
from tests.integration.compare.compared import Compared
from tests.integration.engines import ZERO_ON_CPU
from tests.unit.compare.runs import settings

pytestmark = pytest.mark.usefixtures("nothing_persisted")

SHAPE = {"num_hidden_layers": 4, "vocab_size": 300}
TOKENS = {"prompt_tokens": 7, "new_tokens": 5}
DS_CONFIG = {**ZERO_ON_CPU, "bf16": {"enabled": True}}
PACKED = {**DS_CONFIG, "finepage": {"weights": "int4", "weights_group": 64}}


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    """As large beside these weights as a slice is beside those of a large model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "SLICE_ROWS", 96)
        patch.setattr(split, "CUT_ROWS", 96)
        yield


def models_of(checkpoint: Path, ds_config: dict[str, Any]) -> Modeller:
    asked = settings(ds_config=json.dumps(ds_config), device_budget="60%weights", **TOKENS)
    return modeller_of(checkpoint, asked, 1)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, str(small_model(folder, **SHAPE)))
    return Compared(folder, PACKED, models_of(folder, PACKED), batch=1, **TOKENS)


@pytest.fixture(scope="module")
def expected(compared: Compared) -> list[list[int]]:
    """The tokens of the packed model in plain transformers; those of the other model differ."""
    model = compared.plain()
    packed = copy.deepcopy(model)
    pack_model(packed, PackedForm(4))
    found = compared.tokens(packed)
    assert found != compared.tokens(model)
    return found


@pytest.mark.parametrize(
    "arm", [arm.name for arm in ARMS.values() if not (arm.observes or arm.is_ours)]
)
def test_other_systems_run_the_packed_model(
    arm: str, compared: Compared, expected: list[list[int]], tmp_path: Path
) -> None:
    found, tokens = compared.run(arm, tmp_path)
    assert tokens == [expected] * 3
    for phase in (found.prefill, found.decode):
        if arm != "plain":
            assert phase.h2d_bytes == phase.modelled_h2d_bytes, arm
        assert (phase.h2d_bytes or 0) <= compared.models.weight_bytes


def test_a_stand_in_drafts_within_the_budget_and_tokens_stay_equal(
    compared: Compared, tmp_path: Path
) -> None:
    budget_bytes = models_of(compared.folder, DS_CONFIG).weight_bytes * 8 // 10
    asked = {"ds_config": DS_CONFIG, "budget_bytes": budget_bytes}
    ours, _ = compared.run("finepage", tmp_path, **asked)
    found, tokens = compared.run("finepage-draft", tmp_path, **asked)
    assert tokens == [compared.tokens(compared.plain())] * 3
    assert found.peak_bytes and found.peak_bytes <= budget_bytes
    assert found.settings["draft"] == "stand-in"
    (note,) = found.notes
    num_tokens = float(note.removesuffix(" tokens a pass"))
    assert found.decode.wall_ns and found.decode.h2d_bytes is not None
    assert num_tokens == 1 or found.decode.h2d_bytes < ours.decode.h2d_bytes


def test_a_packed_model_has_no_stand_in(compared: Compared, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model is quantised already"):
        compared.run("finepage-draft", tmp_path)


def test_ours_packs_by_the_key_and_holds_a_share_of_the_packed_weights(
    compared: Compared, expected: list[list[int]], tmp_path: Path
) -> None:
    models, whole = compared.models, models_of(compared.folder, DS_CONFIG)
    assert models.weight_bytes < 0.34 * whole.weight_bytes
    assert models.budget_bytes == int(models.weight_bytes * 0.6)
    found, tokens = compared.run("finepage", tmp_path)
    assert tokens == [expected] * (3 + NUM_RECORDED)
    assert found.peak_bytes and found.peak_bytes <= models.budget_bytes
    unpacked = {"ds_config": DS_CONFIG, "budget_bytes": whole.budget_bytes}
    plain, _ = compared.run("finepage", tmp_path, **unpacked)
    assert found.decode.h2d_bytes and plain.decode.h2d_bytes
    # In a small model the output layer weighs more than in a large one.
    assert found.decode.h2d_bytes < 0.42 * plain.decode.h2d_bytes
    bound = model_arm(ARMS["finepage"], models).decode.lower_bound_bytes
    assert bound and found.decode.h2d_bytes < 1.1 * bound


def test_modules_that_stay_are_counted_packed(compared: Compared) -> None:
    packed, unpacked = (
        models_of(compared.folder, c).at("3MiB").engine("accelerate-map").modules_on_device
        for c in (PACKED, DS_CONFIG)
    )
    assert 0 < unpacked < packed
