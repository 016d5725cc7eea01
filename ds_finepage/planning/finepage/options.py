"""The numbers and the switches of policy ``finepage``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FinepageOptions:
    """The switches of a search, and the numbers that end it.

    Attributes:
        fixed_share: Weights up to this share of the largest one that is no embedding table (norms,
            biases) are always kept.
        ring_share: Length of the first ring for cut weights, as a share of the bytes that have to
            be reloaded.
        slices_in_ring: A slice in that ring is at most the ring divided by this.
        slices_a_task: Most slices to stream, in units of the tasks, where a longer ring has room.
        good_enough: A plan within this factor of the lower bound of time ends the search for
            plans of other kinds.
        equal_times: Times within this factor of the least are equal, and fewer bytes decide. A plan
            within this factor of the bound makes whole weights needless where weights can be cut.
            With few bytes, it ends a list of candidates.
        few_bytes: As many bytes are few, in units of the lower bound of bytes.
        tries_whole: Try plans of whole weights even where weights can be cut and there is room.
        recomputes: Run cheap tasks again where a pass has no room otherwise.
        delays_experts: Try reloads of experts after their router.
    """

    fixed_share: float = 0.001
    ring_share: float = 0.012
    slices_in_ring: int = 4
    slices_a_task: float = 1.25
    good_enough: float = 1.02
    equal_times: float = 1.005
    few_bytes: float = 1.02
    tries_whole: bool = True
    recomputes: bool = True
    delays_experts: bool = True


DEFAULTS = FinepageOptions()
