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

from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.integrations.deepspeed.one_process import (
    prepare_one_process,
    use_device_of_rank,
)

USAGE = "usage: python -m ds_finepage.run SCRIPT.py [ARGUMENT ...]"

__all__ = ["main", "prepare_one_process", "use_device_of_rank"]


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
    sys.argv = [script, *launcher_options, *arguments[1:]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FinepageError as error:
        sys.stderr.write(f"ds_finepage: {error}\n")
        sys.exit(error.exit_status)
