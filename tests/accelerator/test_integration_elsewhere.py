"""A part of the integration tests, run on the accelerator by the plugin in elsewhere.py.

Each row is a process of its own, because the plugin puts things in the place of others in whole
modules. docs/test_device.md has the command that runs all tests of these files there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

CHOSEN = {
    "float32": (
        "test_experts.py::test_tokens_that_agree_on_experts_move_less_than_was_planned",
        "test_families.py::test_logits_and_tokens_are_those_of_plain_transformers"
        "[llama-float32-min]",
        "test_host_compute.py::test_delays_on_every_lane_change_nothing",
        "test_host_compute.py::test_delays_on_every_lane_change_no_attention",
    ),
    "bfloat16": (
        "test_experts.py::test_a_step_reloads_the_experts_that_it_uses"
        "[qwen3_moe-grouped_mm-torch.bfloat16]",
        "test_host_cache.py::test_a_cache_larger_than_the_budget_goes_to_host_memory[greedy]",
    ),
}
"""Tests of tests/integration, by the dtype of models for which a test names none."""


@pytest.mark.parametrize("dtype", CHOSEN)
def test_integration_tests_pass_on_the_accelerator(device: torch.device, dtype: str) -> None:
    tests = [f"tests/integration/{test}" for test in CHOSEN[dtype]]
    settings = ["-n", "0", "-m", "slow or not slow"]
    settings += ["-p", "tests.accelerator.elsewhere", "--models-in", dtype]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout[-4000:] + done.stderr[-1000:]
    assert done.returncode == 0, said
    # Not one was skipped, or ran on the CPU.
    assert re.search(rf"^{len(tests)} passed(, \d+ warnings?)? in ", done.stdout, re.M), said
    attached = re.search(rf"^(\d+) attached on {device.type}$", done.stdout, re.M)
    assert attached is not None and int(attached[1]) >= len(tests) // 2, said
