"""Ordinary actions on a model that DeepSpeed runs: no crash, no wrong value, nothing lost."""

from __future__ import annotations

import pytest

from tests.integration.actions import lives
from tests.integration.actions.runner import run_in_a_process

OF_WEIGHTS = (
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
    "add_in_place",
    "add_to_data",
    "set_data_transposed",
    "set_the_storage",
    "write_through_a_view",
    "write_through_state_dict",
    "write_in_inference_mode",
    "vector_to_parameters",
    "replace_a_buffer",
    "prune_a_weight",
    "load_and_assign_a_state",
    "write_through_data_that_is_kept",
    "write_into_the_tensor_that_became_data",
    "write_through_numpy_and_refresh",
    "swap_two_weights",
)
"""Each way to read, copy, save and change weights once; all of them run without DeepSpeed."""
OF_LANGUAGE_MODELS = ("generate_after_a_change", "save_pretrained", "pickle_and_generate")


@pytest.mark.parametrize("name", [*OF_WEIGHTS, *lives.DEEPSPEED_ACTIONS, *OF_LANGUAGE_MODELS])
def test_action(name: str) -> None:
    run_in_a_process(name, deepspeed=True)
