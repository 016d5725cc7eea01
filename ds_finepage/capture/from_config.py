"""Captures a Hugging Face model's pass from its config alone.

Reads a transformers config; produces the ``TaskGraph`` of one prefill or of one decode step. No
weights, no GPU, no network and no Dynamo: the model is built of FakeTensors, and its eager forward
runs once under the recorder.

[Note: what the pass looks like]
Batches are without padding, so attention needs no mask but the causal one, and takes the kernel
that never writes scores to memory. The KV cache is static: it is given to the pass with as many
rows as there are live ones, the pass writes the rows of its own tokens, and attention reads all of
them (a layer with a sliding window keeps the window's rows). Prefill computes logits for the last
position only, as ``generate`` does. On request the KV cache is in host memory instead: the pass
brings in the live rows of a layer, puts its own behind them in new buffers, and returns only those
of its own, in host memory.

A model with an encoder reads a source of ``seq`` tokens. Its prefill is the encoder and the first
token of the decoder, which writes the keys and values of the source. Its decode step is one of the
decoder, over as many rows of its own as of the source. These caches stay on the device.

The FakeTensors are on the CPU, because there the fused attention op is chosen on any build of
torch. Sizes are those of the GPU's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PretrainedConfig,
    modeling_utils,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ds_finepage._compat.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    _disable_current_modes,
)
from ds_finepage._compat.transformers import cache_name
from ds_finepage.capture.finishing import finish
from ds_finepage.capture.models import positions_of
from ds_finepage.capture.recorder import Recorder
from ds_finepage.errors import CaptureError, ConfigError
from ds_finepage.graph.taskgraph import BufferKind, GraphInput, GraphOutput, TaskGraph
from ds_finepage.units import require_count

SOURCE_ROWS = "source."
"""Begins the names of the keys and values that a decoder has of the encoder's tokens."""

PHASES = ("prefill", "decode")
DTYPES = ("float16", "bfloat16", "float32")


def capture_config(
    config: PretrainedConfig,
    *,
    phase: str,
    batch: int,
    seq: int,
    num_new: int = 1,
    dtype: str = "float16",
    host_ops: Any = None,
    prepare: Callable[[torch.nn.Module], object] | None = None,
) -> TaskGraph:
    """Capture one pass of a language model, with or without an encoder.

    Args:
        config: A transformers config, which is left as it is.
        phase: "prefill": ``seq`` tokens at once into an empty KV cache. "decode": ``num_new``
            tokens, which become the last of ``seq`` rows.
        batch: Sequences in the batch.
        seq: Tokens of a sequence that are in the KV cache after the pass, and tokens that an
            encoder reads.
        num_new: Tokens that a decode step reads; one, if the model has an encoder.
        dtype: Of weights, activations and KV cache: a name in ``DTYPES``.
        host_ops: The module ``execution/host_ops.py``, whose ops copy between host memory and the
            device. With it, layers without a window keep their rows in host memory, as
            :mod:`ds_finepage.integrations.transformers.host_cache` does.
        prepare: Changes the model once it is built, for example packs its weights.

    Returns:
        The taskgraph. Weights have their qualified names, tied ones are there once. Tasks have
        ``flops`` and ``moved_bytes``, but no ``time_ns`` and no ``workspace_bytes``.

    Raises:
        ConfigError: An argument is out of range, ``seq`` is more than the model's positions, or
            transformers cannot build or ``prepare`` cannot change the model.
        CaptureError: The model's forward fails, or cannot be written down.
    """
    _require_arguments(config, phase, batch, seq, dtype)
    recorder = Recorder()
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        model = _build(config, dtype)
        _prepare_shapes(model, prepare)
        inputs = _Inputs(recorder)
        for name, parameter in model.named_parameters():
            inputs.add(parameter, BufferKind.WEIGHT, name)
        for name, buffer in model.named_buffers():
            inputs.add(buffer, BufferKind.INPUT, name)
        new_rows: list[torch.Tensor] = []
        if _has_encoder(config):
            kwargs = _source_arguments(model, inputs, phase, batch, seq)
        else:
            num_new = seq if phase == "prefill" else min(num_new, seq)
            kwargs = _text_arguments(model, inputs, batch, num_new, is_prefill=phase == "prefill")
            kwargs[cache_name(model.forward)], new_rows = _static_rows(
                config, inputs, num_new=num_new, num_past=seq - num_new, host_ops=host_ops
            )
        with _capture_errors(model), _labelled(model, recorder), _GroupedMm(), recorder:
            logits = model(**kwargs, use_cache=True).logits
        outputs = tuple(GraphOutput(tensor=recorder.tensor_id(t)) for t in (logits, *new_rows))
    name = f"{type(model).__name__} {phase}, batch {batch}, sequence {seq}, {dtype}"
    return finish(recorder, name, inputs.used(), outputs)


@contextmanager
def _capture_errors(model: torch.nn.Module) -> Iterator[None]:
    """Raise what a model's forward raises as a CaptureError."""
    try:
        yield
    except CaptureError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the forward of {type(model).__name__} looks at values ({error.func}), which are "
            f"not there. A newer transformers than {version('transformers')} or another dtype may "
            f"not need them."
        ) from error
    except Exception as error:
        raise CaptureError(f"{type(model).__name__}: {type(error).__name__}: {error}") from error


def _prepare_shapes(
    model: torch.nn.Module, prepare: Callable[[torch.nn.Module], object] | None
) -> None:
    """Let a function change a model whose weights have no values.

    Its parameters are on the meta device meanwhile. There such functions make shapes only, while
    of a FakeTensor on the CPU they would ask for values.
    """
    if prepare is None:
        return
    with _disable_current_modes():
        _move_parameters(model, "meta")
        prepare(model)
    _move_parameters(model, "cpu")


def _move_parameters(model: torch.nn.Module, device: str) -> None:
    """Make all parameters on a device; tied ones stay tied."""
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in moved:
                empty = torch.empty(old.shape, dtype=old.dtype, device=device)
                moved[old] = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
            setattr(module, name, moved[old])


def _require_arguments(
    config: PretrainedConfig, phase: str, batch: int, seq: int, dtype: str
) -> None:
    if phase not in PHASES:
        raise ConfigError(f"phase: unknown phase {phase!r}. Known: {', '.join(PHASES)}.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: unknown dtype {dtype!r}. Known: {', '.join(DTYPES)}.")
    require_count(batch, "batch")
    require_count(seq, "seq")
    positions = positions_of(config)
    if positions is not None and seq > positions:
        raise ConfigError(
            f"seq: {seq} tokens are more than the model's {positions} positions. Write at most "
            f"{positions}."
        )


def _build(config: PretrainedConfig, dtype: str) -> torch.nn.Module:
    own = copy.deepcopy(config)  # building writes the dtype into it, and more
    # Else the model is built in ZeRO's partitions where a DeepSpeed config is active.
    not_again = getattr(modeling_utils, "set_zero3_state", nullcontext)
    try:
        with not_again():
            auto: Any = AutoModelForSeq2SeqLM if _has_encoder(own) else AutoModelForCausalLM
            model = auto.from_config(own, dtype=getattr(torch, dtype))
    except Exception as error:  # each model class fails in its own way
        raise ConfigError(
            f"transformers cannot build a language model of model_type "
            f"{config.model_type!r}: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(model, torch.nn.Module)
    return model.eval()


class _Inputs:
    """The arguments of the call, by position."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tensors: list[int] = []

    def add(self, tensor: torch.Tensor, kind: BufferKind, name: str) -> None:
        nbytes = int(tensor.untyped_storage().nbytes())
        self._recorder.add_buffer(tensor, kind, nbytes, name)
        self._tensors.append(self._recorder.tensor_id(tensor))

    def used(self) -> tuple[GraphInput, ...]:
        """Describe all weights, and of the other inputs those that the pass looks at."""
        recorder = self._recorder
        used = {b for task in recorder.tasks for b in task.buffers}
        used |= {i for i, b in enumerate(recorder.buffers) if b.kind is BufferKind.WEIGHT}
        handed = (b.handed for b in recorder.buffers if b.handed is not None)
        used |= {recorder.tensors[tensor].buffer for tensor in handed}
        kept = [tensor for tensor in self._tensors if recorder.tensors[tensor].buffer in used]
        return tuple(GraphInput(position, tensor) for position, tensor in enumerate(kept))


def _text_arguments(
    model: torch.nn.Module, inputs: _Inputs, batch: int, num_new: int, *, is_prefill: bool
) -> dict[str, Any]:
    """Return the tokens, and the other arguments of ``generate`` that this model takes."""
    taken = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    for name in ("input_ids", "position_ids"):
        if name in taken:
            found[name] = torch.empty(batch, num_new, dtype=torch.int64)
            inputs.add(found[name], BufferKind.INPUT, name)
    if "logits_to_keep" in taken:
        found["logits_to_keep"] = 1 if is_prefill else num_new
    return found


def _has_encoder(config: PretrainedConfig) -> bool:
    """Tell whether the model writes text about the text that its encoder reads."""
    return config.is_encoder_decoder and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def _source_arguments(
    model: torch.nn.Module, inputs: _Inputs, phase: str, batch: int, seq: int
) -> dict[str, Any]:
    """Return the arguments of a model with an encoder, its caches among them.

    The model runs once beforehand, to learn the shapes of its caches. The source has ``seq``
    tokens, and the decoder as many rows after a decode step.
    """
    source = torch.empty(batch, seq, dtype=torch.int64)
    token = torch.empty(batch, 1, dtype=torch.int64)
    shapes = EncoderDecoderCache(DynamicCache(), DynamicCache())
    name = cache_name(model.forward)
    with _capture_errors(model):
        tried = model(source, decoder_input_ids=token, **{name: shapes}, use_cache=True)
    position = torch.empty(1, dtype=torch.int64)
    positions = torch.empty(seq, dtype=torch.int64)
    inputs.add(token, BufferKind.INPUT, "decoder_input_ids")
    inputs.add(position, BufferKind.INPUT, "cache_position")
    inputs.add(positions, BufferKind.INPUT, "source_position")
    num_rows, num_past = (1, 0) if phase == "prefill" else (seq, seq)
    own: list[Any] = []
    of_source: list[Any] = []
    for index, layer in enumerate(shapes.cross_attention_cache.layers):
        own.append(_LayerRows(f"cache.{index}", num_rows, num_rows - 1, position, inputs))
        source_rows = _LayerRows(f"{SOURCE_ROWS}{index}", seq, num_past, positions, inputs)
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None and layer.values is not None
        source_rows.make_rows(layer.keys, layer.values)
        of_source.append(source_rows)
    found: dict[str, Any] = {
        "decoder_input_ids": token,
        name: EncoderDecoderCache(Cache(layers=own), Cache(layers=of_source)),
    }
    if phase == "prefill":
        found["input_ids"] = source
        inputs.add(source, BufferKind.INPUT, "input_ids")
    else:
        hidden = torch.empty_like(tried.encoder_last_hidden_state)
        found["encoder_outputs"] = (hidden,)
        inputs.add(hidden, BufferKind.INPUT, "encoder_outputs")
    return found


@contextmanager
def _labelled(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder, while the model runs, which module each op comes from."""

    def enter(name: str) -> Any:
        return lambda module, _: recorder.enter(name, type(module).__name__)

    def leave(*_: Any) -> None:
        recorder.leave()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _GroupedMm(TorchFunctionMode):
    """Sends products of experts that torch does in bfloat16 only to transformers' own op.

    transformers does so on a GPU whose torch lacks the product; it cannot tell for FakeTensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return torch.ops.transformers.grouped_mm_fallback(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _static_rows(
    config: PretrainedConfig, inputs: _Inputs, *, num_new: int, num_past: int, host_ops: Any
) -> tuple[Cache, list[torch.Tensor]]:
    """Make a KV cache whose rows are all live, and a list that gets those it has on the host."""
    new_rows: list[torch.Tensor] = []
    positions = torch.empty(num_new, dtype=torch.int64)
    inputs.add(positions, BufferKind.INPUT, "cache_position")
    layers: list[Any] = []
    for index, window in enumerate(windows_of(config.get_text_config(decoder=True))):
        num_rows = min(num_new + num_past, window or num_new + num_past)
        name = f"cache.{index}"
        if host_ops is not None and window is None:
            layers.append(_HostRows(name, num_past, positions, inputs, host_ops, new_rows))
        else:
            layers.append(_LayerRows(name, num_rows, num_past, positions, inputs))
        layers[-1].is_sliding = window is not None
    return Cache(layers=layers), new_rows


class _LayerRows(CacheLayerMixin):
    """Keys and values of one layer: buffers that the call brings along, and that it changes."""

    is_compileable = False

    def __init__(
        self, name: str, num_rows: int, num_past: int, positions: torch.Tensor, inputs: _Inputs
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = False
        self._name = name
        self._num_rows = num_rows
        self._num_past = num_past
        self._positions = positions
        self._inputs = inputs
        self.is_sliding = False

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        # The rows exist before the pass, so making them is not a task.
        with _disable_current_modes(), key_states.fake_mode:  # type: ignore[attr-defined]
            self.make_rows(key_states, key_states if value_states is None else value_states)

    def make_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers of the rows, outside of the pass.

        Keys and values of any number of rows, (batch, heads, rows, width), tell the other sizes.
        """
        self.keys = self._rows_like(key_states)
        self.values = self._rows_like(value_states)
        self._inputs.add(self.keys, BufferKind.INPUT, f"{self._name}.keys")
        self._inputs.add(self.values, BufferKind.INPUT, f"{self._name}.values")
        self.is_initialized = True

    def _rows_like(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        return torch.empty(batch, heads, self._num_rows, width, dtype=states.dtype)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        kept = min(self._num_rows, key_states.shape[-2])
        positions = self._positions[:kept]
        self.keys.index_copy_(2, positions, key_states[:, :, -kept:])
        self.values.index_copy_(2, positions, value_states[:, :, -kept:])
        if kept < key_states.shape[-2]:
            return key_states, value_states  # a prompt that is longer than the window
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many rows attention reads, and how many came before them."""
        num_new = self._positions.shape[0]
        rows = num_new if num_new > 1 else self._num_rows
        return rows, self._num_past + num_new - rows

    def get_seq_length(self, *_: Any) -> int:
        return self._num_past

    def get_max_length(self) -> int:
        return self._num_rows


class _HostRows(_LayerRows):
    """Keys and values of one layer in host memory; the pass puts its own behind them."""

    def __init__(
        self,
        name: str,
        num_past: int,
        positions: torch.Tensor,
        inputs: _Inputs,
        host_ops: Any,
        new_rows: list[torch.Tensor],
    ) -> None:
        super().__init__(name, num_past, num_past, positions, inputs)
        self._host_ops = host_ops
        self._new_rows = new_rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._num_past and not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        lengths = {
            "num_live": self._num_past,
            "capacity": self._num_past + key_states.shape[-2],
        }
        keys, new_keys = self._host_ops.append(self.keys, key_states, **lengths)
        values, new_values = self._host_ops.append(self.values, value_states, **lengths)
        self._new_rows += (new_keys, new_values)
        return keys, values

    def _rows_like(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        return torch.empty(self._num_rows, batch, heads, width, dtype=states.dtype)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many rows attention reads, and how many came before them."""
        return self._num_past + self._positions.shape[0], 0


def windows_of(config: PretrainedConfig) -> list[int | None]:
    """Return each layer's sliding window, None where attention is full.

    Raises:
        CaptureError: A layer keeps something else than keys and values.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"]
        types *= config.num_hidden_layers
    found: list[int | None] = []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise CaptureError(
                f"layers of type {kind!r} ({config.model_type}) keep a state that is not a KV "
                f"cache; such models cannot be captured from their config"
            )
        found.append(window if kind == "sliding_attention" else None)
    return found
