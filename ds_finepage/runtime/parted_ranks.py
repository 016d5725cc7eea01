"""Ranks that hold every weight together, a part each, and run the same plan on their own inputs.

[Note: one plan for all ranks]
A pass collects the parts of weights from all ranks in the order of its plan, so all ranks need one
plan. Rank 0 makes it, with its own rates, for the smallest arena of all ranks, and the others take
it. Everything that leads to a plan has to be equal, too: measured costs are those of rank 0, and
the room for live tensors is the largest of all ranks. Before each of these steps the ranks compare
what they are about to do, as they do before a pass. So a rank that is about to do something else,
because its prompt has another length for example, is an error on every rank, and none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.codec import fingerprint
from ds_finepage.graph.parts import on_device
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.ranks import UNPLANNED, RankGroup, T


def shape_of(graph: TaskGraph) -> str:
    """Return a digest of a pass that is the same on all ranks that have the same pass."""
    return fingerprint(on_device(graph, "rank:0"))[:16]


NEXT_STEP = "the next step"
"""Stands for what a rank is about to do, in an error."""


class PartedRanks(RankGroup):
    """One rank of several that hold the weights together; see [Note: one plan for all ranks]."""

    collects_weights = True
    _advice = (
        "Ranks that hold the weights together run the same steps, on inputs of their own: give all "
        "of them prompts of the same shape, padded on all or on none, and the same settings."
    )

    def agree(self, collectives: str | None, args: Sequence[Any]) -> None:
        """Compare the collectives of the pass; the inputs of the ranks may differ."""
        self._is_running = True
        self._compare({NEXT_STEP: f"a pass with collectives {collectives or UNPLANNED}"})

    def shared(self, what: str, make: Callable[[], T]) -> T:
        """Return what rank 0 makes; :class:`Ranks` describes it."""
        made: T | None = None
        refusal: PlanInfeasibleError | None = None
        if self._channel.rank == 0:
            try:
                made = make()
            except PlanInfeasibleError as error:
                refusal = error.bare()
        self._compare({NEXT_STEP: what})
        made, text, least = self._channel.share(
            (made, str(refusal or ""), refusal and refusal.min_budget_bytes)
        )
        if text:
            raise refusal or PlanInfeasibleError(text, least)
        assert made is not None
        return made

    def most(self, what: str, number: int) -> int:
        """Return the largest number of all ranks; :class:`Ranks` describes it."""
        self._compare({NEXT_STEP: what})
        return max(row[0] for row in self._channel.gather((number,)))
