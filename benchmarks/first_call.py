"""How long the first call of an attached model takes, on the CPU, and where the time goes.

    python benchmarks/first_call.py --against FOLDER --out first_call.json

Each run is a process of its own: a small Llama generates a few tokens by plain transformers, then
with ds_finepage attached. With ``--against`` an older checkout runs in turns with this one, and the
ratio of the times is printed. Process time counts, because other programs share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "demo": {
        "shape": (1024, 2816, 6, 16, 2048),
        "dtype": "bfloat16",
        "budget": "40%weights",
        "generate": {"max_new_tokens": 32, "cache_implementation": "static"},
    },
    "32 layers": {
        "shape": (256, 512, 32, 4, 256),
        "dtype": "float32",
        "budget": "50%weights",
        "generate": {"max_new_tokens": 6},
    },
}
PARTS = {
    "Dynamo": ("torch/_dynamo/convert_frame.py", "_compile"),
    "guards (of Dynamo)": ("torch/_dynamo/convert_frame.py", "build_guards"),
    "recording": ("ds_finepage/capture/recording.py", "_record"),
    "measuring": ("ds_finepage/execution/measure.py", "_measure"),
    "planning and binding": ("ds_finepage/runtime/binder.py", "bind"),
    "running": ("ds_finepage/execution/executor.py", "run"),
}
"""The function whose time is that of a part; ``--parts`` profiles, which slows all down."""


def run_model(name: str, parts: bool) -> dict[str, Any]:
    """Run the first call of a model in this process."""
    import cProfile
    import pstats

    import torch
    import transformers

    from ds_finepage.api import attach

    hidden, intermediate, layers, heads, vocabulary = MODELS[name]["shape"]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dtype = getattr(torch, MODELS[name]["dtype"])
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    settings = {**MODELS[name]["generate"], "do_sample": False, "disable_compile": True}
    prompt = torch.arange(16)[None]
    expected = model.generate(prompt, **settings)
    handle = attach(model, device_budget=MODELS[name]["budget"], device="cpu")
    profiler = cProfile.Profile(time.process_time)
    if parts:
        profiler.enable()
    start, start_cpu = time.perf_counter(), time.process_time()
    found = model.generate(prompt, **settings)
    result: dict[str, Any] = {
        "cpu_s": time.process_time() - start_cpu,
        "wall_s": time.perf_counter() - start,
    }
    profiler.disable()
    assert torch.equal(found, expected)
    handle.detach()
    if parts:
        spent = {part: 0.0 for part in PARTS}
        stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        for (file, _, function), (*_, cumulative, _) in stats.items():
            for part, (where, wanted) in PARTS.items():
                if file.endswith(where) and function == wanted:
                    spent[part] = round(cumulative / result["cpu_s"], 3)
        result["shares"] = spent
    return result


def run_apart(name: str, checkout: Path, parts: bool) -> dict[str, Any]:
    """Run the first call of a model in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--model", name]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, *(["--parts"] if parts else [])],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert isinstance(found, dict)
    return found


def compare(name: str, rounds: int, against: Path | None, parts: bool) -> dict[str, Any]:
    """Run a model several times, in turns; return medians, and ratios where there are two."""
    here = Path(__file__).resolve().parents[1]
    found: dict[str, list[dict[str, Any]]] = {"now": [], "before": []}
    for _ in range(rounds):
        if against is not None:
            found["before"].append(run_apart(name, against, parts))
        found["now"].append(run_apart(name, here, parts))
    seconds = {k: [r["cpu_s"] for r in runs] for k, runs in found.items() if runs}
    result: dict[str, Any] = {k: round(statistics.median(s), 2) for k, s in seconds.items()}
    if against is not None:
        pairs = zip(seconds["now"], seconds["before"], strict=True)
        result["now over before"] = round(statistics.median(a / b for a, b in pairs), 3)
    if parts:
        result["shares"] = {k: runs[-1]["shares"] for k, runs in found.items() if runs}
    return result


def main() -> None:
    """Run all models, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="run this one here, and print JSON")
    parser.add_argument("--parts", action="store_true", help="profile, and print shares of parts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="an older checkout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON there")
    arguments = parser.parse_args()
    if arguments.model is not None:
        print(json.dumps(run_model(arguments.model, arguments.parts)))
        return
    result = {
        name: compare(name, arguments.rounds, arguments.against, arguments.parts) for name in MODELS
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
