"""Give a planned engine to transformers' own pipeline.

    python examples/pipeline.py --model PATH --deepspeed_config configs/finepage_cpu.json

``engine.module`` is the model itself, so all code that takes a model takes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.integrations import HfDeepSpeedConfig

import ds_finepage
from ds_finepage.run import prepare_one_process
from ds_finepage.units import format_bytes


def main() -> None:
    """Load, generate, and print the text and the counters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a transformers checkpoint")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--prompt", default="A model that is larger than the memory")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    args = parser.parse_args()

    prepare_one_process()
    ds_config = json.loads(Path(args.deepspeed_config).read_text())
    keep_alive = HfDeepSpeedConfig(ds_config)  # from_pretrained loads into ZeRO's partitions
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    del keep_alive
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    ds_finepage.assert_active(engine)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    generate = pipeline(
        "text-generation", model=engine.module, tokenizer=tokenizer, device=engine.device
    )
    (found,) = generate(
        args.prompt, max_new_tokens=16, do_sample=False, cache_implementation="static"
    )
    print(found["generated_text"])

    stats = ds_finepage.stats(engine)
    budget = format_bytes(stats.budget_bytes)
    print(f"{format_bytes(stats.weight_bytes)} of weights under a budget of {budget}")
    for each in stats.passes:
        print(
            f"{each.name}: {each.num_tasks} tasks, {each.num_runs} runs, "
            f"{format_bytes(each.last_reloaded_bytes)} reloaded in the last one; "
            f"no plan could reload less than {format_bytes(each.lower_bound_bytes)}"
        )


if __name__ == "__main__":
    main()
