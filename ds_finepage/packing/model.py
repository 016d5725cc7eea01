"""Packs the linear layers and the experts of a model."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ds_finepage.errors import ConfigError
from ds_finepage.packing.experts import PackedExperts, expert_weights, unknown
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.linear import PackedLinear, PackedWeight, matrices_of, pack_weight
from ds_finepage.packing.sliced import slice_output

logger = logging.getLogger(__name__)

METHOD = "finepage"
"""The method in the ``quantization_config`` of a model whose layers are packed."""

Places = list[list[str]]
"""The layers that have the same weights, each with all of its names."""


def pack_model(model: torch.nn.Module, form: PackedForm) -> list[str]:
    """Pack the weights of every linear layer and of fused experts, in place and one at a time.

    These stay as they are: the output layer, unless the form packs it; all else that transformers'
    quantisers leave out by default; weights that another module has too, such as an output layer
    that is tied to the embeddings; subclasses of ``torch.nn.Linear``, because their code may use
    the weight; and experts whose forward pass is not known, which the log names. A large output
    layer multiplies by a slice of its weight at a time. A model that is packed in this form already
    stays as it is.

    Args:
        model: Any module; it may be on the meta device.
        form: How to pack.

    Returns:
        The names of the layers and the modules of experts that were packed, in the model's order.

    Raises:
        ConfigError: The form does not suit a weight, the model has no linear layer to pack, or it
            is quantised already. Then no layer was replaced, except if a weight is not finite.
    """
    was_packed = _require_plain(model, form)
    weights = _weights_to_pack(model, form.packs_output)
    if not weights and not was_packed:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer whose weight can be packed. Leave out "
            "finepage.weights."
        )
    for places in weights:
        path = places[0][0]
        layer = model.get_submodule(path)
        for name, weight in weights_of(layer).items():
            shape = matrices_of(layer, weight).shape
            form.require(shape[-2:] if len(shape) == 3 else shape, f"{path}.{name}")
    for places in weights:
        _replace(model, places, form)
    slice_output(model)
    return [name for places in weights for names in places for name in names[:1]]


def form_of(model: torch.nn.Module) -> PackedForm | None:
    """Return the form of the packed layers of a model; None if it has none."""
    return next((m.form for m in model.modules() if isinstance(m, PackedWeight)), None)


def is_packed(model: torch.nn.Module) -> bool:
    """Tell whether a model has packed layers."""
    return form_of(model) is not None


def set_fused(model: torch.nn.Module, is_fused: bool) -> None:
    """Let the products of packed layers unpack in registers, where the device can, or not.

    Results may differ in the last bit. With packed weights in plain transformers, it does there
    what ``finepage.fused_unpacking`` does in a run.

    Args:
        model: Any module; other layers stay as they are.
        is_fused: Unpack in registers.
    """
    for layer in model.modules():
        form = vars(layer).get("form")
        if isinstance(form, PackedForm) and form.fused != is_fused:
            vars(layer)["form"] = replace(form, fused=is_fused)


def weights_of(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights of a layer that can be packed, by their names; other modules have none."""
    if type(layer) in _linear_types():
        weight: Any = layer.weight
        return {"weight": weight}
    return expert_weights(layer)


def packed_layer(layer: Any, weights: Mapping[str, PackedWeight]) -> torch.nn.Module:
    """Return what stands for a layer, with its packed weights."""
    if type(layer) not in _linear_types():
        return PackedExperts(layer, weights)
    (weight,) = weights.values()
    return PackedLinear(weight.packed, weight.form, layer.bias).train(layer.training)


def layers_to_pack(model: torch.nn.Module) -> dict[str, int]:
    """Return the layers that :func:`pack_model` would pack, with the bytes of their weights.

    Layers that share weights are left out.

    Raises:
        ConfigError: The model is quantised already.
    """
    _require_plain(model, None)
    names = [places[0][0] for places in _weights_to_pack(model, False) if places == [places[0][:1]]]
    layers = {name: weights_of(model.get_submodule(name)) for name in names}
    return {name: sum(w.nbytes for w in weights.values()) for name, weights in layers.items()}


def packed_copy(model: torch.nn.Module, name: str, form: PackedForm) -> torch.nn.Module:
    """Return a packed copy of a layer.

    Raises:
        ConfigError: The form does not suit a weight.
    """
    layer = model.get_submodule(name)
    return packed_layer(layer, _packed_weights(layer, name, form))


def _packed_weights(layer: torch.nn.Module, path: str, form: PackedForm) -> dict[str, PackedWeight]:
    return {
        name: pack_weight(layer, weight, form, f"{path}.{name}")
        for name, weight in weights_of(layer).items()
    }


def _replace(model: torch.nn.Module, places: Places, form: PackedForm) -> None:
    """Put packed layers where those with the same weights are; they share the packed ones."""
    weights: dict[str, PackedWeight] = {}
    for names in places:
        layer = model.get_submodule(names[0])
        weights = weights or _packed_weights(layer, names[0], form)
        made = packed_layer(layer, weights)
        for name in names:
            model.set_submodule(name, made)


def _weights_to_pack(model: torch.nn.Module, packs_output: bool) -> list[Places]:
    """Find the layers to pack. Only names are kept, so that a layer that was replaced is freed."""
    found: dict[tuple[int, ...], dict[int, list[str]]] = {}  # by ids of the weights and the layer
    others: set[int] = set()  # weights of modules that stay as they are
    left_out = set(_left_out(model, packs_output))
    for name, module in model.named_modules(remove_duplicate=False):
        weights = weights_of(module) if name and name not in left_out else {}
        if weights:
            ids = tuple(map(id, weights.values()))
            found.setdefault(ids, {}).setdefault(id(module), []).append(name)
        else:
            others.update(map(id, module._parameters.values()))
            why = unknown(module)
            if why is not None:
                logger.warning("the experts of %s stay as they are: %s", name or "the model", why)
    times = Counter(weight for weights in found for weight in weights)
    others.update(weight for weight, count in times.items() if count > 1)
    return [list(layers.values()) for ids, layers in found.items() if others.isdisjoint(ids)]


def _linear_types() -> tuple[type[torch.nn.Module], ...]:
    """Return the classes of layers that can be packed; transformers is not imported for it."""
    layers = sys.modules.get("transformers.pytorch_utils")
    return (torch.nn.Linear, layers.Conv1D) if layers else (torch.nn.Linear,)


def _left_out(model: torch.nn.Module, packs_output: bool) -> Iterator[str]:
    """Yield the modules that transformers' quantisers leave out by default.

    Args:
        model: Any module.
        packs_output: Leave out none but those whose weights are tied or stay in float32.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    outer: list[str] = []
    for name, module in model.named_modules():
        is_inner = any(name.startswith(prefix) for prefix in outer)
        if isinstance(module, PreTrainedModel) and not is_inner:
            prefix = f"{name}." if name else ""
            outer.append(prefix)
            patterns = list(module._keep_in_fp32_modules or ())
            patterns += _tied(module) if packs_output else get_keys_to_not_convert(module)
            for inner, _ in module.named_modules(remove_duplicate=False):
                if not should_convert_module(inner, patterns):
                    yield prefix + inner


def _tied(model: Any) -> list[str]:
    """Return the modules whose weights other modules have too, as far as transformers says."""
    pairs = getattr(model, "all_tied_weights_keys", {}).items()
    return [name.removesuffix(".weight") for pair in pairs for name in pair]


def _require_plain(model: torch.nn.Module, form: PackedForm | None) -> bool:
    """Refuse a model that is quantised otherwise; return whether it is packed in this form."""
    was_packed = False
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        by = None
        if isinstance(module, PackedWeight):
            was_packed = True
            if module.form != form:
                by = f"{name} is packed as {module.form}"
        elif not _is_ours(getattr(config, "quantization_config", None)):
            by = f"{name or type(module).__name__}.config has a quantization_config"
        elif type(module) is torch.nn.Linear and not _is_plain(module.weight):
            by = f"{name}.weight is a {type(module.weight).__name__} of {module.weight.dtype}"
        if by is not None:
            raise ConfigError(
                f"the model is quantised already: {by}. Leave out finepage.weights, or load the "
                "model as it was trained."
            )
    return was_packed


def _is_ours(quantization: Any) -> bool:
    """Tell whether a ``quantization_config`` is none, or that of packed layers."""
    return quantization is None or getattr(quantization, "quant_method", None) == METHOD


def _is_plain(weight: torch.Tensor) -> bool:
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and weight.is_floating_point()
