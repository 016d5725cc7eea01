"""Every example and every command of the documents, each in its own process, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PROMPT = "The planner never sees torch"

Run = Callable[..., str]


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """``run(*words)`` runs a command in the repository and returns what it printed."""

    def start(*words: str | Path) -> str:
        done = subprocess.run(
            list(map(str, words)),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return start


@pytest.fixture
def launcher() -> list[str]:
    """Return DeepSpeed's launcher on a port that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["deepspeed", "--num_gpus", "1", "--master_port", str(port)]


@pytest.fixture
def ds_config(tmp_path: Path) -> Path:
    """configs/finepage_cpu.json with a budget that a tiny model can have."""
    config = json.loads((ROOT / "configs" / "finepage_cpu.json").read_text())
    config["finepage"]["device_budget"] = "80%weights"
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def test_generate_with_plain_python_and_with_the_launcher(
    run: Run, launcher: list[str], checkpoint: Path, ds_config: Path, tmp_path: Path
) -> None:
    given = ["examples/generate.py", "--model", checkpoint, "--prompt", PROMPT, "--new-tokens", 8]
    deepspeed = ["--deepspeed", "--deepspeed_config"]
    tokens = []
    for name, before, options in (
        ("plain", [sys.executable], []),
        ("planned", [sys.executable], [*deepspeed, ds_config]),
        ("launched", launcher, [*deepspeed, ds_config]),
    ):
        output = tmp_path / f"{name}.json"
        printed = run(*before, *given, "--json", output, *options)
        assert "8 new tokens in " in printed
        found = json.loads(output.read_text())
        assert len(found["seconds"]) == 1
        tokens.append(found["tokens"])
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens[0][-8:])) > 1  # greedy tokens vary


def test_generate_tells_of_a_dtype_that_the_ds_config_changes(
    run: Run, checkpoint: Path, ds_config: Path, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(full)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(full)
    given = ["examples/generate.py", "--model", full, "--prompt", PROMPT, "--new-tokens", 8]
    planned = run(sys.executable, *given, "--deepspeed", "--deepspeed_config", ds_config)
    assert "these float32 weights in bfloat16" in planned
    plain = run(sys.executable, *given, "--dtype", "bfloat16")
    assert "weights in" not in plain
    assert plain.splitlines()[-1] == planned.splitlines()[-1]


def test_a_script_that_knows_nothing_of_us(
    run: Run, launcher: list[str], checkpoint: Path, ds_config: Path
) -> None:
    script = ["examples/their_script.py", "--model", checkpoint, "--deepspeed_config", ds_config]
    planned = run(*launcher, "--module", "ds_finepage.run", *script)
    assert "ConfiguredFinepageOffload" in planned
    alone = run(sys.executable, "-m", "ds_finepage.run", *script)
    assert "ConfiguredFinepageOffload" in alone
    assert text_of(alone) == text_of(planned)


def text_of(printed: str) -> str:
    """Return what followed the name of the engine's optimizer, without the launcher's lines."""
    text = printed.partition("ConfiguredFinepageOffload\n")[2]
    return re.sub(r"\[\d{4}-.*\n?", "", text).strip()


def test_pipeline(run: Run, checkpoint: Path, ds_config: Path) -> None:
    printed = run(
        sys.executable,
        "examples/pipeline.py",
        "--model",
        checkpoint,
        "--deepspeed_config",
        ds_config,
    )
    assert "A model that is larger than the memory" in printed
    assert re.search(r"graph 1: \d+ tasks, 15 runs, .* no plan could reload less than", printed)


def test_attach(run: Run) -> None:
    printed = run(sys.executable, "examples/attach.py")
    assert "weights 16.03 MiB, budget 6.41 MiB" in printed
    assert "'aten.addmm.default': 32" in printed


def test_each_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert [name for name in EXAMPLES if f"examples/{name}" not in text] == []


def test_the_documents_name_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "usage.md").read_text()
    named = set(re.findall(r"\b((?:examples|configs|docs|benchmarks)/[\w./-]+\.\w+)", text))
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []
    commands = [line.strip() for line in text.splitlines() if line.startswith("    deepspeed ")]
    num_ranks = []
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[:2] == ["deepspeed", "--num_gpus"]
        num_ranks.append(words[2])
        assert "--deepspeed_config" in words
    assert sorted(num_ranks) == ["1", "1", "2"]


def answer_of(checkpoint: Path, prompt: str) -> str:
    """Return what plain transformers adds to a prompt, in the dtype of the ds_config."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    inputs = tokenizer([prompt], return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_throughput_writes_each_prompt_once(
    run: Run, checkpoint: Path, ds_config: Path, tmp_path: Path
) -> None:
    words = PROMPT.split()
    prompts = [" ".join(words * repeats) for repeats in (1, 4, 2, 1, 3)]
    given, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    given.write_text("\n".join(prompts) + "\n")
    command = [sys.executable, "examples/throughput.py", "--model", checkpoint, "--new-tokens", 4]
    command += ["--prompts", given, "--out", out, "--deepspeed_config", ds_config]
    assert "5 of 5 prompts" in run(*command)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["line"] for line in lines) == [0, 1, 2, 3, 4]
    assert lines[0]["line"] == 1 and all(line["prompt"] == prompts[line["line"]] for line in lines)
    whole = [json.dumps(line) for line in lines]
    out.write_text("\n".join([*whole[:-1], whole[-1][:20]]))  # cut off by an interrupt
    assert "5 of 5 prompts" in run(*command)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    # The last prompt ran again, now alone, and bfloat16 rounds by the batch.
    alone = {**lines[-1], "text": answer_of(checkpoint, lines[-1]["prompt"])}
    assert again == [*lines[:-1], alone]
    assert "all 5 prompts are in" in run(*command)
