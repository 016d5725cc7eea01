"""The heuristics of policy ``finepage``, as switches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GrainedRing:
    """A ring for few large slices, beside which no weight streams less than a grain.

    Attributes:
        length: In units of the length for which bytes and latencies together are least.
        num_slices: The slices that the ring holds.
        grain: In units of a slice.
        keeps_small: Keep the weights that are smaller than the grain.
    """

    length: float
    num_slices: int
    grain: float
    keeps_small: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FinepageOptions:
    """The candidates that a search tries, and when it ends.

    Attributes:
        ring_shares: Lengths of the ring if weights can be cut, as shares of the bytes that have to
            be reloaded. The first is tried first.
        ring_weights: Lengths of the ring for whole weights, in units of each of the largest ones.
        other_length: A ring for whole weights has to be longer than another by this factor.
        large_rings: Lengths of the ring through which just the largest whole weights stream, in
            units of the least of them. It needs the fewest copies.
        nearly_full: Those rings, and embedding tables that stay, are tried if at most this share of
            the weights is missing: they cost bytes, and save copies. The rings of a rank, at most
            at that share over the number of ranks.
        large_sizes: As many sizes count as the largest, one after another.
        grained_rings: Rings for few large slices to try.
        rings_of_short_passes: More of them. A short one leaves room to keep weights in a small
            arena. One that holds a single slice needs the fewest copies, and the next copy waits
            for the slice's task. Long ones help where weights are small beside the activations:
            some stretches of a pass use many weights in a short time. Two lengths are close: whole
            slices fill one of them, and leave a gap in the other.
        slices_a_task: Most slices to stream, in units of the tasks, where a longer ring has room.
        always_slices: As many slices are always fine.
        most_short_lengths: Plans with more slices to try where no longer ring has room.
        slices_in_ring: A slice of a cut weight is at most the ring divided by this.
        lower_factors: Sizes of the lower region of a small arena, in units of the smallest in which
            every task can run.
        held_copies: Longest times to hold rows that are copied to host memory, in units of the time
            of their copy, ascending. A long pass tries the last one alone.
        fixed_share: Weights up to this share of the largest one (norms, biases) are always kept.
        good_enough: A plan of whole weights within this factor of the lower bound of time makes the
            two-horizon simulation needless, with sets of kept weights or without.
        ends_search: A plan within this factor of that bound ends the search for better graphs, with
            cheap tasks run again, and for shorter times to hold rows. In a thorough search,
            ``equal_times`` is the most that does.
        fast_enough: A plan within this factor of that bound makes whole weights needless. In a
            thorough search, this is at most ``equal_times`` too.
        equal_times: Times within this factor of the least are equal, and fewer bytes decide. A plan
            within this factor of the bound, and with few bytes, ends a list of candidates.
        few_bytes: As many bytes are few, in units of the lower bound of bytes.
        most_tasks_of_short: A pass with more tasks is long: its plans take long to make. It uses
            the two-horizon simulation, which then takes seconds, only if there is no other plan.
        settling_rounds: Passes to plan again by the published algorithm until one leaves what it
            finds.
        tries_sets: Try sets of whole weights to keep in short passes.
        settles: Try plans by the published algorithm in short passes.
        tries_whole: Try plans of whole weights even where weights can be cut and there is room.
        recomputes: Try the pass in which cheap tasks run again.
        delays_experts: Try reloads of experts after their router.
        tries_exact: Plan tiny passes by dynamic programming.
    """

    ring_shares: tuple[float, ...] = (0.012,)
    ring_weights: tuple[float, ...] = (1.0, 2.0, 1.5, 3.0, 4.0)
    other_length: float = 1.1
    large_rings: tuple[float, ...] = (1.0, 2.0)
    large_sizes: int = 2
    nearly_full: float = 0.5
    grained_rings: tuple[GrainedRing, ...] = (
        GrainedRing(1, 2, 1, keeps_small=True),
        GrainedRing(1, 2, 0.5),
        GrainedRing(0.6, 3, 1),
        GrainedRing(0.85, 4, 1),
        GrainedRing(2, 2, 1),
        GrainedRing(1.5, 4, 1),
        GrainedRing(4, 2, 1),
    )
    rings_of_short_passes: tuple[GrainedRing, ...] = (
        GrainedRing(1, 1, 1, keeps_small=True),
        GrainedRing(1.4, 1, 1),
        GrainedRing(0.5, 2, 1, keeps_small=True),
        GrainedRing(1.4, 2, 1, keeps_small=True),
        GrainedRing(1.5, 2, 1, keeps_small=True),
        GrainedRing(0.7, 2, 0.5, keeps_small=True),
        GrainedRing(1.5, 2, 0.5),
        GrainedRing(3, 2, 0.5),
        GrainedRing(4, 4, 0.5),
        GrainedRing(6, 4, 0.5),
    )
    slices_a_task: float = 1.25
    always_slices: int = 500
    most_short_lengths: int = 4
    slices_in_ring: int = 4
    lower_factors: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    held_copies: tuple[float, ...] = (1.0, math.inf)
    fixed_share: float = 0.001
    good_enough: float = 1.02
    ends_search: float = 1.02
    fast_enough: float = 1.005
    equal_times: float = 1.001
    few_bytes: float = 1.05
    most_tasks_of_short: int = 800
    settling_rounds: int = 3
    tries_sets: bool = True
    settles: bool = True
    tries_whole: bool = True
    recomputes: bool = True
    delays_experts: bool = True
    tries_exact: bool = True

    def of_thorough_searches(self) -> FinepageOptions:
        """Return the options of a search that looks for the last thousandth of the time."""
        return replace(
            self,
            ends_search=min(self.ends_search, self.equal_times),
            fast_enough=min(self.fast_enough, self.equal_times),
        )


DEFAULTS = FinepageOptions()
