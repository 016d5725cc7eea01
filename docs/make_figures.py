"""Take the pictures of the documents from the report of a comparison.

Make the report first::

    ds-finepage compare --model llama-7b --layers 2 --device-budget 50%weights
        --prompt 128 --new 6 --repeats 1 --hardware v100-16gb --out DIR
        --arms zero,zero-persistence,static,finepage-horizon,finepage
    ds-finepage report DIR

Then ``python docs/make_figures.py DIR``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FIGURES = Path(__file__).with_name("figures")
PICTURES = {
    "arms": "arms_b1",
    "budgets": "budgets_b1",
    "layers": "finepage_b1_decode_layers",
    "lanes": "finepage_b1_decode_lanes",
    "policies": "finepage_b1_decode_policies",
}
"""Picture of the documents -> picture of the report."""


def main(folder: Path) -> None:
    """Copy the pictures."""
    FIGURES.mkdir(exist_ok=True)
    for name, source in PICTURES.items():
        shutil.copyfile(folder / "figures" / f"{source}.png", FIGURES / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
