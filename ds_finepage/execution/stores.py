"""Host masters: the one copy of every weight, and the parameters that show it.

While a model is attached, ``parameter.data`` of each weight is its host master: on the CPU the
master itself, on an accelerator a view of the pinned master through its device address. Such a view
reads and writes right over the link and takes no device bytes. A plan never uses the parameters; it
copies masters into the arena. See [Note: how a change of a weight is noticed].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.collectives import RankParts
from ds_finepage.execution.device import device_of
from ds_finepage.execution.masters import HostWeight, rehome
from ds_finepage.execution.watch import DataWatch, data_of, set_data
from ds_finepage.graph.parts import with_parts
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.units import align_up

BLOCK_ALIGNMENT = 512

_ADDRESS = torch.Tensor.data_ptr
_VERSION = attrgetter("_version")

TakeWeights = Callable[[Mapping[str, torch.Tensor], torch.device], list[HostWeight]]
"""Makes the masters of named parameters; the second argument is the device to compute on."""


@dataclass(frozen=True, slots=True)
class WeightChanges:
    """Changes that others made to the weights since the last look.

    Attributes:
        rewritten: Names of weights whose bytes may have changed.
        moved: True where a weight has a new master.
        reshaped: True where a weight has a new shape, layout or dtype.
    """

    rewritten: tuple[str, ...] = ()
    moved: bool = False
    reshaped: bool = False


NO_CHANGES = WeightChanges()


class _Shown:
    """A parameter that shows its master, and the last known signs of a change."""

    def __init__(self, weight: HostWeight, device: torch.device, used: list[DataWatch]) -> None:
        self.weight = weight
        self._device = device
        self.filled: torch.Tensor | None = None  # takes the place of the view meanwhile
        self.watch = DataWatch(weight.parameter, used, self._replacement)
        self.show()
        self.note()

    def show(self) -> None:
        """Let the parameter show its master; a weight in parts stays as ZeRO has it."""
        if self.weight.parts is not None:
            self.view = data_of(self.weight.parameter)
            shape, stride, dtype = self.weight.shape, self.weight.stride, self.weight.dtype
            with torch.inference_mode(False):
                self._form = torch.empty_strided(shape, stride, dtype=dtype)
                self._form.untyped_storage().resize_(0)  # a form without bytes
            return
        self.view = self.weight.shaped(device_of(self._device).show(self.weight.master))
        if not self.shows_view:
            set_data(self.weight.parameter, self.view)

    def show_form(self, *, is_whole: bool) -> None:
        """Give a parameter in parts the form of the whole weight, for a call, or take it away."""
        set_data(self.weight.parameter, self._form if is_whole else self.view)

    @property
    def shows_view(self) -> bool:
        parameter = self.weight.parameter
        if self.weight.parts is not None:
            return parameter.numel() == 0 or self.weight.shape == tuple(self.view.shape)
        return (
            parameter.data_ptr() == self.view.data_ptr()
            and parameter.device == self.view.device
            and self.weight.has_form_of(parameter)
            and parameter.is_inference() == self.view.is_inference()
        )

    @property
    def is_disturbed(self) -> bool:
        return self.watch.was_used or self._signs() != self.seen

    @property
    def is_written(self) -> bool:
        """Tell whether the parameter may have been written."""
        return self.watch.was_used or self._signs()[1] != self.seen[1]

    def note(self) -> None:
        """Treat the present parameter as unchanged."""
        self.seen = self._signs()
        self.watch.clear()

    def _signs(self) -> tuple[int, int]:
        parameter = self.weight.parameter
        return parameter.data_ptr(), parameter._version if _has_version(parameter) else 0

    def _replacement(self, value: torch.Tensor) -> torch.Tensor:
        """Keep a parameter readable that ZeRO frees by an empty tensor."""
        is_partition = self.weight.gathered is not None
        is_freed = is_partition and self.view.numel() > 0 and value.numel() == 0
        return self.view if is_freed else value


class PartTable:
    """The part of a weight table that knows of weights in parts on several ranks."""

    _weights: list[HostWeight]
    _shown: dict[int, _Shown]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(w.nbytes for w in self._weights)

    @property
    def host_bytes(self) -> int:
        """Bytes of their masters in this process."""
        return sum(w.master.numel() for w in self._weights)

    @property
    def parts(self) -> RankParts | None:
        """The ranks that hold the masters together; None where this rank has all of them."""
        return next((w.parts for w in self._weights if w.parts is not None), None)

    def parted(self, graph: TaskGraph) -> TaskGraph:
        """Return a taskgraph that says which weights lie in parts on several ranks."""
        parts = self.parts
        if parts is None:
            return graph
        whole_bytes = {w.name: w.nbytes for w in self._weights if w.parts is not None}
        return with_parts(graph, whole_bytes, parts.num_ranks)

    @contextmanager
    def in_form(self) -> Iterator[None]:
        """Give parameters in parts the form of whole weights, without bytes, during a call."""
        parted = [s for s in self._shown.values() if s.weight.parts is not None]
        for shown in parted:
            shown.show_form(is_whole=True)
        try:
            yield
        finally:
            for shown in parted:
                shown.show_form(is_whole=False)

    def require_whole(self, what: str) -> None:
        """Refuse what runs without a plan if this rank has parts of the weights only.

        Raises:
            StoreError: Some weights lie in parts on several ranks.
        """
        parts = self.parts
        if parts is not None:
            raise StoreError(
                f"{what} cannot run without a plan on {parts.num_ranks} ranks, because each of "
                f"them has a part of every weight. Start with --num_gpus 1, set "
                f"tensor_parallel.autotp_size to {parts.num_ranks}, or set finepage.enabled to "
                f"false for stock ZeRO-Inference."
            )


class WeightTable(PartTable):
    """All weights of a module, tied ones once.

    Attributes:
        names: ``id(parameter)`` -> qualified name.
        masters: Qualified name -> bytes in host memory, 1-d uint8.
        on_device: Qualified name -> the whole weight on the device, from :meth:`load_all` to
            :meth:`unload`; empty otherwise.
    """

    def __init__(self, weights: Iterable[HostWeight], device: torch.device) -> None:
        """Take the weights; :meth:`install` then frees their device bytes."""
        self._weights = list(weights)
        self._device = device
        self._shown = {}  # by id(parameter)
        self._used: list[DataWatch] = []
        self.masters: dict[str, torch.Tensor] = {}
        self.on_device: dict[str, torch.Tensor] = {}
        self._index()

    def _index(self) -> None:
        self.names = {id(w.parameter): w.name for w in self._weights}
        self._by_id = {id(w.parameter): w for w in self._weights}
        self.masters.clear()
        self.masters.update({w.name: w.master for w in self._weights})

    @property
    def block_bytes(self) -> int:
        """Bytes of all weights on the device at once, as :meth:`load_all` places them."""
        return sum(align_up(w.nbytes, BLOCK_ALIGNMENT) for w in self._weights)

    def __contains__(self, parameter: object) -> bool:
        """Tell whether a parameter is one of ours."""
        return id(parameter) in self.names

    # The parameters.

    def install(self) -> None:
        """Let every parameter show its master, which frees its device bytes."""
        for weight in self._weights:
            if id(weight.parameter) not in self._shown:
                shown = _Shown(weight, self._device, self._used)
                self._shown[id(weight.parameter)] = shown
        self._snapshot()

    def restore(self) -> None:
        """Give every parameter back, with its present value."""
        self.unload()
        self.changes()
        for weight in self._weights:
            weight.restore(weight)
        for shown in self._shown.values():
            shown.watch.stop()
        self._shown = {}
        self._snapshot()

    def exchange(self, named: Mapping[str, torch.Tensor], take: TakeWeights) -> None:
        """Continue with the weights that a changed module has now.

        ``named`` are all parameters and large buffers, each once; ``take`` makes masters of new
        ones.

        Raises:
            StoreError: A new parameter has no data, or another attached model has it. Nothing is
                exchanged then.
        """
        new = {name: p for name, p in named.items() if id(p) not in self._by_id}
        taken = {id(w.parameter): w for w in take(new, self._device)}
        weights = []
        for name, parameter in named.items():
            weight = self._by_id.get(id(parameter)) or taken[id(parameter)]
            weight.name = name
            weights.append(weight)
        kept = {id(w.parameter) for w in weights}
        for key in [key for key in self._shown if key not in kept]:
            self._shown.pop(key).watch.stop()
        self._weights = weights
        self.unload()
        self._index()
        self.install()

    # Buffers.

    def written_buffers(self) -> list[str]:
        """Return the names of buffers that may have been written since the last look."""
        return [s.weight.name for s in self._buffers if s.is_written]

    def release(self, tensors: Collection[torch.Tensor]) -> None:
        """Put buffers on the device, as they are; they are weights no longer."""
        self.unload()
        for tensor in tensors:
            self.empty(tensor)
        self.changes()
        gone = {id(tensor) for tensor in tensors}
        for weight in [w for w in self._weights if id(w.parameter) in gone]:
            if device_of(self._device).is_accelerator:
                set_data(weight.parameter, self.fetch(weight.parameter))
            else:
                weight.restore(weight)
            self._shown.pop(id(weight.parameter)).watch.stop()
        self._weights = [w for w in self._weights if id(w.parameter) not in gone]
        self._index()
        self._snapshot()

    # Changes from outside.

    def _snapshot(self) -> None:
        """Store the last known signs in a form that compares fast."""
        all_shown = list(self._shown.values())
        versioned = [s for s in all_shown if _has_version(s.weight.parameter)]
        self._parameters = [s.weight.parameter for s in all_shown]
        self._versioned = [s.weight.parameter for s in versioned]
        self._addresses = [s.seen[0] for s in all_shown]
        self._versions = [s.seen[1] for s in versioned]
        self._buffers = [
            s for s in all_shown if not isinstance(s.weight.parameter, torch.nn.Parameter)
        ]

    def changes(self) -> WeightChanges:
        """Take over the changes that others made since the last look, and return them."""
        if (
            not self._used
            and list(map(_ADDRESS, self._parameters)) == self._addresses
            and list(map(_VERSION, self._versioned)) == self._versions
        ):
            return NO_CHANGES
        return self._take_over([s for s in self._shown.values() if s.is_disturbed])

    def refresh(self) -> WeightChanges:
        """Treat every weight as changed."""
        return self._take_over(list(self._shown.values()))

    def _take_over(self, disturbed: list[_Shown]) -> WeightChanges:
        others = [s for s in disturbed if not s.shows_view]
        for weight in (s.weight for s in others):
            if weight.parts is not None:
                raise StoreError(
                    f"parameter {weight.name} holds a whole tensor, and its weight lies in parts "
                    f"on {weight.parts.num_ranks} ranks. Leave deepspeed.zero.GatheredParameters "
                    f"before the model runs, and change the values inside of it."
                )
        self._used.clear()
        moved = reshaped = False
        # All are read before any partition is written: two weights may have been swapped.
        for shown, value in [(s, self._value_of(s)) for s in others]:
            reshaped = reshaped or not shown.weight.has_form_of(value)
            moved = self._adopt(shown, value) or moved
        for shown in disturbed:
            shown.note()
        self._index()
        self._snapshot()
        return WeightChanges(tuple(s.weight.name for s in disturbed), moved, reshaped)

    def _value_of(self, shown: _Shown) -> torch.Tensor:
        """Return the present tensor of a parameter; a copy where it is a partition."""
        value = data_of(shown.weight.parameter)
        if shown.weight.gathered is None:
            return value
        address = value.untyped_storage().data_ptr()
        is_master = any(address == m.untyped_storage().data_ptr() for m in self.masters.values())
        return value.clone() if is_master else value

    def _adopt(self, shown: _Shown, value: torch.Tensor) -> bool:
        """Take over a new tensor of a parameter; True where that moves its master."""
        weight = shown.weight
        if weight.gathered is not None and weight.has_form_of(value):
            _copy(weight.value, value)
            if not weight.gathered():  # else ZeRO takes it away itself
                shown.show()
            return False
        rehome(weight, value, self._device)
        shown.show()
        return True

    # Weights on the device, outside any plan.

    def fetch(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a full copy of a weight on the device.

        Raises:
            StoreError: The parameter is not one of ours.
        """
        weight = self._by_id.get(id(parameter))
        if weight is None:
            raise StoreError("a parameter that was not there when the model was attached")
        with torch.inference_mode(False):
            full = torch.empty_strided(
                weight.shape, weight.stride, dtype=weight.dtype, device=self._device
            )
        _copy(full, weight.value)
        return full

    def fill(self, parameter: torch.Tensor) -> None:
        """Give a parameter its own copy on the device, for code outside any plan."""
        shown = self._shown.get(id(parameter))
        if shown is not None and shown.filled is None:
            shown.filled = self.fetch(parameter)
            set_data(parameter, shown.filled)

    def empty(self, parameter: torch.Tensor) -> None:
        """Remove that copy; writes into it go to the master."""
        shown = self._shown.get(id(parameter))
        if shown is None or shown.filled is None:
            return
        copy, shown.filled = shown.filled, None
        if parameter.data_ptr() != copy.data_ptr():
            return  # the caller set ``data`` meanwhile; ``changes`` takes it over
        if shown.is_written:
            _copy(shown.weight.value, copy)
        set_data(parameter, shown.view)

    def load_all(self) -> None:
        """Copy every weight to the device, until :meth:`unload`.

        They lie in one block, so that the operating system can use large pages for it.
        """
        found: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            block = torch.empty(self.block_bytes, dtype=torch.uint8, device=self._device)
            end = 0
            for weight in self._weights:
                nbytes = weight.nbytes
                part = block[end : end + nbytes]
                weight.copy_to(part)
                found[weight.name] = weight.shaped(part).detach()
                end += align_up(nbytes, BLOCK_ALIGNMENT)
        self.on_device = found

    def reload(self, names: Iterable[str]) -> None:
        """Copy some weights to the device again, if all weights are there."""
        wanted = set(names) if self.on_device else set()
        for weight in self._weights:
            if weight.name in wanted:
                _copy(self.on_device[weight.name], weight.value)

    def unload(self) -> None:
        """Free the copies that :meth:`load_all` made."""
        self.on_device = {}


def own_weights(module: torch.nn.Module, weights: WeightTable) -> list[torch.Tensor]:
    """Return the parameters and buffers that a module itself holds, as far as they are weights."""
    held = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return [tensor for tensor in held if tensor in weights]


def _has_version(tensor: torch.Tensor) -> bool:
    """Return False for a tensor that was made in inference mode, whatever its data is now."""
    try:
        return bool(_VERSION(tensor) >= 0)
    except RuntimeError:
        return False


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        target.copy_(source)
