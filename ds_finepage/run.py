"""Run a script that knows nothing of ds_finepage with the seam installed.

    deepspeed --num_gpus 1 --module ds_finepage.run their_script.py --deepspeed_config my.json
    python -m ds_finepage.run their_script.py --deepspeed_config my.json

The launcher puts ``--local_rank=N`` in front of the script's name; it is handed on to the script,
as the launcher does without this module in between. Started without the launcher, the variables
that torch.distributed wants are set for one process.
"""

from __future__ import annotations

import os
import runpy
import sys

import ds_finepage
from ds_finepage.errors import ConfigError, FinepageError

USAGE = "usage: python -m ds_finepage.run SCRIPT.py [ARGUMENT ...]"

ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any that is free, so that several can run side by side
}

UNUSED_OP = "deepspeed_shm_comm"
"""DeepSpeed's op for CPU processes that talk to each other through shared memory."""


def main(arguments: list[str]) -> None:
    """Run a script as ``__main__``.

    Raises:
        ConfigError: No script was named, or there is no such file.
    """
    launcher_options = []
    while arguments and arguments[0].startswith("--local_rank"):
        launcher_options.append(arguments.pop(0))
        if "=" not in launcher_options[-1] and arguments:
            launcher_options.append(arguments.pop(0))
    if not arguments:
        raise ConfigError(f"no script was named. {USAGE}")
    script = arguments[0]
    if not os.path.isfile(script):
        raise ConfigError(f"there is no script {script!r}. {USAGE}")
    prepare_one_process()
    ds_finepage.install()
    sys.argv = [script, *launcher_options, *arguments[1:]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


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


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FinepageError as error:
        sys.stderr.write(f"ds_finepage: {error}\n")
        sys.exit(error.exit_status)
