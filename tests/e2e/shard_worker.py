"""What one rank does in ``test_rank_loading.py``: loads checkpoints under tensor parallelism.

The last argument is a folder. Measures the host memory of a load, where the folder has a large
checkpoint. Then makes a checkpoint of each family in the folder, and compares the masters of the
shards with those of a model that was loaded whole, and then cut. Writes what it found into a file
of its own.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_finepage
from ds_finepage.integrations.deepspeed import offload
from tests.e2e.rank_worker import (
    CUT_OF_MIXTRAL,
    MAKERS,
    RANK,
    ds_config,
    engine_of,
    generated,
    prompt,
)

FAMILIES = ("llama", "qwen3", "opt", "mixtral")
FOLDER = Path(sys.argv[-1])


def config_of(folder: Path, dtype: torch.dtype) -> Any:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    cut = {"partition_config": CUT_OF_MIXTRAL} if kind == "mixtral" else {}
    return ds_config(dtype=dtype, tensor_parallel=cut)


def engine_of_shards(folder: Path, dtype: torch.dtype) -> Any:
    """Load as a user does: under ``HfDeepSpeedConfig``, then ``deepspeed.initialize``."""
    config = config_of(folder, dtype)
    keep_alive = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    del keep_alive
    return deepspeed.initialize(model=model, config=config)[0]


def masters(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.ds_tensor.view(parameter.ds_shape)
        for name, parameter in engine.module.named_parameters()
    }


def compared(folder: Path) -> dict[str, Any]:
    """Return which masters differ from those of a model that was whole, and whether tokens do."""
    dtype = torch.bfloat16 if folder.name == "qwen3" else torch.float32
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    engine = engine_of_shards(folder, dtype)
    mine, whole = masters(engine), masters(engine_of(plain, config_of(folder, dtype)))
    different = [name for name in whole if not torch.equal(mine[name], whole[name])]
    buffers = dict(plain.named_buffers())
    for name, buffer in engine.module.named_buffers():
        different += [] if torch.equal(buffer, buffers[name]) else [name]
    found: dict[str, Any] = {"different": different, "names": list(mine) == list(whole)}
    if folder.name == "llama":
        found["tokens"] = generated(engine.module, prompt())[1] == generated(plain, prompt())[1]
        found["unplanned"] = ds_finepage.handle_of(engine).stats.num_unplanned_graphs
    return found


def compared_families() -> dict[str, Any]:
    if RANK == 0:
        torch.manual_seed(0)
        for family in FAMILIES:
            MAKERS[family]().save_pretrained(FOLDER / family)
    torch.distributed.barrier()
    return {family: compared(FOLDER / family) for family in FAMILIES}


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measured() -> dict[str, int]:
    """Return the bytes that a load adds to this process at its peak, and those of its masters.

    The measuring ends where finepage takes the model over. Its probe then needs scratch memory of
    the device, which is host memory here.
    """
    engine_of_shards(FOLDER / "small", torch.bfloat16)  # imports, process groups
    gc.collect()
    before = status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    peaks: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        attach = offload.attach

        def spy(*args: Any, **kwargs: Any) -> Any:
            peaks.append(status("VmHWM:") - before)
            return attach(*args, **kwargs)

        patch.setattr(offload, "attach", spy)
        engine = engine_of_shards(FOLDER / "large", torch.bfloat16)
    return {"peak": peaks[0], "masters": sum(each.nbytes for each in masters(engine).values())}


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {"bytes": measured() if (FOLDER / "large").exists() else {}}
    found["values"] = compared_families()
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
