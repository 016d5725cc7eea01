"""Ordinary actions on attached models, with DeepSpeed too: no crash, wrong value or loss."""

from __future__ import annotations

import pytest

from tests.integration.actions import lives, weights
from tests.integration.actions.runner import NET_ACTIONS, run_in_a_process


def test_there_are_enough_of_them() -> None:
    assert len(NET_ACTIONS) >= 60


@pytest.mark.parametrize(
    "name", [*(n for n in NET_ACTIONS if n not in weights.READS), *lives.PLAIN, *lives.LANGUAGE]
)
def test_action(name: str) -> None:
    run_in_a_process(name, deepspeed=False)


def test_actions_that_change_nothing() -> None:
    run_in_a_process(*weights.READS, deepspeed=False)


# A model that DeepSpeed runs.

READS = (
    "print_the_model",
    "numpy_of_a_weight",
    "checksum_of_all",
    "state_dict",
    "pickle_the_data",
    "call_a_part",
    "deepcopy_the_model",
    "deepcopy_a_weight",
    "save_and_load_the_state",
    "pickle_the_model",
    "call_the_engine",
    "consolidated_state",
)
WRITES = (
    "add_to_data",
    "write_through_a_view",
    "write_through_state_dict",
    "write_in_inference_mode",
    "write_through_data_that_is_kept",
    "write_through_numpy_and_refresh",
    "vector_to_parameters",
    "swap_two_weights",
    "replace_a_buffer",
    "set_the_storage",
    "add_in_place",  # because the next one sets what is set by the one before
    "set_data_transposed",
)
ALONE = (
    "prune_a_weight",
    "load_and_assign_a_state",
    "write_into_the_tensor_that_became_data",
    *(name for name in lives.DEEPSPEED if name not in READS),
    "detach_a_changed_model",
    *("generate_after_a_change", "save_pretrained", "pickle_and_generate"),
)
"""What leaves another model than before, or none. All others can follow one another."""


@pytest.mark.parametrize(
    "names", [READS, WRITES, *((name,) for name in ALONE)], ids=["reads", "writes", *ALONE]
)
def test_actions_under_deepspeed(names: tuple[str, ...]) -> None:
    run_in_a_process(*names, deepspeed=True)
