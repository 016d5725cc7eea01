"""The heuristics of policy ``finepage``, as switches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FinepageOptions:
    """The candidates that a search tries, and when it ends.

    Attributes:
        ring_shares: Lengths of the ring if weights can be cut, as shares of the bytes that have to
            be reloaded. The first is tried first.
        ring_weights: Lengths of the ring for whole weights, in units of each of the largest ones.
        slices_in_ring: A slice of a cut weight is at most the ring divided by this.
        lower_factors: Sizes of the lower region of a small arena, in units of the smallest in which
            every task can run.
        fixed_share: Weights up to this share of the largest one (norms, biases) are always kept.
        good_enough: A plan within this factor of its lower bound of time ends the search.
        max_tasks_for_horizon: A longer pass uses the two-horizon simulation, which then takes
            seconds, only if there is no other plan.
        recomputes: Try the pass in which cheap tasks run again.
        delays_experts: Try reloads of experts after their router.
        tries_exact: Plan tiny passes by dynamic programming.
    """

    ring_shares: tuple[float, ...] = (0.012, 0.018, 0.006, 0.03)
    ring_weights: tuple[float, ...] = (1.0, 2.0, 1.5, 3.0, 4.0)
    slices_in_ring: int = 4
    lower_factors: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    fixed_share: float = 0.001
    good_enough: float = 1.02
    max_tasks_for_horizon: int = 400
    recomputes: bool = True
    delays_experts: bool = True
    tries_exact: bool = True


DEFAULTS = FinepageOptions()
