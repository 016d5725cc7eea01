"""Several ranks under DeepSpeed: their setups are compared, and then each runs its own shard."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from ds_finepage.config import SECTION
from ds_finepage.errors import FinepageError, RankError
from ds_finepage.execution.parts import RankParts
from ds_finepage.runtime.parted_ranks import PartedRanks
from ds_finepage.runtime.ranks import ONE_RANK, RankGroup, Ranks, differences

PACKAGES = ("torch", "transformers", "deepspeed", "ds_finepage")
"""Packages whose versions must be the same on all ranks."""

STORE_KEY = "ds_finepage/setup"
"""Prefix of the keys in the store; the number of the engine and the rank follow."""

FAILED = "error"

_engines = itertools.count()


class Setup:
    """The setup of one rank, on its way to be compared.

    Attributes:
        wants_others: This rank waits until every other rank has come, and compares.
    """

    wants_others = False


@contextmanager
def setup_of_all_ranks(ds_config: Mapping[str, Any]) -> Iterator[Setup]:
    """Check the setup of this rank, then compare it with those of the others.

    Every rank says what it has, so that none waits for a rank that refused its setup, or that runs
    without finepage. The ranks meet in the store of the process group.

    Args:
        ds_config: Of this rank.

    Raises:
        RankError: Another rank has another setup, or refuses its own.
    """
    from deepspeed import comm

    setup = Setup()
    number = next(_engines)
    if not comm.is_initialized() or comm.get_world_size() == 1:
        yield setup
        return
    from ds_finepage._compat.torch import _get_default_store

    ranks = Meeting(_get_default_store(), number, comm.get_rank(), comm.get_world_size())
    try:
        yield setup
    except FinepageError as error:
        ranks.post({FAILED: str(error)})
        raise
    ranks.post(facts_of(ds_config))
    if setup.wants_others:
        ranks.compare()


class Meeting:
    """Compares what the ranks have posted in a store."""

    def __init__(self, store: Any, name: int | str, rank: int, num_ranks: int) -> None:
        """Take part.

        Args:
            store: The store of the process group.
            name: Tells this meeting from others.
            rank: The number of this rank.
            num_ranks: Ranks altogether.
        """
        self._store, self._rank = store, rank
        self._keys = [f"{STORE_KEY}/{name}/{each}" for each in range(num_ranks)]

    def post(self, facts: Mapping[str, Any]) -> None:
        """Say what this rank has."""
        self._store.set(self._keys[self._rank], json.dumps(facts))

    def posted(self) -> list[dict[str, Any]]:
        """Wait for the other ranks, and return the facts of all; the store's timeout holds.

        Raises:
            RankError: A rank has failed, or does not come.
        """
        found: list[dict[str, Any]] = []
        for rank, key in enumerate(self._keys):
            try:
                found.append(json.loads(self._store.get(key)))
            except RuntimeError as error:
                raise RankError(
                    f"rank {rank} has not come: {error} Every rank must import ds_finepage before "
                    f"deepspeed.initialize, and enable finepage."
                ) from error
            if FAILED in found[-1]:
                raise RankError(f"rank {rank} refuses its setup: {found[-1][FAILED]}")
        return found

    def compare(self) -> None:
        """Wait for the other ranks.

        Raises:
            RankError: A rank has other facts, has failed, or does not come.
        """
        text = differences(self.posted())
        if text:
            raise RankError(f"{text} Start all ranks with the same ds_config and versions.")


class Meetings:
    """Several meetings in a row, all of the same ranks."""

    def __init__(self) -> None:
        """Take part; every rank has to do this."""
        from deepspeed import comm

        from ds_finepage._compat.torch import _get_default_store

        self.rank, self._num_ranks = comm.get_rank(), comm.get_world_size()
        self._store, self._number = _get_default_store(), next(_engines)
        self._rounds = itertools.count()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks.

        Raises:
            RankError: A rank has failed, or does not come.
        """
        meeting = self._next()
        meeting.post({"value": value})
        return [each["value"] for each in meeting.posted()]

    def fail(self, error: Exception) -> None:
        """Let the other ranks know of an error of this one."""
        self._next().post({FAILED: str(error)})

    def _next(self) -> Meeting:
        name = f"{self._number}/{next(self._rounds)}"
        return Meeting(self._store, name, self.rank, self._num_ranks)


def facts_of(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks."""
    section = ds_config.get(SECTION)
    section = section if isinstance(section, Mapping) else {}
    tensor_parallel = ds_config.get("tensor_parallel") or {}
    return {
        **{f"version of {name}": version(name) for name in PACKAGES},
        **{
            f"{SECTION}.{key}": json.loads(json.dumps(v, default=str)) for key, v in section.items()
        },
        "tensor_parallel.autotp_size": tensor_parallel.get("autotp_size", 1),
    }


def parts_of(parameter: Any) -> RankParts | None:
    """Return the ranks that hold a parameter of ZeRO in parts; None where this rank has all of it.

    Args:
        parameter: A parameter that ZeRO has partitioned.
    """
    from deepspeed import comm

    group = parameter.ds_process_group
    num_ranks = comm.get_world_size(group=group)
    if num_ranks == 1:
        return None
    return RankParts(comm.get_rank(group=group), num_ranks, group.group_name)


def ranks_of_model(model: torch.nn.Module) -> Ranks:
    """Return the ranks that a model is cut over, or that hold its weights together.

    Every rank has to call this.

    Args:
        model: The model, which ZeRO has partitioned.
    """
    from deepspeed import comm

    if not comm.is_initialized() or comm.get_world_size() == 1:
        return ONE_RANK
    from deepspeed.utils import groups

    from ds_finepage.execution.rank_channel import RankChannel

    zero = (parts_of(p) for p in model.parameters() if hasattr(p, "ds_tensor"))
    parts = next((each for each in zero if each is not None), None)
    if parts is not None:
        return PartedRanks(RankChannel(parts.group))
    return RankGroup(RankChannel(groups.get_tensor_model_parallel_group().group_name))
