"""Lets transformers load a checkpoint with packed weights, and save and load it packed.

A quantiser by transformers' own protocol, under the name ``finepage``. The model is built on the
meta device. Each weight is packed as it comes from the checkpoint, so that at most one of them is
in memory as it was trained. A checkpoint that was saved packed brings numbers, scales and minima.

    from_pretrained(folder, quantization_config=PackedConfig(weights="int4"))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ds_finepage.errors import ConfigError
from ds_finepage.graph.packed import GROUP
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.linear import PackedWeight, pack_weight
from ds_finepage.packing.model import METHOD, pack_model, packed_layer, weights_of
from ds_finepage.packing.sliced import slice_output

VERSION = 2
"""Of packed checkpoints: of the names, dtypes and order of their tensors and numbers."""


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with packed weights.

    Attributes:
        weights: "int4" or "int8".
        weights_group: Weights in a row that have a scale and a minimum of their own.
        version: Of the packed checkpoint.
    """

    def __init__(
        self, weights: str = "int4", weights_group: int = GROUP, version: int = VERSION, **_: Any
    ) -> None:
        """Describe how weights are packed.

        Raises:
            ConfigError: There is no such form, or the checkpoint is of another version.
        """
        method: Any = METHOD  # their enumeration names their own methods alone
        self.quant_method = method
        self.weights, self.weights_group, self.version = weights, weights_group, version
        if version != VERSION:
            raise ConfigError(
                f"the checkpoint is packed in version {version}, and this ds_finepage reads "
                f"version {VERSION}. Load the checkpoint as it was trained, or pack it again."
            )
        PackedForm.parse(weights, weights_group)

    @classmethod
    def of(cls, form: PackedForm) -> PackedConfig:
        """Return the config of a form."""
        return cls(form.name, form.group)

    @property
    def form(self) -> PackedForm:
        """How the weights are packed."""
        return PackedForm.parse(self.weights, self.weights_group)


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Packs the weights of a model while transformers loads them.

    Attributes:
        refusal: The error of a weight that cannot be packed, which transformers only logs.
        waiting: Packed weights of layers whose other weights have not come yet, by the name of
            the layer and of the weight.
        read: Returns the values of a weight that is not read yet.
        kept_in: The folder that keeps what is packed for the next start; None keeps nothing.
    """

    quantization_config: PackedConfig
    read: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda weight: weight)
    kept_in: str | None = None
    refusal: ConfigError | None = None
    waiting: dict[str, dict[str, PackedWeight]]

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        """Find the layers to pack, or replace them where the checkpoint is packed."""
        form = self.quantization_config.form
        layers = pack_model(model if self.pre_quantized else copy.deepcopy(model), form)
        slice_output(model)
        self._weights = frozenset(
            f"{path}.{name}" for path in layers for name in weights_of(model.get_submodule(path))
        )
        self.waiting = {}

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Tell whether a parameter of the checkpoint is to be packed."""
        return not self.pre_quantized and param_name in self._weights

    def get_quantize_ops(self) -> ConversionOps:
        """Return the conversion of such a parameter."""
        return PackWeight(self)

    def is_serializable(self) -> bool:
        """Tell that ``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Tell that packed weights cannot be trained."""
        return False


class PackWeight(ConversionOps):
    """Puts a packed layer in the place of a layer whose weights have come."""

    def __init__(self, quantizer: PackedQuantizer) -> None:
        self._quantizer = quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: Mapping[str, Any],
        *,
        full_layer_name: str,
        model: Any,
        missing_keys: set[str],
        **others: Any,
    ) -> dict[str, list[torch.Tensor]]:
        """Pack a weight.

        Args:
            input_dict: The weight, under any name.
            full_layer_name: Qualified name of the parameter.
            model: The model; the layer still has a weight on the meta device, and its bias may have
                come.
            missing_keys: Names of the parameters that have not come.
            others: Further arguments of the protocol.

        Returns:
            Nothing that is left to set.

        Raises:
            ConfigError: The weight has another shape, or values that are not finite.
        """
        (value,) = input_dict.values()
        weight = self._quantizer.read(value[0] if isinstance(value, list) else value)
        try:
            missing_keys.difference_update(self._replace(model, full_layer_name, weight))
        except ConfigError as error:
            self._quantizer.refusal = error
            raise
        return {}

    def _replace(self, model: Any, full_layer_name: str, weight: torch.Tensor) -> list[str]:
        """Put a packed layer in place if all its weights have come; return their names."""
        path, _, name = full_layer_name.rpartition(".")
        layer: Any = model.get_submodule(path)
        weights = weights_of(layer)
        if weight.shape != weights[name].shape:
            raise ConfigError(
                f"{full_layer_name} has shape {tuple(weight.shape)} in the checkpoint, and "
                f"{tuple(weights[name].shape)} in the model."
            )
        asked = self._quantizer.quantization_config
        form = PackedForm.parse(asked.weights, asked.weights_group, self._quantizer.kept_in)
        waiting = self._quantizer.waiting.setdefault(path, {})
        waiting[name] = pack_weight(layer, weight, form, full_layer_name)
        if len(waiting) < len(weights):
            return []
        del self._quantizer.waiting[path]
        made: Any = packed_layer(layer, {name: waiting[name] for name in weights})
        made._is_hf_initialized = True
        for layer in made.modules():
            if isinstance(layer, PackedWeight):
                parts: tuple[Any, ...] = (layer, *layer.packed)
                for part in parts:
                    part._is_hf_initialized = True  # else transformers would fill it
        model.set_submodule(path, made)
        return [f"{path}.{name}" for name in weights]


def asked_of(config: Any, given: Any, form: PackedForm) -> Any:
    """Return the ``quantization_config`` with which transformers loads what a ds_config asks for.

    Args:
        config: Of the model.
        given: What the caller of ``from_pretrained`` gave, or None.
        form: Of the ds_config.

    Raises:
        ConfigError: The caller, or the checkpoint, has another one.
    """
    own = getattr(config, "quantization_config", None)
    for where, found in (("from_pretrained", given), ("the checkpoint", own)):
        if found is None:
            continue
        settings = found if isinstance(found, Mapping) else vars(found)
        method = settings.get("quant_method")
        wanted = PackedConfig.of(form)
        theirs = (method, settings.get("weights"), settings.get("weights_group"))
        if theirs != (METHOD, wanted.weights, wanted.weights_group):
            raise ConfigError(
                f"finepage.weights is {form.name} in groups of {form.group}, and {where} has "
                f"another quantization_config: {getattr(method, 'value', method)} "
                f"{settings.get('weights', '')}. Leave out one of them."
            )
    return None if own is not None else PackedConfig.of(form)
