"""What every test starts from: no network, seeded generators, one compute thread."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.commands import Cli

# Before anything imports Hugging Face libraries, and inherited by every process that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples in every run, however slow the machine is.
# "pytest --hypothesis-profile=explore" looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Script = Callable[[str], Any]

FOLDERS = ("tests/integration/", "tests/accelerator/", "tests/e2e/")
"""Their tests are slow, except one or a few for each thing that ds_finepage can do."""

BY_DEFAULT = (
    "accelerator/test_files.py::test_a_model_runs_that_host_memory_has_no_room_for",
    "accelerator/test_on_a_card.py::test_tokens_are_equal_and_the_budget_holds_from_attach_to_detach",
    "e2e/test_examples.py::test_generate_with_plain_python_and_with_the_launcher",
    "e2e/test_wheel.py",
    "integration/cli/test_cli.py",
    "integration/cli/test_plan.py::test_json_is_one_object",
    "integration/cli/test_serve.py::test_answers_are_those_of_the_model",
    "integration/cli/test_shared_passes.py::test_clients_share_passes_and_get_the_tokens",
    "integration/test_budget.py::test_the_meter_never_reads_more_than_the_budget[short-min]",
    "integration/test_continuous_batching.py::test_requests_get_the_plain_tokens_within_the_budget[llama]",
    "integration/test_deepspeed.py::test_forward_and_generate",
    "integration/test_deepspeed.py::test_without_finepage_an_engine_is_exactly_stock",
    "integration/test_drafts.py::test_a_stand_in_drafts_from_the_weights_that_are_there",
    "integration/test_encoders.py::test_a_pipeline_gives_what_it_gives_without_finepage[Bert",
    "integration/test_experts.py::test_a_step_reloads_the_experts_that_it_uses[mixtral-grouped_mm",
    "integration/test_families.py::test_logits_and_tokens_are_those_of_plain_transformers[llama",
    "integration/test_generation.py::test_the_default_cache_gives_the_tokens_of_plain_transformers"
    "[llama-torch.float32]",
    "integration/test_graph_breaks.py::test_a_model_with_breaks_runs_in_pieces",
    "integration/test_host_compute.py::test_the_planner_lets_the_host_compute_where_that_is_faster",
    "integration/test_host_cache.py::test_a_cache_larger_than_the_budget_goes_to_host_memory[greedy]",
    "integration/test_loading.py::test_host_bytes_stay_within_a_tenth_of_the_checkpoint[llama]",
    "integration/test_look_ahead.py::test_a_cache_that_fits_nowhere_is_refused",
    "integration/test_packed_loading.py::test_a_checkpoint_is_packed_as_it_comes_and_saved_packed",
    "integration/test_packed_weights.py::test_packed_models_are_the_same_at_every_budget[llama-int4",
    "integration/test_quantized.py::test_a_quantised_model_runs_under_budgets_and_comes_back[weights",
    "integration/test_rank_plans.py::test_a_rank_reloads_its_share_of_what_one_rank_reloads",
    "integration/test_real_weights.py",
    "integration/test_seq2seq.py::test_greedy_tokens_are_those_of_plain_transformers[t5]",
    "integration/test_session.py::test_detaching_gives_the_model_back_as_it_was",
    "integration/test_split.py::test_tokens_are_those_of_plain_transformers_within_any_budget[llama",
    "integration/test_weight_changes.py::test_a_changed_weight_is_that_of_the_next_call",
    "integration/test_zero_validated.py::test_a_steady_forward_gathers_what_is_simulated[llama",
)
"""Beginnings of the names of tests in these folders that are not slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    fast = tuple(f"tests/{name}" for name in BY_DEFAULT)
    for item in items:
        if item.nodeid.startswith(FOLDERS) and not item.nodeid.startswith(fast):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU unpack packed weights into its memory, as it does without a C compiler."""
    from ds_finepage.packing import native

    monkeypatch.setattr(native, "takes", lambda *_: False)


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """Import scripts of benchmarks/ by name, for the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Seed the generators; leave torch alone where nobody has imported it."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        if torch.get_num_threads() != 1:  # tests run side by side, and sums must not depend on it
            torch.set_num_threads(1)
