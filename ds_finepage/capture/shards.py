"""Cuts a model over ranks in shapes alone, so that one rank's pass is captured without the others.

Reads the plan for tensor parallelism that transformers publishes with a model; DeepSpeed's AutoTP
follows the same plan. Changes the linear layers that the plan names. Collectives are the ops of
``execution/collectives.py``, which must be defined before.

[Note: the first rank]
The shard is that of the first rank. Where a size does not divide evenly, no rank has more. The sum
over ranks comes right after a layer that is cut by rows, and its bias after the sum. An output
layer that is cut by columns gathers the logits of all ranks. One that shares its weight with the
embedding table stays whole. So do experts: DeepSpeed's AutoTP cuts linear layers alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_finepage.errors import ConfigError
from ds_finepage.units import require_count

Change = Callable[[nn.Module], object]

NO_GROUP = "ranks"
"""Stands for the process group, which is not there."""

COLUMNS, GATHERED, ROWS, WHOLE = "colwise", "colwise_gather_output", "rowwise", "whole"
STYLES = {
    COLUMNS: COLUMNS,
    GATHERED: GATHERED,
    "colwise_rep": GATHERED,  # its name before transformers 5
    ROWS: ROWS,
    "embedding_rowwise": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
    "moe_tp_experts": WHOLE,
    "packed_colwise": WHOLE,  # of the matrices of experts alone
}
"""Name in a plan of transformers -> how a layer is cut. AutoTP refuses other names."""

PLANS = {
    "opt": {
        "layers.*.self_attn.[qkv]_proj": COLUMNS,
        "layers.*.self_attn.out_proj": ROWS,
        "layers.*.fc1": COLUMNS,
        "layers.*.fc2": ROWS,
    }
}
"""Of models that transformers has no plan for, by model type: as AutoTP finds it by names."""

NUM_HEADS = "num_heads"
"""The attribute of an attention layer that its forward may take shapes from."""

LATE_BIAS = "bias_of_sum"


def cutting(num_ranks: int, then: Change | None) -> Change | None:
    """Return what changes a whole model into one rank's shard.

    Args:
        num_ranks: Ranks to cut over; 1 leaves the model whole.
        then: Changes the shard further, for example packs its weights.

    Raises:
        ConfigError: There is less than one rank.
    """
    require_count(num_ranks, "ranks")
    return then if num_ranks == 1 else partial(cut_model, num_ranks=num_ranks, then=then)


def cut_model(model: nn.Module, *, num_ranks: int, then: Change | None = None) -> None:
    """Cut a model over ranks in place, and keep the shard of the first; [Note: the first rank].

    Args:
        model: A model of transformers; it may be on the meta device.
        num_ranks: Ranks to cut over, 2 or more.
        then: Changes the shard before its collectives are added.

    Raises:
        ConfigError: The ranks do not divide the heads, or AutoTP cannot cut the model.
    """
    require_heads(model.config, num_ranks, type(model).__name__)
    layers = dict(_layers_to_cut(model))
    whole = {
        name: _cut(model.get_submodule(name), num_ranks, style) for name, style in layers.items()
    }
    for owner in {name.rpartition(".")[0] for name in layers}:
        attention = model.get_submodule(owner)
        if hasattr(attention, NUM_HEADS):
            setattr(attention, NUM_HEADS, getattr(attention, NUM_HEADS) // num_ranks)
    if then is not None:
        then(model)
    for name, style in layers.items():
        layer, (width, bias) = model.get_submodule(name), whole[name]
        if style == ROWS:
            layer.register_parameter(LATE_BIAS, bias)
            layer.register_forward_hook(partial(_sum_over_ranks, num_ranks))
        elif style == GATHERED:
            widths = [_share(width, num_ranks, rank) for rank in range(num_ranks)]
            layer.register_forward_hook(partial(_gather_from_ranks, widths))


def require_heads(config: Any, num_ranks: int, name: str) -> None:
    """Refuse ranks that the heads of a model cannot be divided among.

    Raises:
        ConfigError: The ranks do not divide the attention heads or the KV heads.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None)
    for kind, number in (("attention heads", heads), ("KV heads", kv_heads)):
        if isinstance(number, int) and number % num_ranks:
            raise ConfigError(
                f"ranks: {num_ranks} ranks do not divide the {number} {kind} of {name}. Write a "
                f"divisor of {number}."
            )


def _layers_to_cut(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the layers to cut, with ``COLUMNS``, ``GATHERED`` or ``ROWS``; refuse other plans."""
    config: Any = model.config
    of_layers = getattr(config, "base_model_tp_plan", None) or {}
    of_output = getattr(type(model), "_tp_plan", None) or {}
    plan = {**of_layers, **of_output} or PLANS.get(config.model_type, {})
    others = sorted({style for style in plan.values() if style not in STYLES})
    if others or not plan:
        reason = (
            f"its plan in transformers has styles that AutoTP cannot follow: {', '.join(others)}"
            if others
            else "transformers has no plan for it"
        )
        raise ConfigError(
            f"ranks: {type(model).__name__} cannot be cut over ranks: {reason}. Plan it on one "
            "rank."
        )
    patterns = [(_expression(pattern), STYLES[style]) for pattern, style in plan.items()]
    modules = model.named_modules(remove_duplicate=False)
    uses = Counter(id(getattr(m, "weight", None)) for _, m in modules)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or uses[id(module.weight)] > 1:
            continue
        style = next((style for found, style in patterns if found.fullmatch(name)), WHOLE)
        if style != WHOLE:
            yield name, style


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(".*" + pattern.replace(".", r"\.").replace("*", ".*"))


def _share(size: int, num_ranks: int, rank: int) -> int:
    """Return the part of a rank, as AutoTP divides: the first ranks have one more."""
    return size // num_ranks + (rank < size % num_ranks)


def _cut(layer: Any, num_ranks: int, style: str) -> tuple[int, nn.Parameter | None]:
    """Cut a linear layer; return how many columns it had, and the bias that it may not add."""
    width, bias = int(layer.out_features), layer.bias
    if style == ROWS:
        layer.in_features, layer.bias = _share(layer.in_features, num_ranks, 0), None
    else:
        layer.out_features = _share(width, num_ranks, 0)
        if bias is not None:
            layer.bias = nn.Parameter(bias[: layer.out_features].detach().clone())
    part = layer.weight[: layer.out_features, : layer.in_features]
    layer.weight = nn.Parameter(part.detach().clone())
    return width, bias


def _sum_over_ranks(num_ranks: int, layer: nn.Module, _: Any, result: torch.Tensor) -> torch.Tensor:
    torch.ops.finepage.all_reduce_(result, "sum", NO_GROUP, num_ranks)
    bias = getattr(layer, LATE_BIAS)
    return result if bias is None else result + bias


def _gather_from_ranks(
    widths: list[int], layer: nn.Module, _: Any, result: torch.Tensor
) -> torch.Tensor:
    """Put the columns of all ranks side by side, as AutoTP's layer does."""
    num_ranks = len(widths)
    found = result.new_empty((num_ranks * result.shape[0], *result.shape[1:]))
    torch.ops.finepage.all_gather_into_(found, result.contiguous(), NO_GROUP, num_ranks)
    shards = found.view(num_ranks, *result.shape)
    return torch.cat([shards[i].narrow(-1, 0, w) for i, w in enumerate(widths)], dim=-1)
