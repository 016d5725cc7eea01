"""The collectives in a plan: ops that return when all ranks have done their part.

An asynchronous collective writes into its result until someone waits for it. An extent of the arena
may belong to another buffer by then. These ops begin and wait in one call. On an accelerator the
stream of the caller waits.

[Note: weights in parts]
The host masters of a weight may lie in equal parts on several ranks, as ZeRO shards them. A rank
reloads its own part into its place in the weight's extent. The ranks then collect the parts of the
others, all of them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from ds_finepage._compat.torch import group_named
from ds_finepage.errors import RankError


@torch.library.custom_op("finepage::all_reduce_", mutates_args=("x",))
def all_reduce_(x: torch.Tensor, reduce_op: str, group: str, num_ranks: int) -> None:
    """Reduce the tensors of all ranks into each of them.

    Args:
        x: This rank's tensor, contiguous.
        reduce_op: A name in ``graph.collectives.REDUCE_OPS``.
        group: The name of the process group.
        num_ranks: Its ranks; for predictions.

    Raises:
        RankError: Another rank is gone.
    """
    with ranks_answer("an all-reduce with the other ranks failed"):
        reduction = getattr(distributed.ReduceOp, reduce_op.upper())
        distributed.all_reduce(x, op=reduction, group=group_named(group))


@all_reduce_.register_fake
def _(x: torch.Tensor, reduce_op: str, group: str, num_ranks: int) -> None:
    pass


@torch.library.custom_op("finepage::all_gather_into_", mutates_args=("out",))
def all_gather_into_(out: torch.Tensor, x: torch.Tensor, group: str, num_ranks: int) -> None:
    """Write the tensors of all ranks into one, one after the other along the first dimension.

    Both are contiguous; ``num_ranks`` is for predictions.

    Raises:
        RankError: Another rank is gone.
    """
    gather_into(out, x, group)


@all_gather_into_.register_fake
def _(out: torch.Tensor, x: torch.Tensor, group: str, num_ranks: int) -> None:
    pass


def gather_into(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Write the tensors of all ranks into one, as :func:`all_gather_into_` does.

    This rank's tensor may be its place in the result.

    Raises:
        RankError: Another rank is gone.
    """
    gather = getattr(distributed, "all_gather_single", None)  # its name since torch 2.13
    with ranks_answer("an all-gather with the other ranks failed"):
        (gather or distributed.all_gather_into_tensor)(out, x, group=group_named(group))


@contextmanager
def ranks_answer(otherwise: str) -> Iterator[None]:
    """Raise what torch raises where a rank does not answer.

    Raises:
        RankError: It begins with ``otherwise``.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{otherwise}: {error}") from error


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
