"""Weights whose host masters lie in equal parts on several ranks, as ZeRO shards them.

A rank reloads its own part into its place in the weight's extent. The ranks then collect the parts
of the others, all of them in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_finepage.execution.collectives import gather_into


@dataclass(frozen=True, slots=True)
class RankParts:
    """The place of a rank among those that hold a weight together.

    The group is the name of a process group.
    """

    rank: int
    num_ranks: int
    group: str

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the bytes of a weight; 1-d uint8, as is ``whole``."""
        nbytes = whole.numel() // self.num_ranks
        return whole[self.rank * nbytes : (self.rank + 1) * nbytes]

    def collect(self, whole: torch.Tensor) -> None:
        """Bring the parts of the other ranks in; each of them has to do this.

        Args:
            whole: The bytes of the weight, 1-d uint8, with this rank's part in place.

        Raises:
            RankError: Another rank is gone.
        """
        gather_into(whole, self.own(whole), self.group)


def freed(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in host memory that has a form and no bytes."""
    with torch.inference_mode(False):
        found = torch.empty_strided(shape, stride, dtype=dtype)
        found.untyped_storage().resize_(0)
    return found
