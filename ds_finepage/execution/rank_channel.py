"""Lets the ranks of a model talk to each other beside its collectives.

Numbers and texts go over a gloo group of their own, so that they need no device. An error of one
rank goes into the store that the process group was made with. Other ranks find it there after
their own collective has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import distributed

from ds_finepage._compat.torch import _get_default_store
from ds_finepage.execution.collectives import all_reduce_, ranks_answer
from ds_finepage.execution.probe import seconds_of
from ds_finepage.units import NS_PER_S

STORE_KEY = "ds_finepage/failed"
"""Prefix of the keys in the store; the rank follows."""

SMALL_ELEMENTS = 2
"""Of the smallest tensor that measures a link."""

RANK_GONE = "another rank is gone"


class RankChannel:
    """Connects this rank to the others, and raises RankError if it asks them and one is gone."""

    def __init__(self, group: str) -> None:
        """Connect all ranks; each of them has to do this.

        The group is that of the model's collectives.
        """
        self.rank = distributed.get_rank()
        self.num_ranks = distributed.get_world_size()
        self._of_model = group
        self._store = _get_default_store()
        self._group: Any = distributed.new_group(backend="gloo")

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks.

        Raises:
            RankError: Another rank is gone.
        """
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        with ranks_answer(RANK_GONE):
            distributed.all_gather(found, mine, group=self._group)
        return [row.tolist() for row in found]

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks.

        Raises:
            RankError: Another rank is gone.
        """
        found: list[str] = [""] * self.num_ranks
        with ranks_answer(RANK_GONE):
            distributed.all_gather_object(found, text, group=self._group)
        return found

    def share(self, value: Any) -> Any:
        """Return the value of rank 0; any object that can be pickled.

        Raises:
            RankError: Another rank is gone.
        """
        found = [value]
        with ranks_answer(RANK_GONE):
            distributed.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def post(self, text: str) -> None:
        """Leave an error of this rank for the others; nothing where the store is gone."""
        with suppress(RuntimeError):
            self._store.set(f"{STORE_KEY}/{self.rank}", text)

    def posted(self) -> dict[int, str]:
        """Return the errors that other ranks have left."""
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            for rank in range(self.num_ranks):
                if rank != self.rank and self._store.check([f"{STORE_KEY}/{rank}"]):
                    found[rank] = self._store.get(f"{STORE_KEY}/{rank}").decode()
        return found

    def leave(self) -> None:
        """Close every connection, so that a rank that waits for this one gets an error at once."""
        with suppress(RuntimeError, ValueError, AssertionError):
            distributed.destroy_process_group()

    def measure_link(self, where: torch.device, scratch_bytes: int) -> tuple[float, int]:
        """Measure the link between ranks; each of them has to do this.

        Args:
            where: The device of the collectives.
            scratch_bytes: The most bytes to use there.

        Returns:
            Its bytes per second, and the time of a step in nanoseconds.

        Raises:
            RankError: Another rank is gone.
        """
        steps = 2 * (self.num_ranks - 1)
        elements = max(2 * SMALL_ELEMENTS, scratch_bytes // 4)
        with torch.inference_mode(False), torch.no_grad():
            scratch = torch.zeros(elements, dtype=torch.float32, device=where)
            self._reduce_ns(scratch)  # connects the ranks
            small_ns, large_ns = self._reduce_ns(scratch[:SMALL_ELEMENTS]), self._reduce_ns(scratch)
        sent_bytes = steps * scratch.nbytes // self.num_ranks
        bytes_ns = max(large_ns - small_ns, large_ns // 2, 1)  # a small tensor tells little
        return sent_bytes * NS_PER_S / bytes_ns, small_ns // steps

    def _reduce_ns(self, tensor: torch.Tensor) -> int:
        reduce = partial(all_reduce_, tensor, "sum", self._of_model, self.num_ranks)
        return int(seconds_of(reduce, tensor.device) * NS_PER_S)
