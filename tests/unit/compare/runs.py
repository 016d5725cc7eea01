"""Settings, runs and results for tests of the comparison."""

from __future__ import annotations

import json
from typing import Any

from ds_finepage.compare.engine import RunRequest
from ds_finepage.reporting.results import CompareSettings, PhaseFigures, Results, Run

DS_CONFIG = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}


def settings(**changes: Any) -> CompareSettings:
    """Return settings of a small comparison."""
    given: dict[str, Any] = {
        "model": "llama-7b",
        "layers": 2,
        "ds_config": json.dumps(DS_CONFIG),
        "device_budget": "50%weights",
        "batches": (1,),
        "prompt_tokens": 8,
        "new_tokens": 5,
        "arms": ("plain", "zero", "finepage"),
        "hardware": "t4",
        "repeats": 1,
        **changes,
    }
    return CompareSettings(**given)


def request(arm: str, model_dir: object = "", **changes: Any) -> RunRequest:
    """Return a request for one small run of an arm on the CPU."""
    given: dict[str, Any] = {
        "ds_config": {},
        "device": "cpu",
        "budget_bytes": 1,
        "batch": 1,
        "prompt_tokens": 2,
        "new_tokens": 4,
        "repeats": 1,
        "settings": {},
        **changes,
    }
    return RunRequest(arm=arm, model_dir=str(model_dir), **given)


def run(arm: str, prefill_ns: int | None = None, decode_ns: int | None = None, **more: Any) -> Run:
    """Return a run within its budget; its times are modelled ones, and 7 times that on the wall."""

    def phase(time_ns: int | None) -> PhaseFigures:
        wall_ns = None if time_ns is None else 7 * time_ns
        return PhaseFigures(modelled_ns=time_ns, wall_ns=wall_ns)

    given: dict[str, Any] = {
        "batch": 1,
        "budget_bytes": 1000,
        "peak_bytes": 1000,
        "settings": {},
        "prefill": phase(prefill_ns),
        "decode": phase(decode_ns),
        **more,
    }
    return Run(arm=arm, **given)


def results(*runs: Run, device: str = "cpu", **changes: Any) -> Results:
    """Return results of the runs."""
    return Results(
        settings=settings(**changes),
        device=device,
        versions={"torch": "2"},
        date="2026-11-22",
        command="ds-finepage compare",
        runs=runs,
    )
