"""Decides how many tokens a draft makes before the model checks them.

A round is ``k`` steps of the draft and one pass of the model. If each token is accepted with the
chance ``a``, a round yields ``1 + a + ... + a^k`` tokens (Leviathan et al., arXiv 2211.17192). The
best ``k`` gives most tokens a second.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

LENGTHS = (0, 1, 3, 6, 9, 13, 20, 29)
"""What ``k`` may be. A pass checks one token more. Those from 6 to 13 share a plan, which has room
for 16 rows, and so do longer ones, for 32."""

FIRST_LENGTH = 6
"""What it is before times are known."""

PRIOR_ACCEPTANCE = 0.8
"""Taken for the chance of a token before any was checked."""

PRIOR_WEIGHT = 3.0
"""For so many checked tokens the prior counts."""

MEMORY = 0.96
"""What a checked token counts, relative to the next one. So the last 25 count. With fewer, their
noise chooses a length that costs 6% of the tokens a second; with more, a change is seen late."""

ROUNDS_BETWEEN_TRIALS = 8
"""If drafting does not pay, a single token is drafted so often, in case it begins to. A draft that
has not been worth its room for twice as many rounds gives it back."""

MOST_ROOM_SHARE = 1 / 3
"""More of a pass is never expected to be saved: ops take their time, whatever is copied."""

NUM_TIMES = 5
"""The last times whose median counts. The first ones, which capture and plan, pass by."""


@dataclass
class Price:
    """The tokens of a draft so far, and the last times of draft and model.

    Attributes:
        num_drafted: Tokens that the draft made and the model checked.
        num_accepted: Those of them that the model agreed with.
        num_checks: Passes of the model that checked some.
        most: The longest draft that may be made.
        room_share: Share of a pass's time that the model would save with the room of the draft.
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_checks: int = 0
    most: int = LENGTHS[-1]
    room_share: float = 0.0
    _accepted: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    _checked: float = PRIOR_WEIGHT
    _step_ns: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    _pass_ns: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    _num_idle: int = 0

    @property
    def has_lost(self) -> bool:
        """True where drafting has not been worth its room for many rounds on end."""
        return self._num_idle >= 2 * ROUNDS_BETWEEN_TRIALS

    @property
    def acceptance(self) -> float:
        """The chance of a drafted token, as of now."""
        return self._accepted / self._checked

    def note_check(self, num_drafted: int, num_accepted: int) -> None:
        """Take what a pass of the model said of a draft."""
        self.num_checks += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        num_checked = min(num_drafted, num_accepted + 1)  # nothing is known behind a wrong one
        memory = MEMORY**num_checked
        self._accepted = memory * self._accepted + num_accepted
        self._checked = memory * self._checked + num_checked

    def note_steps(self, num_steps: int, time_ns: float) -> None:
        """Take the time of some steps of the draft."""
        self._step_ns.append(time_ns / num_steps)

    def note_pass(self, time_ns: float) -> None:
        """Take the time of a pass of the model."""
        self._pass_ns.append(time_ns)

    def length(self) -> int:
        """Return how many tokens to draft in the next round."""
        if not self._step_ns or not self._pass_ns:
            return min(FIRST_LENGTH, self.most)
        step_ns, pass_ns = map(statistics.median, (self._step_ns, self._pass_ns))
        best = best_length(self.acceptance, step_ns, pass_ns, self.most)
        gain = tokens_a_round(self.acceptance, best) / (1 + best * step_ns / pass_ns)
        self._num_idle = 0 if gain * (1 - self.room_share) > 1 else self._num_idle + 1
        is_trial = not best and not self._num_idle % ROUNDS_BETWEEN_TRIALS
        return min(LENGTHS[1], self.most) if is_trial else best


def tokens_a_round(acceptance: float, length: int) -> float:
    """Return the expected tokens of a round, the model's own one included."""
    return sum(acceptance**i for i in range(length + 1))


def best_length(acceptance: float, step_ns: float, pass_ns: float, most: int = LENGTHS[-1]) -> int:
    """Return the one of ``LENGTHS`` that yields most tokens a second; of equal ones the shortest.

    Args:
        acceptance: The chance of a token, from 0 to 1.
        step_ns: Nanoseconds of a step of the draft.
        pass_ns: Nanoseconds of a pass of the model.
        most: The largest length.
    """
    lengths = [length for length in LENGTHS if length <= most]
    return max(lengths, key=lambda k: tokens_a_round(acceptance, k) / (k * step_ns + pass_ns))
