"""Searches the settings of ZeRO-Inference that suit a budget best, and prints them as JSON.

python benchmarks/day_settings.py FOLDER PROFILE PROMPT_TOKENS NEW_TOKENS BUDGET_BYTES
"""

from __future__ import annotations

import json
import sys

from day_common import DTYPE

from ds_finepage.modeller import Modeller


def main(words: list[str]) -> None:
    """Search, and print the keys of ``zero_optimization``."""
    folder, profile, prompt_tokens, new_tokens, budget_bytes = words
    modeller = Modeller(
        folder,
        batch=1,
        prompt_tokens=int(prompt_tokens),
        new_tokens=int(new_tokens),
        device_budget=budget_bytes,
        hardware=profile,
        dtype=str(DTYPE).removeprefix("torch."),
    )
    engine = modeller.engine("zero-persistence")
    assert engine is not None
    print(json.dumps(engine.keys))


if __name__ == "__main__":
    main(sys.argv[1:])
