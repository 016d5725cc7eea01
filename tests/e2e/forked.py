"""Runs a script as ranks, as torchrun does; they are forked from one process that has imported all.

    python tests/e2e/forked.py NUM_RANKS PORT SCRIPT ARGUMENTS

If a rank fails, the others are ended, and so is this process, with status 1.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

FAMILIES = ("gpt2", "llama", "mixtral", "opt", "qwen3")
PRELOADED = (
    "deepspeed",
    "ds_finepage.api",
    "torch._dynamo",
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
)


def start_rank(rank: int, num_ranks: int, port: str, script: str) -> int:
    """Fork a rank; return the id of its process."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    num_ranks, port, script = int(sys.argv[1]), *sys.argv[2:4]
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(script).parent))
    for name in PRELOADED:
        importlib.import_module(name)
    ranks = {start_rank(rank, num_ranks, port, script) for rank in range(num_ranks)}
    failed = False
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status and not failed:
            failed = True
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
    sys.exit(failed)


if __name__ == "__main__":
    main()
