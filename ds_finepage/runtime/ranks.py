"""The ranks of a model agree before each pass, and end together.

[Note: in step]
Every rank runs the same passes in the same order, and each pass has the same collectives. Before
the first op of a pass all ranks compare what they are about to run. A rank that cannot run it says
so, and no rank runs it. All are in step for the next pass: where one has no room, each of them is
refused, so that all move their KV caches to host memory. From the comparison until the pass is
over, a rank that fails leaves the others in the middle of a collective. It posts its error and
closes its connections, so that they fail too. No rank can run another pass after that.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ds_finepage.errors import FinepageError, PlanInfeasibleError, RankError
from ds_finepage.graph.hardware import HardwareProfile

if TYPE_CHECKING:
    from ds_finepage.execution.rank_channel import RankChannel

T = TypeVar("T")

READY, NO_ROOM, FAILED = range(3)
"""What a rank says of a pass: it can run it, it has no room for it, or it fails otherwise."""

UNPLANNED = "not planned"
"""Stands for the collectives of a pass that runs without a plan."""

NUM_SHAPES = 4
"""Inputs whose sizes an error names."""

LINK_BYTES = 4 << 20
"""The tensor that the link between ranks is measured with."""


class Ranks:
    """One rank, which is all there is.

    Attributes:
        has_whole_model: The model's config tells the sizes of what this rank runs.
        collects_weights: The ranks hold each weight together, so all of them run one plan.
    """

    has_whole_model = True
    collects_weights = False

    @property
    def share_model(self) -> bool:
        """True where several ranks have the model together."""
        return self.collects_weights or not self.has_whole_model

    @contextmanager
    def together(self, args: Sequence[Any] = ()) -> Iterator[None]:
        """Hold while a pass is found, planned and run."""
        yield

    def agree(self, collectives: str | None, args: Sequence[Any]) -> None:
        """Go on when all ranks are about to run the same pass.

        Args:
            collectives: Stands for those of the pass, in order; None without a plan.
            args: The arguments of the call. Its integer tensors have to be the same.

        Raises:
            RankError: They are not, or another rank fails before the pass.
            PlanInfeasibleError: Another rank has no room for the pass.
        """

    def shared(self, what: str, make: Callable[[], T]) -> T:
        """Return what every rank is to use: what each has made, where they need not have the same.

        Args:
            what: What it is, and what it depends on; the same on all ranks.
            make: Makes it.

        Raises:
            PlanInfeasibleError: There is no room.
            RankError: Another rank needs something else, or fails.
        """
        return make()

    def most(self, what: str, number: int) -> int:
        """Return the largest number of all ranks that have to use the same one.

        Args:
            what: What it is; the same on all ranks.
            number: That of this rank.

        Raises:
            RankError: Another rank needs something else, or fails.
        """
        return number

    def take_difference(self) -> bool:
        """Tell whether the ranks were about to do different things since the last time."""
        return False

    def of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return some numbers of this rank and of all others, by rank.

        Raises:
            RankError: Another rank is gone.
        """
        return [list(numbers)]

    def with_link(
        self, profile: HardwareProfile, where: torch.device, scratch_bytes: int
    ) -> HardwareProfile:
        """Return a profile with the link between ranks, measured now."""
        return profile


class RankGroup(Ranks):
    """One rank of several; see [Note: in step]."""

    has_whole_model = False
    _advice = (
        "With tensor parallelism every rank must get the same prompts, and draw the same tokens: "
        "give all of them the same inputs and the same seed."
    )

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._is_compared = False  # all ranks know whether they run the pass
        self._is_running = False  # from before the comparison, if that ends well
        self._left: str | None = None
        self._shapes = ""  # of the arguments of the call
        self._has_differed = False

    @contextmanager
    def together(self, args: Sequence[Any] = ()) -> Iterator[None]:
        """Hold while a pass is found, planned and run; :class:`Ranks` describes it.

        Raises:
            RankError: An earlier pass failed in the middle, or another rank fails in this one.
        """
        if self._left is not None:
            raise RankError(f"{self._left} Start all ranks again.")
        self._is_compared = self._is_running = False
        self._shapes = shapes_of(args)
        try:
            yield
        except RankError as error:
            if not self._is_running:
                raise
            raise self._leave(error) from error
        except BaseException as error:
            if self._is_running or not isinstance(error, Exception):
                self._leave(error)
            elif not self._is_compared:
                self._refuse(error)
            raise

    def agree(self, collectives: str | None, args: Sequence[Any]) -> None:
        """Compare the pass with those of the other ranks; :class:`Ranks` describes it."""
        self._is_running = True
        self._compare({"collectives": collectives or UNPLANNED, "integer inputs": _digest(args)})

    def _compare(self, facts: dict[str, str]) -> None:
        """Go on when all ranks have the same facts; else none of them runs the pass."""
        text = json.dumps(facts)
        number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        rows = self._channel.gather((READY, number))
        if all(row == [READY, number] for row in rows):
            return
        self._has_differed = True
        texts = self._channel.gather_texts(json.dumps({"shapes of inputs": self._shapes, **facts}))
        self._is_compared, self._is_running = True, False
        failed = {rank: texts[rank] for rank, row in enumerate(rows) if row[0] != READY}
        if failed:
            has_room = all(row[0] != NO_ROOM for row in rows)
            error = RankError if has_room else PlanInfeasibleError
            raise error(f"{_of_ranks(failed)} No rank has run this pass.")
        raise RankError(
            f"{differences(list(map(json.loads, texts)))} No rank has run this pass. {self._advice}"
        )

    def take_difference(self) -> bool:
        """Tell whether the ranks differed; :class:`Ranks` describes it."""
        found, self._has_differed = self._has_differed, False
        return found

    def _refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one cannot run the pass."""
        status = NO_ROOM if isinstance(error, PlanInfeasibleError) else FAILED
        try:
            rows = self._channel.gather((status, 0))
            self._has_differed = any(row[0] == READY for row in rows)
            self._channel.gather_texts(_text(error))
        except RankError as lost:
            self._leave(lost)

    def _leave(self, error: BaseException) -> RankError:
        """Close the connections after an error; return the error that says whose it was."""
        if not isinstance(error, RankError):
            self._channel.post(_text(error))
            self._left = f"This rank failed in the middle of a pass: {_text(error)}."
        else:
            posted = self._channel.posted()
            self._left = _of_ranks(posted) if posted else f"A pass ended in the middle: {error}"
        self._channel.leave()
        return RankError(self._left)

    def of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return some numbers of all ranks; every rank has to call this between two passes."""
        if self._left is not None:
            raise RankError(f"{self._left} Start all ranks again.")
        return self._channel.gather(numbers)

    def with_link(
        self, profile: HardwareProfile, where: torch.device, scratch_bytes: int
    ) -> HardwareProfile:
        """Measure the link together with the other ranks; :class:`Ranks` describes it."""
        # Budgets differ where shards or free memory do, but all ranks need one size.
        common_bytes = min(row[0] for row in self._channel.gather((scratch_bytes,)))
        rate, latency_ns = self._channel.measure_link(where, min(LINK_BYTES, common_bytes))
        return replace(profile, rank_bytes_per_s=rate, rank_latency_ns=latency_ns)


def shapes_of(args: Sequence[Any]) -> str:
    """Return the sizes of the first tensors of a call that are no weights, in words."""
    tensors = (a for a in args if isinstance(a, torch.Tensor))
    given = (t for t in tensors if not isinstance(t, torch.nn.Parameter))
    return ", ".join("x".join(map(str, t.shape)) for t in itertools.islice(given, NUM_SHAPES))


def differences(facts: Sequence[dict[str, Any]]) -> str:
    """Say in words which facts the ranks do not have in common."""
    names = sorted({name for each in facts for name in each})
    found = []
    for name in names:
        values = [each.get(name) for each in facts]
        if any(value != values[0] for value in values):
            ranks = (f"rank {rank} has {value!r}" for rank, value in enumerate(values))
            found.append(f"The ranks differ in {name}: {', '.join(ranks)}.")
    return " ".join(found)


def _of_ranks(errors: dict[int, str]) -> str:
    return " ".join(f"Rank {rank} failed: {text}" for rank, text in errors.items())


def _text(error: BaseException) -> str:
    text = str(error) if isinstance(error, FinepageError) else repr(error)
    return text.strip()


def _digest(args: Sequence[Any]) -> str:
    """Return a digest of the integer tensors of a call: tokens, positions."""
    found = hashlib.sha256()
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dtype in (torch.int32, torch.int64):
            found.update(repr(tuple(arg.shape)).encode())
            found.update(arg.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


ONE_RANK = Ranks()
