"""What assisted generation gains where weights are missing on the device, on the CPU.

    python benchmarks/drafts.py --out benchmarks/drafts_DATE.jsonl

It trains a small Llama on the project's own code and pages, some nine minutes on two cores, and a
smaller one as its draft. ``--folder`` keeps both. Prompts are of files that no training sees. Each
kind of draft generates greedily under each budget, after some prompts that are not counted.

A budget is a share of the target's weights, and holds the draft too. Bytes and seconds are those of
whole generations over the new tokens. The CPU copies within its own memory, which no link does. So
a pass lasts at least as long as its bytes take at ``--rate``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, logging

from ds_finepage import api
from ds_finepage.cli.options import counts_of
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.execution.executor import Executor
from ds_finepage.integrations.transformers.price import Price
from ds_finepage.units import format_bytes, parse_bytes

ROOT = Path(__file__).parents[1]
SOURCES = ("ds_finepage", "tests", "benchmarks", "examples", "docs")
VOCABULARY, PROMPT, NEW, MOST_PROMPTS, DRAFTED = 1024, 200, 64, 200, 8
HELD_OUT, BATCH, LENGTH = 12, 4, 272  # of training: one file in so many, sequences, their tokens
SHAPES = {"target": (256, 576, 8, 800), "draft": (128, 256, 2, 1000)}
"""Hidden and intermediate size, layers, and steps of training."""

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "prompt lookup": ({}, {"prompt_lookup_num_tokens": DRAFTED}),
    "smaller model": ({}, {"assistant_model": "draft"}),
    "stand-in int8": ({"draft": "stand-in", "weights_group": 16}, {}),
    "stand-in int4": ({"draft": "stand-in", "weights_group": 16}, {}),
}
"""Kinds of drafts: settings of ``attach``, and arguments of ``generate``."""


def train(name: str, windows: torch.Tensor) -> Any:
    """Train one of the models, which knows no last token."""
    hidden, intermediate, layers, steps = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=512, hidden_size=hidden,
        intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    others = dict(model.named_parameters())
    matrices = [others.pop(n) for n, p in list(others.items()) if p.ndim == 2 and "layers" in n]
    optimizers: dict[torch.optim.Optimizer, float] = {
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"): 5e-3,
        torch.optim.AdamW(others.values(), betas=(0.9, 0.95), weight_decay=0.1): 2e-3,
    }
    order = torch.randperm(len(windows)).repeat(1 + steps * BATCH // len(windows))
    for step, chosen in enumerate(order.split(BATCH)[:steps]):
        with torch.autocast("cpu", torch.bfloat16):  # the weights stay in float32
            loss = model(rows := windows[chosen], labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each, rate in optimizers.items():
            each.param_groups[0]["lr"] = rate * min((step + 1) / 40, 2.05 * (1 - step / steps), 1)
            each.step()
            each.zero_grad()
        if step % 100 == 99:
            print(f"{name}: step {step + 1} of {steps}, loss {loss.item():.2f}", file=sys.stderr)
    return model


def make(folder: Path) -> None:
    """Train what the folder lacks: tokenizer, prompts, models."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [p for s in SOURCES for p in (ROOT / s).rglob("*") if p.suffix in (".py", ".md")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(paths)]
    trained_on = [text for i, text in enumerate(texts) if i % HELD_OUT]
    if not (path := folder / "tokenizer.json").exists():
        tokenizer: Any = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(trained_on, VOCABULARY, show_progress=False)
        tokenizer.save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    if not (path := folder / "prompts.json").exists():
        files = [tokenizer.encode(text).ids for text in texts[::HELD_OUT]]
        spans = [f[i : i + PROMPT] for f in files for i in range(0, len(f) - PROMPT, PROMPT)]
        path.write_text(json.dumps(spans[::2][:MOST_PROMPTS]))
    tokens = torch.tensor([i for e in tokenizer.encode_batch(trained_on) for i in e.ids])
    for name in SHAPES:
        if not (folder / name).exists():
            train(name, tokens.unfold(0, LENGTH, LENGTH)).save_pretrained(folder / name)


def load(path: Path) -> Any:
    """Load a model. As an assistant it always drafts equally many tokens."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    model.generation_config.update(num_assistant_tokens=DRAFTED, **constant)
    return model


def note_passes(model: Any) -> list[int]:
    """Return a list that gets the number of input tokens of each later pass of ``generate``."""
    prepare, found = model.prepare_inputs_for_generation, []

    @functools.wraps(prepare)
    def prepared(*arguments: Any, **named: Any) -> Any:
        inputs = prepare(*arguments, **named)
        found.append(inputs["input_ids"].shape[1])
        return inputs

    model.prepare_inputs_for_generation = prepared
    return found


@contextmanager
def slow_copies(bytes_per_s: float) -> Iterator[None]:
    """Let each pass last at least as long as a link with this rate takes for its bytes."""
    run = Executor.run

    def slowed(executor: Executor, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = run(executor, *arguments)
        end = start + executor.counters.reloaded_bytes / bytes_per_s
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    Executor.run = slowed  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Executor.run = run  # type: ignore[method-assign]


def generate(model: Any, prompts: list[list[int]], given: dict[str, Any]) -> list[list[int]]:
    """Return the new tokens of greedy generations."""
    given = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True} | given
    return [model.generate(torch.tensor([p]), **given)[0, PROMPT:].tolist() for p in prompts]


def measure(
    name: str, percent: int, folder: Path, prompts: list[list[int]], bytes_per_s: float
) -> dict[str, Any]:
    """Measure a kind of draft under one budget."""
    torch._dynamo.reset()
    (settings, given), target = KINDS[name], load(folder / "target")
    budget_bytes = sum(p.nbytes for p in target.parameters()) * percent // 100
    if "assistant_model" in given:
        given = {"assistant_model": load(folder / given["assistant_model"])}
    expected = generate(target, prompts, {})
    api.STAND_IN_FORM = name.split()[-1]
    handle = api.attach(target, device_budget=budget_bytes, device="cpu", **settings)
    passes = note_passes(target)  # after a stand-in was made, which has methods of its own
    with patch.object(Price, "has_lost", False):  # at full speed no draft pays
        generate(target, prompts[:12], given)  # it makes nearly all plans
        with slow_copies(bytes_per_s):
            generate(target, prompts[:2], given)  # the price of a draft follows the times
    with slow_copies(bytes_per_s):
        passes.clear()
        before, start = handle.stats, time.perf_counter()
        found = generate(target, prompts, given)
        seconds, after = time.perf_counter() - start, handle.stats
    handle.detach()
    num_new, num_passes = sum(map(len, found)), len(passes)
    return {
        "budget_bytes": budget_bytes,
        "num_equal": sum(a == b for a, b in zip(found, expected, strict=True)),
        "tokens_a_pass": num_new / num_passes,
        # The first pass of a prompt reads it and the draft; each other one a known token more.
        "num_drafted": sum(passes) - num_passes - len(prompts) * (PROMPT - 1),
        "num_accepted": num_new - num_passes,
        "bytes_a_token": round((after.reloaded_bytes - before.reloaded_bytes) / num_new),
        "seconds_a_token": seconds / num_new,
        "num_plans_meanwhile": after.num_plans - before.num_plans,
        "num_unplanned": after.num_unplanned_graphs + after.num_unplanned_modules,
    }


def show(rows: list[dict[str, Any]], rate: str) -> None:
    """Print the table."""
    heads = ("budget", "draft", "equal", "tokens a pass", "drafted", "accepted")
    found = Table(*heads, "reloaded a token", f"ms a token at {rate}")
    for r in rows:
        cells = [r["error"]] if "error" in r else [
            f"{r['num_equal']} of {r['num_prompts']}", f"{r['tokens_a_pass']:.2f}",
            str(r["num_drafted"]), str(r["num_accepted"]), format_bytes(r["bytes_a_token"]),
            f"{r['seconds_a_token'] * 1e3:.1f}",
        ]  # fmt: skip
        found.add_row(f"{r['percent']}%", r["draft"], *cells)
    Console(width=120).print(found)


def main() -> int:
    """Train, measure, print, and write; exit status 1 if tokens differ or a kind did not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keeps models, tokenizer and prompts")
    parser.add_argument("--prompts", type=int, default=12, help=f"at most {MOST_PROMPTS}")
    parser.add_argument("--budgets", default="25,50,75", help="in percent of the target's weights")
    parser.add_argument("--rate", default="20MB/s", help="of copies")
    parser.add_argument("--out", "--output", type=Path, metavar="FILE", help="write JSON lines")
    options = parser.parse_args()
    rate = parse_bytes(options.rate.removesuffix("/s"), name="--rate")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        make(folder := options.folder or Path(made))
        torch.set_num_threads(1)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        kept = json.loads((folder / "prompts.json").read_text())
        prompts = kept[:: max(1, len(kept) // options.prompts)][: options.prompts]
        for percent in counts_of(options.budgets, "--budgets"):
            for name in KINDS:
                rows.append({"percent": percent, "draft": name, "num_prompts": len(prompts)})
                try:
                    rows[-1] |= measure(name, percent, folder, prompts, rate)
                except (ConfigError, PlanInfeasibleError) as error:
                    rows[-1]["error"] = str(error)
    show(rows, options.rate)
    if options.out is not None:
        facts = {
            "command": shlex.join(["python", "benchmarks/drafts.py", *sys.argv[1:]]),
            "machine": f"{os.uname().machine} with {os.cpu_count()} cores, 1 thread",
            **{name: version(name) for name in ("torch", "transformers")},
        }
        options.out.write_text("".join(json.dumps(line) + "\n" for line in (facts, *rows)))
    return int(any(row.get("num_equal") != row["num_prompts"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
