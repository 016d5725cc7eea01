"""Both engines side by side on one random model, under budgets of parts of its weights.

    python benchmarks/day_engines.py --model 7B --device cuda

Plain transformers first, where the model fits: its tokens are the right ones. Then ds_finepage by
``attach``, under one budget after another. Then DeepSpeed takes the same weights into its
partitions, for ds_finepage under DeepSpeed and for stock ZeRO-Inference: as it is by default, with
the least prefetch, and with as many weights kept on the device as each budget has room for.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from day_common import (
    DTYPE,
    SHAPES,
    device_of,
    generate,
    generate_often,
    make_llama,
    parser_of,
    reason_of,
    report,
    synchronize,
    weight_bytes_of,
)

import ds_finepage
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.planning.pipeline import Planned
from ds_finepage.run import prepare_one_process
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.plan_runner import PlanRunner

PERCENTS, TINY_PERCENTS = (50, 25, 90, 100), (50, 100)
"""Budgets, the most telling one first: time may end before the list."""

PROMPT_TOKENS, NEW_TOKENS = 512, 5
TINY_PROMPT_TOKENS = 24
MOST_SECONDS_A_RUN = 20
OURS, STOCK = "ds_finepage", "stock ZeRO-Inference"
ALL_WEIGHTS = 10**12
"""More elements than a model has: DeepSpeed may keep parameters of any size."""

Cells = dict[str, Any]


class Day:
    """The runs of one model.

    Attributes:
        expected: The tokens of the first run, which all others must have.
    """

    def __init__(self, name: str, device: torch.device, until: float) -> None:
        """Make the model.

        Args:
            name: A key of ``SHAPES``.
            device: Where to run.
            until: The time of ``time.perf_counter`` after which nothing new begins.
        """
        self.name, self.device, self.until = name, device, until
        start = time.perf_counter()
        self.model = make_llama(SHAPES[name], device)
        synchronize(device)
        self.weight_bytes = weight_bytes_of(self.model)
        length = TINY_PROMPT_TOKENS if name == "tiny" else PROMPT_TOKENS
        generator = torch.Generator().manual_seed(1)
        vocab = SHAPES[name]["vocab_size"]
        self.ids = torch.randint(3, vocab, (1, length), generator=generator)
        self.expected: torch.Tensor | None = None
        report(
            "models",
            model=name,
            weights_bytes=self.weight_bytes,
            dtype=str(DTYPE).removeprefix("torch."),
            prompt_tokens=length,
            new_tokens=NEW_TOKENS,
            made_s=time.perf_counter() - start,
        )

    @property
    def percents(self) -> tuple[int, ...]:
        """The budgets, as parts of the weights."""
        return TINY_PERCENTS if self.name == "tiny" else PERCENTS

    def budget_bytes(self, percent: int) -> int:
        """Return a budget that is a part of the weights."""
        return self.weight_bytes * percent // 100

    @contextmanager
    def arm(self, engine: str, budget: str) -> Iterator[Cells]:
        """Collect the cells of one run; an error becomes a cell, and the next run begins.

        Args:
            engine: Its name in the report.
            budget: The budget in words.
        """
        cells: Cells = {"model": self.name, "engine": engine, "budget": budget}
        start = time.perf_counter()
        try:
            if start > self.until:
                raise TimeoutError("no time is left")
            yield cells
        except Exception as error:
            cells["remark"] = reason_of(error)
        cells["took_s"] = time.perf_counter() - start
        report("engines", **cells)

    def run(self, model: Any, device: torch.device, cells: Cells, budget_bytes: int | None) -> int:
        """Generate; note times, the peak, and whether the tokens are right.

        Args:
            model: The model, as its engine runs it.
            device: Where the engine wants the prompt.
            cells: Take the figures.
            budget_bytes: The budget; None where there is none.

        Returns:
            Most device bytes at any time, beyond those at the start.
        """
        until = min(self.until, time.perf_counter() + MOST_SECONDS_A_RUN)
        with DeviceMeter(device) as meter:
            found = generate_often(model, self.ids.to(device), NEW_TOKENS, until=until)
        if self.expected is None:
            self.expected = found.tokens
        cells["tokens_equal"] = torch.equal(found.tokens, self.expected)
        cells["prefill_ms"] = statistics.median(found.prefill_s) * 1e3
        cells["ms_a_token"] = statistics.median(found.step_s) * 1e3
        cells["calls"] = len(found.prefill_s)
        cells["peak_bytes"] = meter.peak_bytes
        if budget_bytes is not None:
            cells["within_budget"] = meter.peak_bytes <= budget_bytes
        return meter.peak_bytes

    # Plain.

    def plain(self) -> None:
        """Run plain transformers, where the model is on the device."""
        with self.arm("plain transformers", "none") as cells:
            if next(self.model.parameters()).device.type != self.device.type:
                raise MemoryError("the model does not fit")
            cells["peak_bytes"] = self.run(self.model, self.device, cells, None)
            cells["peak_bytes"] += self.weight_bytes

    # ds_finepage.

    def attached(self) -> None:
        """Run ds_finepage by ``attach`` under every budget."""
        handle: Handle | None = None
        for percent in self.percents:
            with self.arm(OURS, f"{percent}%") as cells:
                budget_bytes = self.budget_bytes(percent)
                if handle is None:
                    handle = ds_finepage.attach(
                        self.model, device_budget=budget_bytes, device=self.device
                    )
                handle.replan(budget_bytes=budget_bytes)
                self.by_plan(handle, self.model, self.device, cells)
        if handle is not None:
            handle.detach()

    def by_plan(self, handle: Handle, model: Any, device: torch.device, cells: Cells) -> None:
        """Run a model by plan under the budget of its handle, and note all figures of the plan."""
        self.run(model, device, cells, handle.stats.budget_bytes)
        if len(handle.stats.passes) < 2:
            raise RuntimeError(f"ran without a plan: {'; '.join(handle.stats.unplanned_reasons)}")
        measured = pass_times(model, self.ids.to(device), device)
        table = handle._runner.table.passes
        for name, found in (("prefill", table[0]), ("step", table[-1])):
            counted, measured_s = found.stats(), measured[name]
            cells[f"{name}_h2d_bytes"] = counted.last_reloaded_bytes
            assert found.memgraph is not None
            planned = Planned(found.graph, found.memgraph, handle._runner.settings.planning)
            predicted_s, bound_s = planned.timeline.total_ns / 1e9, planned.lower_bound_ns / 1e9
            report(
                "plans",
                **{key: cells[key] for key in ("model", "engine", "budget")},
                part=name,
                tasks=counted.num_tasks,
                h2d_bytes=counted.last_reloaded_bytes,
                h2d_over_bound=ratio(counted.last_reloaded_bytes, counted.lower_bound_bytes),
                measured_ms=measured_s * 1e3,
                predicted_ms=predicted_s * 1e3,
                prediction_error=predicted_s / measured_s - 1,
                bound_ms=bound_s * 1e3,
                over_bound=ratio(measured_s, bound_s),
                link_over_probe=counted.last_reloaded_bytes
                / measured_s
                / handle.profile.h2d_bytes_per_s,
            )

    # DeepSpeed.

    def under_deepspeed(self) -> None:
        """Run ds_finepage under DeepSpeed, and then stock."""
        with self.arm("DeepSpeed takes the weights", "") as cells:
            where = self.partition()
            if where.type != self.device.type:
                cells["remark"] = f"DeepSpeed knows no such device and runs on the {where.type}"
        if not all(hasattr(p, "ds_tensor") for p in self.model.parameters()):
            return
        config = ds_config(self.device, is_tiny=self.name == "tiny")
        with self.arm(f"{OURS} under DeepSpeed", "50%") as cells:
            section = {"enabled": True, "device_budget": self.budget_bytes(50)}
            engine = initialized(self.model, {**config, "finepage": section})
            try:
                self.by_plan(ds_finepage.handle_of(engine), engine.module, where, cells)
            finally:
                engine.destroy()
        from ds_finepage.compare.zero_arms import counting_fetches

        fetches = ForwardCounter()
        fetches.watch(self.model)
        with counting_fetches(fetches.add):
            self.all_stock(config, fetches, where)

    def all_stock(self, config: Cells, fetches: ForwardCounter, where: torch.device) -> None:
        """Run stock ZeRO-Inference with its defaults, with the least prefetch, and tuned.

        Args:
            config: The ds_config.
            fetches: Counts the bytes that it fetches.
            where: DeepSpeed's device.
        """
        self.stock(config, fetches, where, "default", {})
        least = least_prefetch(self.model)
        least_bytes = self.stock(config, fetches, where, "least prefetch", least)
        for percent in self.percents if least_bytes else ():
            room = (self.budget_bytes(percent) - least_bytes) // DTYPE.itemsize
            kept = {
                "stage3_param_persistence_threshold": ALL_WEIGHTS,
                "stage3_model_persistence_threshold": max(0, room),
            }
            budget_bytes = self.budget_bytes(percent)
            self.stock(config, fetches, where, f"{percent}%", {**least, **kept}, budget_bytes)

    def partition(self) -> torch.device:
        """Let DeepSpeed take the weights into its partitions; return its device."""
        prepare_one_process()
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        where = torch.device(get_accelerator().current_device_name())
        deepspeed.init_distributed(verbose=False)
        config = ds_config(self.device, is_tiny=self.name == "tiny")
        deepspeed.zero.Init(module=self.model, config_dict_or_path=config, dtype=DTYPE)
        self.model.model.rotary_emb.to(where)
        return where

    def stock(
        self,
        config: Cells,
        fetches: ForwardCounter,
        where: torch.device,
        budget: str,
        zero: Cells,
        budget_bytes: int | None = None,
    ) -> int:
        """Run stock ZeRO-Inference; return its peak, 0 if it failed.

        Args:
            config: The ds_config.
            fetches: Counts the bytes that it fetches.
            where: DeepSpeed's device.
            budget: The budget in words.
            zero: More keys of ``zero_optimization``.
            budget_bytes: The budget; None where there is none.
        """
        peak_bytes = 0
        with self.arm(STOCK, budget) as cells:
            changed = {**config, "zero_optimization": {**config["zero_optimization"], **zero}}
            engine = initialized(self.model, changed)
            try:
                peak_bytes = self.run(engine.module, where, cells, budget_bytes)
            finally:
                engine.destroy()
                release(self.model)
            cells["prefill_h2d_bytes"] = fetches.prefill_bytes
            cells["step_h2d_bytes"] = fetches.decode_bytes
        return peak_bytes


class ForwardCounter:
    """Counts the bytes that stock DeepSpeed fetches in a forward.

    ``prefill_bytes`` and ``decode_bytes`` are those of the last forward of each kind.
    """

    prefill_bytes = decode_bytes = nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count the bytes of a fetch."""
        self.nbytes += nbytes

    def watch(self, module: Any) -> None:
        """Count anew with each forward of ``module``, before DeepSpeed's hooks fetch."""
        before = 0

        def begin(*_: Any) -> None:
            nonlocal before
            before = self.nbytes

        def end(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            input_ids = args[0] if args else kwargs["input_ids"]
            if input_ids.shape[-1] > 1:
                self.prefill_bytes = self.nbytes - before
            else:
                self.decode_bytes = self.nbytes - before

        module.register_forward_pre_hook(begin, prepend=True)
        module.register_forward_hook(end, with_kwargs=True)


def ratio(found: float, bound: float) -> float | None:
    """Return a figure over its bound; None where there is no bound."""
    return found / bound if bound else None


def pass_times(model: Any, ids: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Measure passes alone, without what ``generate`` does between them.

    Args:
        model: A model that runs by plan.
        ids: The prompt.
        device: Where it runs.

    Returns:
        The median seconds of a ``prefill`` and of a decode ``step``.
    """
    spent: list[float] = []
    run: Callable[..., Any] = PlanRunner.run

    def timed(*args: Any, **kwargs: Any) -> Any:
        synchronize(device)
        start = time.perf_counter()
        found = run(*args, **kwargs)
        synchronize(device)
        spent.append(time.perf_counter() - start)
        return found

    prefills, steps = [], []
    with mock.patch.object(PlanRunner, "run", timed):
        for _ in range(3):
            spent.clear()
            generate(model, ids, NEW_TOKENS)
            prefills.append(spent[0])
            steps += spent[2:]  # the first step follows another pass
    return {"prefill": statistics.median(prefills), "step": statistics.median(steps)}


def ds_config(device: torch.device, *, is_tiny: bool) -> Cells:
    """Return the ds_config that both engines have."""
    zero: Cells = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": device.type == "cuda"},
    }
    if is_tiny:
        zero["stage3_param_persistence_threshold"] = 0  # else every tiny weight stays
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def least_prefetch(model: Any) -> Cells:
    """Return keys for stock that hold few weights at once, and still prefetch the next one."""
    largest = max(p.ds_numel for p in model.parameters())
    return {
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": 2 * largest,
        "stage3_max_reuse_distance": 0,
    }


def initialized(model: Any, config: Cells) -> Any:
    """Return an engine for a model whose parameters are ZeRO's partitions already."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.module.eval()
    return engine


def release(model: Any) -> None:
    """Take back what an engine kept on the device, so that the next one starts from partitions."""
    from ds_finepage._compat.deepspeed import ZeroParamStatus

    for weight in model.parameters():
        weight.ds_active_sub_modules.clear()
        if weight.ds_status == ZeroParamStatus.AVAILABLE:
            weight.partition()
        weight.ds_persist = False


def main() -> None:
    """Run all engines."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.seconds
    day = Day(arguments.model, device_of(arguments), until)
    day.plain()
    day.attached()
    gc.collect()
    day.under_deepspeed()


if __name__ == "__main__":
    main()
