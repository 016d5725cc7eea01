"""Runs a DeepSpeed script and counts the device bytes and the copies of its engine.

    python -m ds_finepage.cli.instruments RESULT.json SCRIPT.py [ARGUMENT ...]

The script runs unchanged; the counts go to RESULT.json. Three counters serve stock ZeRO-Inference
and ds_finepage:

- Peak: live device bytes from just before ``deepspeed.initialize`` to the end of the script. A
  meter reads them from the allocator; it knows nothing of plans. The model is in ZeRO's partitions
  by then (``from_pretrained`` under ``HfDeepSpeedConfig`` puts it there), so they do not count. On
  several ranks ``deepspeed.initialize`` itself makes the partitions. On the CPU they would count as
  device bytes, so the meter begins after it there.
- Stock's reloads: bytes of every partition that DeepSpeed fetches, forward by forward. A prefill is
  a forward of several tokens, a decode step a forward of one token. On the CPU a fetch only gives
  the host partition another name. Here it copies, as on a GPU, so that the meter sees it. The copy
  and the meter take time, so measure no time in such a run.
- ds_finepage's reloads: the engine's own counters.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_finepage.compare.counting import FetchCounter
from ds_finepage.errors import ConfigError, FinepageError

USAGE = "usage: python -m ds_finepage.cli.instruments RESULT.json SCRIPT.py [ARGUMENT ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The counts of one run of a script that generates text.

    Attributes:
        peak_bytes: Most live device bytes at any time.
        prefill_reloaded_bytes: Bytes copied to the device in the last prefill.
        decode_reloaded_bytes: Bytes copied to the device in the last decode step.
        prefill_lower_bound_bytes: The fewest bytes that a prefill could reload under the budget;
            None for stock, which has no budget.
        decode_lower_bound_bytes: The same for a decode step.
        budget_bytes: The budget; None for stock.
        weight_bytes: Bytes of all weights.
    """

    peak_bytes: int
    prefill_reloaded_bytes: int
    decode_reloaded_bytes: int
    prefill_lower_bound_bytes: int | None = None
    decode_lower_bound_bytes: int | None = None
    budget_bytes: int | None = None
    weight_bytes: int


def read(script: str, arguments: list[str]) -> Reading:
    """Run a script as ``__main__`` and count.

    Raises:
        ConfigError: There is no such script, or it made no DeepSpeed engine.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    import ds_finepage.run
    from ds_finepage.execution.meter import DeviceMeter

    ds_finepage.run.use_device_of_rank()
    device = torch.device(get_accelerator().current_device_name())
    meter = DeviceMeter(device)
    is_late = ds_finepage.run.makes_partitions_late(device.type)
    fetches = FetchCounter()
    engines: list[Any] = []
    original = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        fetches.install()
        made = original(*args, **kwargs) if is_late else None
        metered.enter_context(meter)
        made = made or original(*args, **kwargs)
        engines.append(made[0])
        if handle_of(made[0]) is None:
            fetches.watch(made[0].module)
        return made

    # Python crashes at its exit if the script fails and the meter stays on.
    with ExitStack() as metered:
        metered.callback(setattr, deepspeed, "initialize", original)
        deepspeed.initialize = initialize
        ds_finepage.run.main([script, *arguments])
    if not engines:
        raise ConfigError(f"{script} did not call deepspeed.initialize; there is nothing to count")
    return reading_of(engines[0], meter.peak_bytes, fetches)


def handle_of(engine: Any) -> Any:
    """Return the engine's handle; None for stock DeepSpeed."""
    return getattr(engine.optimizer, "finepage", None)


def reading_of(engine: Any, peak_bytes: int, fetches: FetchCounter) -> Reading:
    """Return the counts of a run.

    Args:
        engine: The script's engine.
        peak_bytes: Most live device bytes at any time.
        fetches: The counter of stock fetches.

    Raises:
        FinepageError: Prefill or decode had no plan.
    """
    handle = handle_of(engine)
    if handle is None:
        return Reading(
            peak_bytes=peak_bytes,
            prefill_reloaded_bytes=fetches.prefill_bytes,
            decode_reloaded_bytes=fetches.decode_bytes,
            weight_bytes=sum(p.ds_tensor.nbytes for p in engine.module.parameters()),
        )
    stats = handle.stats
    if len(stats.passes) < 2:
        raise FinepageError(f"ran without a plan: {'; '.join(stats.unplanned_reasons)}")
    prefill, *_, decode = stats.passes
    return Reading(
        peak_bytes=peak_bytes,
        prefill_reloaded_bytes=prefill.last_reloaded_bytes,
        decode_reloaded_bytes=decode.last_reloaded_bytes,
        prefill_lower_bound_bytes=prefill.lower_bound_bytes,
        decode_lower_bound_bytes=decode.lower_bound_bytes,
        budget_bytes=stats.budget_bytes,
        weight_bytes=stats.weight_bytes,
    )


def main(arguments: list[str]) -> None:
    """Run a script, count, and write the reading."""
    if len(arguments) < 2:
        sys.exit(USAGE)
    result, script, *rest = arguments
    reading = read(script, rest)
    Path(result).write_text(json.dumps(asdict(reading)))


if __name__ == "__main__":
    main(sys.argv[1:])
