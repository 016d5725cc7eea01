"""DeepSpeed as the tests run it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.integrations.deepspeed.one_process import ONE_PROCESS, UNUSED_OP
from tests.integration.families import tokens

ROOT = Path(__file__).parents[2]


def python(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, in the repository; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def one_process_deepspeed() -> Iterator[Any]:
    """Import DeepSpeed with one process on the CPU; end its process group, if it made one."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ONE_PROCESS, "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        import deepspeed

        patch.setitem(deepspeed.ops.__compatible_ops__, UNUSED_OP, False)
        yield deepspeed
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None


ZERO_ON_CPU: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}},
}
"""A ds_config of stock ZeRO-Inference with weights in host memory."""

TINY_WEIGHTS = {
    "stage3_gather_16bit_weights_on_model_save": True,
    "stage3_param_persistence_threshold": 0,  # else all of them would stay resident
}
"""Keys of ``zero_optimization``."""


def ds_config(
    finepage: dict[str, Any] | None = None, *, zero: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return a ds_config for inference; ``finepage`` None leaves the section out."""
    config = {**copy.deepcopy(ZERO_ON_CPU), **changes}
    config["zero_optimization"].update(zero or {})
    return config if finepage is None else {**config, "finepage": finepage}


def static_tokens(model: Any, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Generate greedily with a static cache, as the arms of a comparison do."""
    more = {"min_new_tokens": num_tokens, "disable_compile": True}
    return tokens(model, ids, num_tokens, attention_mask=torch.ones_like(ids), **more)


def load_arm(request: RunRequest) -> Engine:
    """Return the engine of an arm of a comparison."""
    engine: Engine = import_module(ARMS[request.arm].module).load(request)
    return engine
