"""Whether tokens under a budget are those of plain transformers, family by family, on the CPU.

    python benchmarks/families.py --out benchmarks/families_2026-11-22

Tiny models of random weights generate greedily with their default cache, first by themselves, then
attached: with room for everything, where passes are captured, and at each budget, from the least
that the calls so far can run under to what they need with all weights resident. A cell is right if
its tokens are the same, its measured peak is within the budget and nothing ran without a plan. BERT
has no tokens: what it returns is compared bit by bit. Whisper's prompt is what is said already, the
sound is always the same. Exit status 1 if a cell is wrong, 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from ds_finepage.api import attach
from ds_finepage.cli.options import counts_of, names_of
from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.handle import Handle
from ds_finepage.units import format_bytes

PROMPTS = (5, 40, 200)
DTYPES = ("float32", "bfloat16")
BUDGETS = ("min", "50%", "100%")
NUM_TOKENS = 64
AMPLE_BYTES = 1 << 30
POOL_BYTES = 16 << 20

HIDDEN = 128
VOCAB = 256
POSITIONS = 512
WINDOW = 64  # the first two prompts grow beyond it, the last one starts there
AUDIO_POSITIONS = 50

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = {**_COMMON, "intermediate_size": 2 * HIDDEN}
_GROUPED: dict[str, Any] = {**_GATED, "num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2}
_GEMMA: dict[str, Any] = {
    **_GROUPED,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_TWO_HALVES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": WINDOW}),
    "mixtral": ("MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64},
    ),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", {**_COMMON, "n_positions": POSITIONS, "n_inner": 2 * HIDDEN}),
    "gpt_neox": ("GPTNeoXForCausalLM", _GATED),
    "opt": (
        "OPTForCausalLM",
        {**_COMMON, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN},
    ),
    "bloom": ("BloomForCausalLM", {**_COMMON, "n_head": 4, "n_layer": 2}),
    "falcon": ("FalconForCausalLM", {**_COMMON, "ffn_hidden_size": 2 * HIDDEN}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": HIDDEN // 4,
            "d_ff": 2 * HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {**_TWO_HALVES, "max_position_embeddings": POSITIONS, "forced_eos_token_id": None},
    ),
    "bert": ("BertForMaskedLM", _GATED),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_TWO_HALVES,
            "num_mel_bins": 80,
            "max_source_positions": AUDIO_POSITIONS,
            "max_target_positions": POSITIONS,
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One generation under one budget; None is what a failure left unmeasured.

    ``distinct`` counts the different tokens that plain transformers generates: where there are few,
    equality says little. ``fault`` says what is wrong, "" if nothing is.
    """

    family: str
    dtype: str
    prompt: int
    budget: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    distinct: int | None = None
    captures: int = 0
    unplanned: int = 0
    aside_runs: int = 0
    seconds: float = 0.0
    fault: str = ""


def make_model(family: str, dtype: str) -> Any:
    """Make a model; the same arguments give the same weights."""
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes)).eval()
    stir(model)
    model.to(getattr(torch, dtype))
    if model.can_generate():
        model.generation_config.pad_token_id = 0
    return model


def stir(model: torch.nn.Module) -> None:
    """Fill a model with weights under which it says many things.

    With those of transformers' initialization most families say one token for ever, which no wrong
    cache would change, and all biases are zero.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # biases and norms
                weight.add_(0.1 * torch.randn_like(weight))
            else:
                weight.normal_(0, 0.01 if id(weight) in tables else 8 / weight.shape[-1] ** 0.5)


def inputs_of(model: Any, length: int) -> dict[str, torch.Tensor]:
    """Return a prompt, none of which is padding, beside what else the model is given."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (1, length), generator=generator)
    if model.config.model_type != "whisper":
        return {"input_ids": ids}
    shape = (1, model.config.num_mel_bins, 2 * AUDIO_POSITIONS)
    features = torch.randn(shape, generator=generator).to(model.dtype)
    return {"input_features": features, "decoder_input_ids": ids}


def run_model(model: Any, inputs: dict[str, torch.Tensor], num_tokens: int, **settings: Any) -> Any:
    """Generate greedily, always as many tokens; BERT's logits, for which there is no generation."""
    with torch.no_grad(), warnings.catch_warnings():
        # What Dynamo says of transformers' own code, once for each capture.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
        if not model.can_generate():
            return model(**inputs).logits
        return model.generate(
            **inputs,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            **settings,
        )


def measure_family(family: str, dtype: str, prompts: list[int], num_tokens: int) -> Iterator[Cell]:
    """Run all cells of a model, with one handle for all of them."""
    torch._dynamo.reset()
    gc.collect()
    model = make_model(family, dtype)
    plain = {length: run_model(model, inputs_of(model, length), num_tokens) for length in prompts}
    handle = attach(model, device_budget=AMPLE_BYTES, device="cpu")
    handle._memory._pool.reserve(POOL_BYTES)  # host memory: kept out of the meter's sight
    try:
        # The shortest first: the least budget is that of the calls so far.
        for length in sorted(prompts):
            for budget in ("ample", *BUDGETS):
                cell = Cell(family=family, dtype=dtype, prompt=length, budget=budget)
                yield measure(handle, model, cell, plain[length], num_tokens)
    finally:
        handle.detach()


def measure(handle: Handle, model: Any, cell: Cell, plain: torch.Tensor, num_tokens: int) -> Cell:
    """Run one cell."""
    stats = handle.stats
    least, needed = stats.min_budget_bytes, stats.needed_budget_bytes
    shares = {"ample": AMPLE_BYTES, "min": least, "50%": max(least, needed // 2), "100%": needed}
    budget_bytes = shares[cell.budget]
    handle.replan(budget_bytes=budget_bytes)
    before = (stats.num_captures, stats.num_resident_runs, num_unplanned(handle))
    inputs = inputs_of(model, cell.prompt)  # the caller's: not in the meter's sight
    start, seconds, fault = time.perf_counter(), 0.0, ""
    meter = DeviceMeter(torch.device("cpu"))
    try:
        with meter:
            found = run_model(model, inputs, num_tokens)
        seconds = time.perf_counter() - start
        if not torch.equal(found, plain):
            fault = first_difference(model, cell, num_tokens)
    except Exception as error:  # whatever it is, the other cells are run
        fault = f"{type(error).__name__}: {error}"
    unplanned = num_unplanned(handle) - before[2]
    if not fault and meter.peak_bytes > budget_bytes:
        fault = f"peak {meter.peak_bytes} bytes, budget {budget_bytes} bytes"
    elif not fault and unplanned:
        fault = f"{unplanned} runs without a plan: {'; '.join(set(handle.stats.unplanned_reasons))}"
    return Cell(
        family=cell.family,
        dtype=cell.dtype,
        prompt=cell.prompt,
        budget=cell.budget,
        budget_bytes=budget_bytes,
        peak_bytes=meter.peak_bytes,
        distinct=plain[0, -num_tokens:].unique().numel() if model.can_generate() else None,
        captures=handle.stats.num_captures - before[0],
        unplanned=unplanned,
        aside_runs=handle.stats.num_resident_runs - before[1],
        seconds=seconds,
        fault=fault,
    )


def num_unplanned(handle: Handle) -> int:
    """Count graphs and modules that ran without a plan so far."""
    return handle.stats.num_unplanned_graphs + handle.stats.num_unplanned_modules


def first_difference(model: Any, cell: Cell, num_tokens: int) -> str:
    """Say where tokens part, and where and by how much the logits behind them do."""
    if not model.can_generate():
        return "another result"
    inputs = inputs_of(model, cell.prompt)
    settings = {"output_logits": True, "return_dict_in_generate": True}
    found = run_model(model, inputs, num_tokens, **settings)
    other = make_model(cell.family, cell.dtype)  # the same weights, and nothing attached
    plain = run_model(other, inputs, num_tokens, **settings)
    parted = (found.sequences != plain.sequences).nonzero()
    at = parted[0, 1].item() - plain.sequences.shape[1] + num_tokens if len(parted) else "none"
    for step, (a, b) in enumerate(zip(found.logits, plain.logits, strict=True)):
        if not torch.equal(a, b):
            apart = (a.double() - b.double()).abs().max().item()
            return f"first other token: {at}; logits of step {step} differ by {apart:.2e}"
    return f"first other token: {at}; the logits of a second run are the same"


def rows(cells: list[Cell]) -> Iterator[list[str]]:
    """Yield a row of text for each model and prompt; its budgets side by side."""
    grouped: dict[tuple[str, str, int], dict[str, Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.family, cell.dtype, cell.prompt), {})[cell.budget] = cell
    for (family, dtype, prompt), by_budget in grouped.items():
        found = list(by_budget.values())
        distinct = found[0].distinct
        yield [
            family,
            dtype,
            str(prompt),
            "-" if distinct is None else str(distinct),
            str(sum(cell.captures for cell in found)),
            str(sum(cell.unplanned for cell in found)),
            *(text_of(by_budget[budget]) for budget in ("ample", *BUDGETS)),
        ]


HEADINGS = ("family", "dtype", "prompt", "distinct", "captures", "unplanned", "ample", *BUDGETS)


def text_of(cell: Cell) -> str:
    """Say what became of a cell, and which share of its budget it took."""
    if cell.fault:
        return "WRONG"
    if cell.budget == "ample":
        return "same"
    assert cell.peak_bytes is not None and cell.budget_bytes is not None
    return f"same, {cell.peak_bytes / cell.budget_bytes:.0%} of {format_bytes(cell.budget_bytes)}"


def summary(cells: list[Cell], num_tokens: int) -> str:
    """Return the outcome in one sentence or two."""
    wrong = sum(bool(cell.fault) for cell in cells)
    models = len({(cell.family, cell.dtype) for cell in cells})
    seconds = sum(cell.seconds for cell in cells)
    return (
        f"{len(cells) - wrong} of {len(cells)} cells are right, {wrong} wrong: {models} models, "
        f"{num_tokens} new tokens each, {seconds / 60:.0f} minutes in the attached models."
    )


def hardware() -> str:
    """Name the processor in one line."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def document(cells: list[Cell], num_tokens: int) -> dict[str, Any]:
    """Return what the report holds: the cells, and what it takes to make them again."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "num_tokens": num_tokens,
        "summary": summary(cells, num_tokens),
        "cells": [asdict(cell) for cell in cells],
    }


def markdown(cells: list[Cell], facts: dict[str, Any]) -> str:
    """Write the report for people."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        f"# Tokens under a budget beside those of plain transformers, {facts['date']}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['summary']} {facts['hardware']}; {versions}.",
        "",
        'Tiny models of random weights, greedy, default cache. "same": the tokens are those of '
        "plain transformers, the measured peak is within the budget (its share is given) and "
        'nothing ran without a plan. "distinct": different tokens among the new ones. "min": the '
        "least budget under which the calls so far can run; 100%: what they need with all weights "
        "resident.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---" * len(HEADINGS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows(cells)),
    ]
    faults = list(fault_lines(cells))
    return "\n".join([*lines, *(["", "Wrong:", ""] if faults else []), *faults]) + "\n"


def fault_lines(cells: list[Cell]) -> Iterator[str]:
    """Yield a line for each cell that is wrong."""
    for cell in cells:
        if cell.fault:
            fault = " ".join(cell.fault.split())
            yield f"- {cell.family} {cell.dtype}, prompt {cell.prompt}, {cell.budget}: {fault}"


def write_report(out: Path, cells: list[Cell], num_tokens: int) -> None:
    """Write both files."""
    facts = document(cells, num_tokens)
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    Path(f"{out}.md").write_text(markdown(cells, facts), encoding="utf-8")


def chosen(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    """Read a list of names, all of which have to be known.

    Raises:
        ConfigError: One is not.
    """
    names = names_of(text, option)
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: unknown {name!r}. {did_you_mean(name, known)}")
    return names


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the options; lists come out as lists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="LIST")
    parser.add_argument("--dtypes", default=",".join(DTYPES), metavar="LIST")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), metavar="LIST")
    parser.add_argument("--tokens", default=NUM_TOKENS, type=int, metavar="NUMBER")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    found = parser.parse_args(words)
    try:
        found.families = chosen(found.families, "--families", tuple(FAMILIES))
        found.dtypes = chosen(found.dtypes, "--dtypes", DTYPES)
        found.prompts = counts_of(found.prompts, "--prompts")
        if not 1 <= found.tokens <= POSITIONS - max(found.prompts) - 1:
            raise ConfigError(
                f"--tokens: {found.tokens} behind a prompt of {max(found.prompts)} tokens; the "
                f"models have {POSITIONS} positions, and one is the start's."
            )
    except ConfigError as error:
        parser.error(str(error))
    return found


def main(words: list[str] | None = None) -> int:
    """Run all cells; exit status 1 if one is wrong."""
    options = parse(words)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # it warns of every length that is given twice
    cells: list[Cell] = []
    for family in options.families:
        for dtype in options.dtypes:
            for cell in measure_family(family, dtype, options.prompts, options.tokens):
                cells.append(cell)
                print(f"\r{len(cells)} cells, {family} {dtype}", end="   ", file=sys.stderr)
            if options.out is not None:  # so that an interruption loses nothing
                write_report(options.out, cells, options.tokens)
    print(file=sys.stderr)
    table = Table(*HEADINGS)
    for row in rows(cells):
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    for line in fault_lines(cells):
        print(line)
    print(summary(cells, options.tokens))
    return 1 if any(cell.fault for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
