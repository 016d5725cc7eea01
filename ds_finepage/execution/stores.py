"""Host masters: the one copy of every weight, and the parameters that show it.

While a model is attached, ``parameter.data`` of each weight is its host master: on the CPU the
master itself, on an accelerator a view of the pinned master through its device address. Such a view
reads and writes right over the link and takes no device bytes. A plan never uses the parameters; it
copies masters into the arena. See [Note: how a change of a weight is noticed].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.disk import files_of
from ds_finepage.execution.file_weights import FileWeights
from ds_finepage.execution.masters import HostWeight, rehome
from ds_finepage.execution.watch import DataWatch, data_of, set_data
from ds_finepage.execution.weight_places import VERSION, PlaceTable, Shown, has_version
from ds_finepage.units import align_up

BLOCK_ALIGNMENT = 512

_ADDRESS = torch.Tensor.data_ptr
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


class WeightTable(PlaceTable):
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
        self.files = FileWeights(device)
        self._index()

    def _index(self) -> None:
        self.names = {id(w.parameter): w.name for w in self._weights}
        self._by_id = {id(w.parameter): w for w in self._weights}
        self.masters.clear()
        self.masters.update({w.name: w.master for w in self._weights})
        self.files.follow({w.name: w.source for w in self._weights if w.source is not None})

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
                self._shown[id(weight.parameter)] = Shown(weight, self._device, self._used)
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
        versioned = [s for s in all_shown if has_version(s.weight.parameter)]
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
            and list(map(VERSION, self._versioned)) == self._versions
        ):
            return NO_CHANGES
        return self._take_over([s for s in self._shown.values() if s.is_disturbed])

    def refresh(self) -> WeightChanges:
        """Treat every weight as changed."""
        return self._take_over(list(self._shown.values()))

    def _take_over(self, disturbed: list[Shown]) -> WeightChanges:
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
        filed = [s for s in disturbed if s.weight.source is not None]
        for shown, source in zip(filed, files_of([s.weight.value for s in filed]), strict=True):
            if source is None:  # its pages were written
                moved = self._adopt(shown, shown.weight.value)
        for shown in disturbed:
            shown.note()
        self._index()
        self._snapshot()
        return WeightChanges(tuple(s.weight.name for s in disturbed), moved, reshaped)

    def _value_of(self, shown: Shown) -> torch.Tensor:
        """Return the present tensor of a parameter; a copy where it is a partition."""
        value = data_of(shown.weight.parameter)
        if shown.weight.gathered is None:
            return value
        address = value.untyped_storage().data_ptr()
        is_master = any(address == m.untyped_storage().data_ptr() for m in self.masters.values())
        return value.clone() if is_master else value

    def _adopt(self, shown: Shown, value: torch.Tensor) -> bool:
        """Take over a new tensor of a parameter; True where that moves its master."""
        weight = shown.weight
        weight.source = None
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
                if weight.source is None:
                    weight.copy_to(part)
                else:
                    self.files.reader.copy(weight.source, part)
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


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        target.copy_(source)
