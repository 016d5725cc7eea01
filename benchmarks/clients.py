"""What one client gets of an endpoint, and eight: in turns, by shared passes, without us.

    python benchmarks/clients.py --folder F

Makes a Llama of 106 MiB in the folder, with a tokenizer that is trained on README.md, and serves it
by ``ds-finepage serve`` in turns, with ``--continuous-batching``, and by ``transformers serve
--continuous-batching`` without a budget. Each is asked by one client and by eight, who complete
parts of README.md (3 to 60 words, 48 new tokens, greedy, a third of them as streams). The first
round warms up. Whether all answers are equal is counted.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = Path(__file__).parents[1] / "README.md"
NEW, EACH, CLIENTS, ROUNDS = 48, 6, (1, 8), (0, 1)
BLOCKS = ("--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "256")
SHARED = "--continuous-batching"


def make_model(folder: Path) -> None:
    """Save a model of random weights with a tokenizer."""
    trained = ByteLevelBPETokenizer()
    trained.train([str(TEXT)], vocab_size=4096, special_tokens=["<s>", "</s>"])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, **heads, vocab_size=4096, max_position_embeddings=2048)
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def endpoint(*command: str) -> Iterator[str]:
    """Run an endpoint, and yield its address once it answers."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--port", str(port)], **quiet) as process:
        url = f"http://localhost:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=100) as client:
            client.models.list()
        yield url
        process.send_signal(signal.SIGTERM)


def complete(url: str, model: str, seed: int) -> list[str]:
    """Return the answers to one client."""
    words, draw, answers = TEXT.read_text().split(), random.Random(seed), []
    given: dict[str, Any] = {"model": model, "max_tokens": NEW, "temperature": 0}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(EACH):
            length = draw.randint(3, 60)
            begin = draw.randrange(len(words) - length)
            prompt = " ".join(words[begin : begin + length])
            if draw.random() < 1 / 3:
                chunks = client.completions.create(prompt=prompt, stream=True, **given)
                answers.append("".join(c.choices[0].text for c in chunks if c.choices))
            else:
                found = client.completions.create(prompt=prompt, **given)
                answers.append(found.choices[0].text)
    return answers


def measure(model: str, *command: str) -> tuple[list[float], list[list[str]]]:
    """Return tokens a second of each number of clients, in the last round, and all answers."""
    answers = []
    with endpoint(*command) as url:
        for turn in ROUNDS:
            speeds = []
            for count in CLIENTS:
                seeds = [100 * turn + 10 * count + n for n in range(count)]
                start = time.perf_counter()
                with ThreadPoolExecutor(count) as pool:
                    answers += list(pool.map(lambda seed: complete(url, model, seed), seeds))
                speeds.append(count * EACH * NEW / (time.perf_counter() - start))
    return speeds, answers


def main() -> None:
    """Print a line for each endpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget", default="70%weights")
    options = parser.parse_args()
    model = str(options.folder / "model")
    make_model(Path(model))
    ours = ("ds-finepage", "serve", model, "--device-budget", options.budget)
    ways = {
        "ours, in turns": ours,
        "ours, shared passes": (*ours, SHARED),
        "transformers, shared passes": ("transformers", "serve", model, SHARED, *BLOCKS),
    }
    table = Table(
        "endpoint", *(f"clients: {n}, tokens/s" for n in CLIENTS), "ratio", "equal answers"
    )
    first: list[str] = []
    for name, command in ways.items():
        speeds, answers = measure(model, *command)
        all_answers = [answer for each in answers for answer in each]
        first = first or all_answers
        equal = sum(a == b for a, b in zip(first, all_answers, strict=True))
        shown = (*(f"{speed:.1f}" for speed in speeds), f"{speeds[-1] / speeds[0]:.2f}")
        table.add_row(name, *shown, f"{equal} of {len(first)}")
        print(f"{name} is measured", file=sys.stderr)
    Console().print(table)


if __name__ == "__main__":
    main()
