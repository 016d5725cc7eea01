"""Prepares a process that no launcher has started for DeepSpeed."""

from __future__ import annotations

import os

ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any that is free, so that several can run side by side
}

UNUSED_OP = "deepspeed_shm_comm"
"""DeepSpeed's op for CPU processes that talk to each other through shared memory."""


def prepare_one_process() -> None:
    """Set what torch.distributed wants to know, where no launcher has.

    A process that is alone also spares DeepSpeed the building of an op that it would never call,
    which takes half a minute and a C++ compiler.
    """
    if "RANK" not in os.environ:
        for name, value in ONE_PROCESS.items():
            os.environ.setdefault(name, value)
    if os.environ.get("WORLD_SIZE") == "1":
        import deepspeed

        deepspeed.ops.__compatible_ops__[UNUSED_OP] = False
