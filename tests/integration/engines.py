"""DeepSpeed as the tests run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.integrations.deepspeed.one_process import ONE_PROCESS, UNUSED_OP


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


def load_arm(request: RunRequest) -> Engine:
    """Return the engine of an arm of a comparison."""
    engine: Engine = import_module(ARMS[request.arm].module).load(request)
    return engine
