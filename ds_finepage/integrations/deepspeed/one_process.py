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

GLOO_ALONE = "DS_FINEPAGE_GLOO_ALONE"
"""Set for CPU ranks that are to talk to each other through gloo alone, without that op."""


def prepare_one_process() -> None:
    """Set what torch.distributed wants to know, where no launcher has.

    A process that is alone also spares DeepSpeed the building of an op that it would never call,
    which takes half a minute and a C++ compiler. So does a rank with ``GLOO_ALONE``.
    """
    if "RANK" not in os.environ:
        for name, value in ONE_PROCESS.items():
            os.environ.setdefault(name, value)
    if os.environ.get("WORLD_SIZE") == "1" or GLOO_ALONE in os.environ:
        import deepspeed

        deepspeed.ops.__compatible_ops__[UNUSED_OP] = False


def makes_partitions_late(device_type: str) -> bool:
    """Return whether ``deepspeed.initialize`` makes host partitions that look like device bytes.

    With tensor parallelism DeepSpeed cuts the model there, and partitions it afterwards. On the CPU
    a meter cannot tell these bytes from those of a device.
    """
    return device_type == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1


def use_device_of_rank() -> None:
    """Make the device of this rank the current one, before anything asks for that."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
