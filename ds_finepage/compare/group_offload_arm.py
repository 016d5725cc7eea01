"""The arm ``group-offload``: diffusers' group offloading of a model's leaf modules.

On an accelerator it has a stream, and prefetches. On the CPU diffusers allows no stream, so one
group is there at a time; what it frees is dropped, as it is with a stream, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from diffusers.hooks.hooks import HookRegistry

from ds_finepage import _compat
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.hooks import HookedEngine, drop_own_forwards
from ds_finepage.compare.loading import load_model
from ds_finepage.execution.device import device_of

LEVEL = "leaf_level"


def load(request: RunRequest) -> Engine:
    """Load the model into host memory."""
    return GroupOffloadEngine(load_model(request), torch.device(request.device))


class GroupOffloadEngine(HookedEngine):
    """A model under ``apply_group_offloading``."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Take a model whose weights are in host memory."""
        super().__init__(model, device, GroupCounter())
        self._use_stream = device_of(device).is_accelerator
        self.settings |= {"offload_type": LEVEL, "use_stream": self._use_stream}
        if not self._use_stream:
            self.notes.append("without a stream, which diffusers does not allow on the CPU")
        if buffer_bytes := sum(b.nbytes for b in model.buffers()):
            self.notes.append(
                f"copies {buffer_bytes} bytes of buffers in each forward, which do not count"
            )

    def place(self) -> None:
        """Install the hooks of diffusers; with a stream it pins all weights."""
        apply_group_offloading(
            self.model, self.device, offload_type=LEVEL, use_stream=self._use_stream
        )

    def close(self) -> None:
        """Take the hooks off; the weights are in host memory."""
        for module in self.model.modules():
            if hasattr(module, _compat.HOOK_REGISTRY):
                registry = HookRegistry.check_if_exists_or_initialize(module)
                for name in reversed(list(registry.hooks)):
                    registry.remove_hook(name, recurse=False)
                delattr(module, _compat.HOOK_REGISTRY)
        drop_own_forwards(self.model)
        self.model.to("cpu")


class GroupCounter:
    """Wraps the two methods of a group that fetch and free its weights, and counts the bytes."""

    def __init__(self) -> None:
        """Count nothing until it is entered."""
        self.nbytes = 0
        self._group: Any = getattr(import_module(_compat.GROUP_OFFLOADING), _compat.GROUP)
        self._methods: dict[str, Callable[[Any], None]] = {}
        self._masters: dict[torch.Tensor, torch.Tensor] = {}

    def __enter__(self) -> None:
        """Begin to count, and to copy where a fetch would only give a weight another name."""
        fetch, free = (getattr(self._group, n) for n in (_compat.GROUP_FETCH, _compat.GROUP_FREE))
        self._methods = {_compat.GROUP_FETCH: fetch, _compat.GROUP_FREE: free}

        def counted_fetch(group: Any) -> None:
            before = {tensor: tensor.data for tensor in _tensors(group)}
            fetch(group)
            for tensor, master in before.items():
                if isinstance(tensor, torch.nn.Parameter):
                    self.nbytes += tensor.nbytes
                if tensor.data_ptr() == master.data_ptr():
                    self._masters[tensor] = master
                    tensor.data = master.clone()

        def counted_free(group: Any) -> None:
            free(group)
            for tensor in _tensors(group):
                tensor.data = self._masters.pop(tensor, tensor.data)

        setattr(self._group, _compat.GROUP_FETCH, counted_fetch)
        setattr(self._group, _compat.GROUP_FREE, counted_free)

    def __exit__(self, *_: object) -> None:
        """Stop."""
        for name, method in self._methods.items():
            setattr(self._group, name, method)


def _tensors(group: Any) -> list[torch.Tensor]:
    """Return the weights and buffers of a group."""
    modules = [t for m in group.modules for t in (*m.parameters(), *m.buffers())]
    return [*modules, *group.parameters, *group.buffers]
