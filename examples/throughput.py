"""Run a list of prompts in the batches that make most tokens a second under the budget.

    python examples/throughput.py --model PATH --prompts FILE --out FILE \
        --deepspeed_config configs/finepage_cpu.json

FILE has a prompt in each line. The longest prompts run first, so that a batch without room is
found at the start. A result is written as soon as it is done, as a line of JSON. The same command
goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

import ds_finepage
from ds_finepage.run import prepare_one_process


def main() -> None:
    """Load, generate batch by batch, write each result."""
    args = parse_arguments()
    prompts = args.prompts.read_text().splitlines()
    done = {json.loads(line)["line"] for line in lines_of(args.out)}
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:  # padding is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    lengths = {n: len(tokenizer(text)["input_ids"]) for n, text in enumerate(prompts)}
    waiting = sorted((n for n in lengths if n not in done), key=lambda n: -lengths[n])
    if not waiting:
        print(f"all {len(prompts)} prompts are in {args.out}")
        return

    engine = start(args)
    start_s, num_tokens = time.perf_counter(), 0
    with args.out.open("a") as out:
        size = Size(engine, lengths, args.new_tokens)
        while waiting:
            batch = waiting[: size.for_prompts(waiting)]
            try:
                texts = generate(engine, tokenizer, [prompts[n] for n in batch], args.new_tokens)
            except ds_finepage.PlanInfeasibleError:
                if len(batch) == 1:
                    raise
                size.shrink(
                    len(batch)
                )  # nothing has run: the mask of padded prompts needs room too
                continue
            waiting = waiting[len(batch) :]
            for n, text in zip(batch, texts, strict=True):
                out.write(json.dumps({"line": n, "prompt": prompts[n], "text": text}) + "\n")
            out.flush()
            done.update(batch)
            num_tokens += len(batch) * args.new_tokens
            speed = num_tokens / (time.perf_counter() - start_s)
            print(f"{len(done)} of {len(prompts)} prompts, {speed:.1f} tokens/s", flush=True)


def lines_of(path: Path) -> list[str]:
    """Return the whole lines of a file; one that an interrupt has cut is dropped from it."""
    if not path.exists():
        return []
    found = path.read_text()
    whole = found[: found.rfind("\n") + 1]
    if whole != found:
        path.write_text(whole)
    return whole.splitlines()


class Size:
    """The batch for the prompts that wait, longest first.

    It is found again when they have become half as long.
    """

    def __init__(self, engine: Any, lengths: dict[int, int], new_tokens: int) -> None:
        self._engine, self._lengths, self._new_tokens = engine, lengths, new_tokens
        self._size, self._longest = 0, 0

    def for_prompts(self, waiting: list[int]) -> int:
        """Return how many of the prompts run together."""
        longest = max(1, self._lengths[waiting[0]])
        if not self._size or 2 * longest <= self._longest:
            found = ds_finepage.best_batch(
                self._engine, longest, self._new_tokens, most=len(waiting)
            )
            self._size, self._longest = found.batch, longest
            print(f"prompts of up to {longest} tokens: batches of {self._size}", flush=True)
        return self._size

    def shrink(self, refused: int) -> None:
        """Take a part less than a batch that was refused."""
        self._size = refused - -(-refused // 8)
        print(f"no room for padding: batches of {self._size}", flush=True)


def generate(engine: Any, tokenizer: Any, prompts: list[str], new_tokens: int) -> list[str]:
    """Return what the model adds to each prompt."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(engine.device)
    with torch.no_grad():
        ids = engine.module.generate(
            **inputs,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    new_ids = ids[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new_ids, skip_special_tokens=True)


def start(args: argparse.Namespace) -> Any:
    """Load the model into an engine that runs by plan."""
    prepare_one_process()
    ds_config = json.loads(Path(args.deepspeed_config).read_text())
    keep_alive = HfDeepSpeedConfig(ds_config)  # from_pretrained loads into ZeRO's partitions
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    del keep_alive
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    ds_finepage.assert_active(engine)
    return engine


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a transformers checkpoint")
    parser.add_argument("--prompts", required=True, type=Path, help="a prompt in each line")
    parser.add_argument("--out", required=True, type=Path, help="gets a line of JSON for each")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args()


if __name__ == "__main__":
    main()
