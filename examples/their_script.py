"""A script for stock DeepSpeed. It knows nothing of ds_finepage.

    deepspeed --num_gpus 1 --module ds_finepage.run examples/their_script.py --model PATH \
        --deepspeed_config configs/finepage_cpu.json

Started as ``deepspeed --num_gpus 1 examples/their_script.py ...`` it runs stock ZeRO-Inference.
"""

import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--prompt", default="A model that is larger than the memory")
parser.add_argument("--local_rank", type=int, default=0)
args = deepspeed.add_config_arguments(parser).parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
engine, *_ = deepspeed.initialize(args=args, model=model)

inputs = tokenizer(args.prompt, return_tensors="pt").to(engine.device)
with torch.no_grad():
    ids = engine.module.generate(
        **inputs, max_new_tokens=16, do_sample=False, cache_implementation="static"
    )
print(type(engine.optimizer).__name__)
print(tokenizer.decode(ids[0]))
