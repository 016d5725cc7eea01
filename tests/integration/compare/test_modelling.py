"""Modelled times of a small model: one set of figures for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError
from ds_finepage.modeller import Modeller
from ds_finepage.planning.baselines.accelerate import MapSettings, map_settings
from ds_finepage.planning.baselines.zero import ZeroSettings
from ds_finepage.planning.policies import POLICIES
from ds_finepage.reporting.results import PhaseFigures
from ds_finepage.whatif import CapturedModel, problem_of
from tests.integration.cli.models import card, small_model

OTHERS = [p for p in POLICIES if p != "zero"]
SMALL = ZeroSettings(prefetch_bucket_size=0, param_persistence_threshold=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    card(folder, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)  # so copies take longest
    return small_model(folder, num_hidden_layers=6, vocab_size=300)


def modeller(folder: Path, device_budget: str = "70%weights", **changes: Any) -> Modeller:
    shape = {"batch": 1, "prompt_tokens": 16, "new_tokens": 8, **changes}
    hardware = str(folder.parent / "little.json")
    return Modeller(str(folder), device_budget=device_budget, hardware=hardware, **shape)


@pytest.fixture(scope="module")
def tight(folder: Path) -> Modeller:
    return modeller(folder)


def numbers(figures: PhaseFigures) -> tuple[int, int, int, int]:
    found = (
        figures.modelled_ns,
        figures.modelled_h2d_bytes,
        figures.lower_bound_ns,
        figures.lower_bound_bytes,
    )
    assert None not in found
    return tuple(int(n or 0) for n in found)  # type: ignore[return-value]


def test_the_budget_is_a_share_of_the_weights(tight: Modeller) -> None:
    layer = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
    assert tight.weight_bytes == 2 * (6 * layer + 2 * 300 * 256 + 256)
    assert tight.budget_bytes == int(0.7 * tight.weight_bytes)


def test_a_fault_of_capture_is_an_error_of_capture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("an op")

    monkeypatch.setattr("ds_finepage.modeller.capture_model", fail)
    with pytest.raises(CaptureError, match="^KeyError: 'an op'$"):
        modeller(folder)


@pytest.mark.parametrize("policy", OTHERS)
def test_every_policy_has_figures_above_its_bounds(tight: Modeller, policy: str) -> None:
    for figures in tight.figures(policy):
        ns, nbytes, bound_ns, bound_bytes = numbers(figures)
        assert bound_bytes > 0 < ns
        assert bound_bytes <= nbytes and bound_ns <= ns
        assert figures.wall_ns is figures.h2d_bytes is figures.predicted_ns is None


def test_an_engine_with_everything_on_the_device_copies_nothing(tight: Modeller) -> None:
    for figures, paged in zip(tight.figures(""), tight.figures("finepage"), strict=True):
        ns, nbytes, _, bound_bytes = numbers(figures)
        assert nbytes == bound_bytes == 0
        assert 0 < ns < numbers(paged)[0]
    assert tight.engine("") is None


def test_a_device_map_is_the_same_in_both_passes(folder: Path) -> None:
    """The prefill of 64 tokens leaves room for fewer modules than the decode step."""
    long = modeller(folder, batch=8, prompt_tokens=64, device_budget="120%weights")
    kept = long.engine("accelerate-map")
    in_prefill, in_decode = (modules_alone(long, c) for c in (long.prefill, long.decode))
    assert kept == MapSettings(in_prefill) and in_prefill < in_decode
    assert kept.keys == {"modules_on_device": in_prefill}
    assert [p.engine for p in long.planned("accelerate-map")] == [kept] * 2
    fewer, more = (long.planned("accelerate-map", MapSettings(n))[1] for n in (0, in_prefill))
    assert fewer.figures.reloaded_bytes > more.figures.reloaded_bytes


def modules_alone(long: Modeller, captured: CapturedModel) -> int:
    """Return how many modules a pass would keep if it were the only one."""
    problem = problem_of(
        captured, budget_bytes=long.budget_bytes, profile=long.profile, policy="accelerate-map"
    )
    return map_settings([(problem, 1)]).modules_on_device


def test_settings_that_are_copied_give_the_same_figures(tight: Modeller) -> None:
    engine = tight.engine("zero-persistence")
    assert engine != ZeroSettings()
    assert tight.figures("zero", engine) == tight.figures("zero-persistence")
    assert tight.engine("zero") == ZeroSettings()
    assert tight.engine("finepage") is tight.engine("static") is None


def test_settings_of_the_user_take_the_place_of_the_defaults(tight: Modeller) -> None:
    """Without prefetch and persistence everything comes in again, one module after the other."""
    with pytest.raises(PlanInfeasibleError, match="policy 'zero' holds"):
        tight.figures("zero")
    for figures in tight.figures("zero", SMALL):
        assert figures.modelled_h2d_bytes == tight.weight_bytes


def test_the_dtype_of_a_run_can_be_named(folder: Path, tight: Modeller) -> None:
    assert modeller(folder, dtype="float32").weight_bytes == 2 * tight.weight_bytes


def test_one_new_token_has_a_step_too(folder: Path) -> None:
    _, decode = modeller(folder, new_tokens=1).figures("static")
    assert decode.modelled_ns


def test_host_memory_is_watched_if_its_size_is_known(folder: Path) -> None:
    small = modeller(folder, host_memory_bytes=1 << 20)
    for policy in ("finepage", "zero-persistence"):
        with pytest.raises(PlanInfeasibleError, match="of host memory"):
            small.figures(policy)


def test_a_budget_below_every_working_set_is_refused(folder: Path) -> None:
    tiny = modeller(folder, "1%weights")
    for policy in ("finepage", "zero-persistence", "static", "horizon-published"):
        with pytest.raises(PlanInfeasibleError):
            tiny.figures(policy)
    with pytest.raises(PlanInfeasibleError):
        tiny.engine("zero-persistence")


def test_an_unknown_policy_is_refused(tight: Modeller) -> None:
    for ask in (tight.figures, tight.engine):
        with pytest.raises(ConfigError, match="unknown policy 'zeros'"):
            ask("zeros")
