"""Runs a DeepSpeed script and counts what its engine does to the device (floor 5).

    python -m ds_finepage.cli.instruments RESULT.json SCRIPT.py [ARGUMENT ...]

The script is run as it is; what is counted is written to RESULT.json. The same three counters serve
stock ZeRO-Inference and ds_finepage:

- Peak: live device bytes from just before ``deepspeed.initialize`` to the end of the script, by a
  meter that listens to the allocator and knows nothing of plans. It starts once the model is in
  ZeRO's host partitions (``from_pretrained`` under ``HfDeepSpeedConfig`` puts it there), so that
  those do not count and whatever an engine allocates does.
- Stock's reloads: bytes of every partition that DeepSpeed fetches, forward by forward. Where the
  device is the CPU a fetch only gives the host partition another name; here it copies, as it does
  on a GPU, so that the meter sees it. That and the meter cost time: measure no time in such a run.
- ds_finepage's reloads: the engine's own counters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

USAGE = "usage: python -m ds_finepage.cli.instruments RESULT.json SCRIPT.py [ARGUMENT ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was counted in one run of a script that generates text.

    Attributes:
        peak_bytes: Most live device bytes at any time.
        prefill_reloaded_bytes: Bytes copied to the device in the first forward.
        decode_reloaded_bytes: Bytes copied to the device in the last forward.
        decode_lower_bound_bytes: The fewest that a steady decode step could reload under the
            budget; None for stock, which has none.
        budget_bytes: The budget; None for stock.
        weight_bytes: Bytes of all weights.
        num_unplanned: Graphs and modules that ran outside of any plan.
    """

    peak_bytes: int
    prefill_reloaded_bytes: int
    decode_reloaded_bytes: int
    decode_lower_bound_bytes: int | None
    budget_bytes: int | None
    weight_bytes: int
    num_unplanned: int


class FetchCounter:
    """Counts what stock DeepSpeed fetches, forward by forward."""

    def __init__(self) -> None:
        """Count nothing until :meth:`install`."""
        self.bytes_by_forward: list[int] = []

    def install(self) -> None:
        """Get between DeepSpeed and the one function that fetches on a single rank."""
        from deepspeed.runtime.zero import partition_parameters

        fetch: Callable[[list[Any]], Any] = partition_parameters._no_gather_coalesced

        def counted(params: Iterable[Any]) -> Any:
            params = list(params)
            handle = fetch(params)
            for param in params:
                if self.bytes_by_forward:  # before the first forward nothing is reloaded
                    self.bytes_by_forward[-1] += param.ds_tensor.nbytes
                if param.data.device == param.ds_tensor.device:
                    param.data = param.data.clone()
            return handle

        partition_parameters._no_gather_coalesced = counted

    def watch(self, module: Any) -> None:
        """Begin a new count with each forward of ``module``, before DeepSpeed's hooks fetch."""
        module.register_forward_pre_hook(lambda *_: self.bytes_by_forward.append(0), prepend=True)


def read(script: str, arguments: list[str]) -> Reading:
    """Run a script as ``__main__`` and count.

    Raises:
        ConfigError: There is no such script, or it made no DeepSpeed engine.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    import ds_finepage.run
    from ds_finepage.errors import ConfigError
    from ds_finepage.execution.meter import DeviceMeter

    meter = DeviceMeter(torch.device(get_accelerator().current_device_name()))
    fetches = FetchCounter()
    engines: list[Any] = []
    original = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        fetches.install()
        meter.__enter__()
        made = original(*args, **kwargs)
        engines.append(made[0])
        if handle_of(made[0]) is None:
            fetches.watch(made[0].module)
        return made

    deepspeed.initialize = initialize
    try:
        ds_finepage.run.main([script, *arguments])
    finally:
        deepspeed.initialize = original
    if not engines:
        raise ConfigError(f"{script} did not call deepspeed.initialize; there is nothing to count")
    meter.__exit__(None, None, None)
    return reading_of(engines[0], meter.peak_bytes, fetches.bytes_by_forward)


def handle_of(engine: Any) -> Any:
    """Return the engine's handle, None where it is stock DeepSpeed."""
    return getattr(engine.optimizer, "finepage", None)


def reading_of(engine: Any, peak_bytes: int, fetched_by_forward: list[int]) -> Reading:
    """Put together what was counted."""
    handle = handle_of(engine)
    if handle is None:
        return Reading(
            peak_bytes=peak_bytes,
            prefill_reloaded_bytes=fetched_by_forward[0],
            decode_reloaded_bytes=fetched_by_forward[-1],
            decode_lower_bound_bytes=None,
            budget_bytes=None,
            weight_bytes=sum(p.ds_tensor.nbytes for p in engine.module.parameters()),
            num_unplanned=0,
        )
    stats = handle.stats
    prefill, *_, decode = stats.passes
    return Reading(
        peak_bytes=peak_bytes,
        prefill_reloaded_bytes=prefill.last_reloaded_bytes,
        decode_reloaded_bytes=decode.last_reloaded_bytes,
        decode_lower_bound_bytes=decode.lower_bound_bytes,
        budget_bytes=stats.budget_bytes,
        weight_bytes=stats.weight_bytes,
        num_unplanned=stats.num_unplanned_graphs + stats.num_unplanned_modules,
    )


def main(arguments: list[str]) -> None:
    """Run, count and write the reading down."""
    if len(arguments) < 2:
        sys.exit(USAGE)
    result, script, *rest = arguments
    reading = read(script, rest)
    Path(result).write_text(json.dumps(asdict(reading)))


if __name__ == "__main__":
    main(sys.argv[1:])
