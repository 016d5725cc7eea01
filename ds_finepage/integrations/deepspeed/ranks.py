"""Several ranks under DeepSpeed: their setups are compared, and then each runs its own shard."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch

from ds_finepage.config import SECTION
from ds_finepage.errors import FinepageError, RankError
from ds_finepage.execution.collectives import RankParts
from ds_finepage.runtime.parted_ranks import PartedRanks
from ds_finepage.runtime.ranks import ONE_RANK, RankGroup, Ranks, differences

PACKAGES = ("torch", "transformers", "deepspeed", "ds_finepage")
"""Packages whose versions must be the same on all ranks."""

STORE_KEY = "ds_finepage/setup"
"""Prefix of the keys in the store; the engine, the round and the rank follow."""

VALUE, FAILED = "value", "error"

_engines = itertools.count()


def compare_setups(ds_config: Mapping[str, Any], check: Callable[[], bool]) -> None:
    """Check the setup of this rank, then compare it with those of the others.

    Every rank says what it has, so that none waits for a rank that refused its setup, or that runs
    without finepage. The ranks meet in the store of the process group.

    Args:
        ds_config: Of this rank.
        check: Refuses the setup; returns whether this rank waits for every other one and compares.

    Raises:
        FinepageError: The check refuses the setup.
        RankError: Another rank has another setup, or refuses its own.
    """
    from deepspeed import comm

    if not comm.is_initialized() or comm.get_world_size() == 1:
        check()
        return
    meetings = Meetings()
    try:
        compares = check()
    except FinepageError as error:
        meetings.fail(error)
        raise
    if not compares:
        meetings.post(facts_of(ds_config))
        return
    text = differences(meetings.gather(facts_of(ds_config)))
    if text:
        raise RankError(f"{text} Start all ranks with the same ds_config and versions.")


class Meetings:
    """Rounds in which all ranks say what they have, through the store of the process group."""

    def __init__(self) -> None:
        """Take part; every rank has to do this."""
        from deepspeed import comm

        from ds_finepage._compat.torch import _get_default_store

        self._rank, self._num_ranks = comm.get_rank(), comm.get_world_size()
        self._store, self._number = _get_default_store(), next(_engines)
        self._round = 0

    def post(self, value: Any) -> None:
        """Say what this rank has, and wait for no other."""
        self._post({VALUE: value})

    def fail(self, error: Exception) -> None:
        """Let the other ranks know of an error of this one."""
        self._post({FAILED: str(error)})

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; the store's timeout holds.

        Raises:
            RankError: A rank has failed, or does not come.
        """
        self.post(value)
        found = []
        for rank in range(self._num_ranks):
            try:
                posted = json.loads(self._store.get(self._key(rank)))
            except RuntimeError as error:
                raise RankError(
                    f"rank {rank} has not come: {error} Every rank must import ds_finepage before "
                    f"deepspeed.initialize, and enable finepage."
                ) from error
            if FAILED in posted:
                raise RankError(f"rank {rank} refuses its setup: {posted[FAILED]}")
            found.append(posted[VALUE])
        return found

    def _post(self, posted: Mapping[str, Any]) -> None:
        self._round += 1
        self._store.set(self._key(self._rank), json.dumps(posted))

    def _key(self, rank: int) -> str:
        return f"{STORE_KEY}/{self._number}/{self._round}/{rank}"


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
    """Return the ranks that hold a parameter of ZeRO in parts; None where it has no other."""
    from deepspeed import comm

    group = parameter.ds_process_group
    num_ranks = comm.get_world_size(group=group)
    if num_ranks == 1:
        return None
    return RankParts(comm.get_rank(group=group), num_ranks, group.group_name)


def ranks_of_model(model: torch.nn.Module) -> Ranks:
    """Return the ranks that a model is cut over, or that hold its weights together.

    Every rank has to call this.
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
