"""Where the weights of a module lie, and the parameters that show them.

Most masters are whole in host memory. On several ranks each has a part, and a weight that was
loaded from a file may stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.collectives import RankParts
from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.file_weights import FileWeights
from ds_finepage.execution.masters import HostWeight
from ds_finepage.execution.watch import DataWatch, data_of, set_data
from ds_finepage.graph.parts import with_parts
from ds_finepage.graph.taskgraph import TaskGraph

VERSION = attrgetter("_version")


class Shown:
    """A parameter that shows its master, and the last known signs of a change."""

    def __init__(self, weight: HostWeight, device: torch.device, used: list[DataWatch]) -> None:
        self.weight = weight
        self._device = device
        self.form: torch.Tensor | None = None
        self.filled: torch.Tensor | None = None  # takes the place of the view meanwhile
        self.watch = DataWatch(weight.parameter, used, self._replacement)
        self.show()
        self.note()

    def show(self) -> None:
        """Let the parameter show its master; a weight in parts stays as ZeRO has it.

        ``form`` is what it shows instead while plans run: a whole weight, which is not read.
        """
        device, self.form = device_of(self._device), None
        if self.weight.parts is not None:
            self.view = data_of(self.weight.parameter)
            shape, stride, dtype = self.weight.shape, self.weight.stride, self.weight.dtype
            with torch.inference_mode(False):
                self.form = torch.empty_strided(shape, stride, dtype=dtype)
                self.form.untyped_storage().resize_(0)  # a form without bytes
            return
        if self.weight.source is not None and isinstance(device, Accelerator):
            self.view = self.weight.value  # no device reads the pages of a file
            self.form = self.weight.shaped(device.form(self.weight.master))
        else:
            self.view = self.weight.shaped(device.show(self.weight.master))
        if not self.shows_view:
            set_data(self.weight.parameter, self.view)

    @property
    def shows_view(self) -> bool:
        """Tell whether the parameter is as it was left."""
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
        """Tell whether the parameter may have been written, or shows something else."""
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
        return parameter.data_ptr(), parameter._version if has_version(parameter) else 0

    def _replacement(self, value: torch.Tensor) -> torch.Tensor:
        """Keep a parameter readable that ZeRO frees by an empty tensor."""
        is_partition = self.weight.gathered is not None
        is_freed = is_partition and self.view.numel() > 0 and value.numel() == 0
        return self.view if is_freed else value


class PlaceTable:
    """The part of a weight table that knows which weights are not whole in host memory.

    They lie in parts on several ranks, or in files.

    Attributes:
        files: The weights that lie in files.
    """

    _weights: list[HostWeight]
    _shown: dict[int, Shown]
    _device: torch.device
    _index: Callable[[], None]
    files: FileWeights

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(w.nbytes for w in self._weights)

    @property
    def host_bytes(self) -> int:
        """Bytes of their masters in this process, and copies of those that are mapped files."""
        held = sum(w.master.numel() for w in self._weights if w.source is None)
        return held + self.files.host_bytes

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

    def forget_files(self) -> None:
        """Keep all weights in host memory; on a CPU mapped files are as good."""
        device = device_of(self._device)
        for weight in (w for w in self._weights if w.source is not None):
            weight.source, mapped = None, weight.master
            weight.master = device.pinned(mapped)
            if weight.master is not mapped:
                set_data(weight.parameter, weight.value)  # one weight at a time is there twice
        self._index()

    @contextmanager
    def in_form(self) -> Iterator[None]:
        """Give parameters in parts, or in files, the form of whole weights during a call."""
        others = [s for s in self._shown.values() if s.form is not None]
        for shown in others:
            assert shown.form is not None
            set_data(shown.weight.parameter, shown.form)
        try:
            yield
        finally:
            for shown in others:
                set_data(shown.weight.parameter, shown.view)

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


def has_version(tensor: torch.Tensor) -> bool:
    """Return False for a tensor that was made in inference mode, whatever its data is now."""
    try:
        return bool(VERSION(tensor) >= 0)
    except RuntimeError:
        return False
