"""Generate text greedily: by plain transformers, or through DeepSpeed with either engine.

    python examples/generate.py --model PATH --prompt "..."
    deepspeed --num_gpus 1 examples/generate.py --model PATH --prompt "..." \
        --deepspeed --deepspeed_config configs/finepage_cpu.json

One key of the ds_config chooses the engine: ``finepage.enabled``. Without it DeepSpeed runs stock
ZeRO-Inference.

``--weights int4`` packs the weights of the model first, so that plain transformers or stock run the
model that ds_finepage runs with the key ``finepage.weights``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

import ds_finepage
from ds_finepage.graph.packed import PACKED_FORMS
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from ds_finepage.run import prepare_one_process, use_device_of_rank


def main() -> None:
    """Load, generate, print."""
    args = parse_arguments()
    use_device_of_rank()
    device = get_accelerator().current_device_name()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.deepspeed:
        prepare_one_process()  # sets what the launcher would set
        ds_config = json.loads(Path(args.deepspeed_config).read_text())
        # While this object is alive, from_pretrained loads into ZeRO's host partitions.
        keep_alive = (
            HfDeepSpeedConfig(ds_config) if loads_into_partitions(args, ds_config) else None
        )
        model = load(args)
        if args.weights:
            deepspeed.zero.Init(module=model, config_dict_or_path=ds_config)
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        del keep_alive
        if ds_config.get("finepage", {}).get("enabled"):
            ds_finepage.assert_active(engine)
        model = engine.module
        tell_other_dtype(args.model, model.dtype)
    else:
        model = load(args).to(device)
    model.eval()

    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    seconds = []
    for _ in range(args.calls):
        start = time.perf_counter()
        with torch.no_grad():
            ids = model.generate(
                **inputs,
                max_new_tokens=args.new_tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=True,  # compiled code would round differently
            )
        tokens = ids[0].tolist()
        seconds.append(time.perf_counter() - start)
        print(f"{args.new_tokens} new tokens in {seconds[-1]:.2f} s")
    print(tokenizer.decode(tokens))
    if args.json:
        Path(args.json).write_text(json.dumps({"tokens": tokens, "seconds": seconds}))


def loads_into_partitions(args: argparse.Namespace, ds_config: dict[str, Any]) -> bool:
    """Return whether the model is loaded into ZeRO's host partitions, and not made into them later.

    Stock DeepSpeed cuts a model over ranks only after it is loaded.
    """
    is_stock = not ds_config.get("finepage", {}).get("enabled")
    is_cut = ds_config.get("tensor_parallel", {}).get("autotp_size", 1) > 1
    return not (args.weights or (is_stock and is_cut))


def tell_other_dtype(checkpoint: str, dtype: torch.dtype) -> None:
    """Say that the ds_config runs a checkpoint in another dtype, since other tokens may follow."""
    ours = str(dtype).removeprefix("torch.")
    theirs = str(AutoConfig.from_pretrained(checkpoint).dtype).removeprefix("torch.")
    if ours != theirs:
        print(
            f"The ds_config runs these {theirs} weights in {ours}. "
            f"Plain transformers does the same with --dtype {ours}."
        )


def load(args: argparse.Namespace) -> PreTrainedModel:
    """Load the model, and pack its weights if that is asked for."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    if args.weights:
        pack_model(model, PackedForm.parse(args.weights, args.weights_group))
    return model


def parse_arguments() -> argparse.Namespace:
    """Read the command line; ``--deepspeed`` and ``--deepspeed_config`` are DeepSpeed's own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a transformers checkpoint")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="of the weights; auto is the checkpoint's. A ds_config with bf16 or fp16 goes first",
    )
    parser.add_argument("--calls", type=int, default=1, help="of generate; the first one plans")
    parser.add_argument("--weights", choices=PACKED_FORMS, help="pack the weights first")
    parser.add_argument("--weights-group", type=int, default=64, help="that share a scale")
    parser.add_argument("--json", metavar="FILE", help="also write token ids and seconds to FILE")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
