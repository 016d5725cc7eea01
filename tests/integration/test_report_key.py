"""``finepage.report`` and ``wall_clock_breakdown`` under DeepSpeed, in a program that just ends."""

from __future__ import annotations

import json
from pathlib import Path

from ds_finepage.integrations.deepspeed.one_process import ONE_PROCESS
from ds_finepage.reporting.page import PAGE_FILE
from ds_finepage.reporting.results import load_passes, load_results, run_folder
from tests.integration.engines import python

PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
import ds_finepage
from ds_finepage.run import prepare_one_process
prepare_one_process()
import deepspeed
from ds_finepage.reporting import drawing
drawing.png = lambda figure: b"picture"
from tests.integration.families import make_model, token_ids

config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "wall_clock_breakdown": True,
    "finepage": {"enabled": True, "device_budget": "60%weights", "report": sys.argv[1]},
}
engine, *_ = deepspeed.initialize(model=make_model("llama"), config=config)
with torch.no_grad():
    for _ in range(2):
        engine(token_ids(7))
timers = engine.timers.get_timers()
times = {name: timers[name].elapsed(reset=False) for name in ("fwd", "fwd_microstep")}
print(json.dumps(times))
"""


def test_a_program_that_ends_leaves_its_report(tmp_path: Path) -> None:
    done = python(PROGRAM, tmp_path, **ONE_PROCESS, DS_ACCELERATOR="cpu")
    (times,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert set(times) == {"fwd", "fwd_microstep"} and min(times.values()) > 0  # milliseconds
    (run,) = load_results(tmp_path).runs
    (found,) = load_passes(run_folder(tmp_path, run.name))
    assert (found.name, run.batch) == ("prefill", 1)
    assert run.prefill.wall_ns and run.prefill.predicted_ns and run.prefill.h2d_bytes
    assert "a decode step" not in (tmp_path / PAGE_FILE).read_text()
