"""The joint between the worker and the engines: how one is loaded, counted and watched.

The worker treats all engines alike::

    engine = load(request)           # weights are in host memory
    with DeviceMeter(...), engine.counting():
        engine.place()               # device memory counts from here on
        ...                          # generate; copied() before and after each forward
    ...                              # generate again, timed
    engine.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from ds_finepage.reporting.results import ObservedPass

if TYPE_CHECKING:
    import torch


Prompts = tuple[tuple[int, ...], ...]
"""Token ids, a row for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One arm with one batch, as the worker gets it.

    Attributes:
        arm: The name of the arm.
        model_dir: The folder of the checkpoint.
        ds_config: The user's ds_config.
        device: Where to compute, as torch names it.
        budget_bytes: The limit on all device bytes.
        batch: Sequences in the batch.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens to generate after it.
        repeats: Timed calls of ``generate``.
        settings: Settings of the arm, such as keys of ``zero_optimization``.
        is_limited: The budget is enforced, where the device can do that.
        prompt_ids: Token ids, a row for each sequence.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    arm: str
    model_dir: str
    ds_config: dict[str, Any]
    device: str
    budget_bytes: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    settings: dict[str, int | float | bool | str]
    prompt_ids: Prompts = ()
    is_limited: bool = True


REQUESTS: TypeAdapter[RunRequest] = TypeAdapter(RunRequest)


class Engine:
    """A model that one engine runs. The subclass of an arm overrides what it can tell.

    Attributes:
        model: The model; the worker calls its ``generate``. It is in host memory at first.
        device: Where the engine wants the prompt.
        settings: Settings that it runs with, as a user would write them.
        notes: Remarks for the reader of the table.
        fetched_bytes: Bytes so far that were copied to the device, where fetches are counted.
    """

    model: Any
    device: torch.device
    fetched_bytes = 0

    def __init__(self, model: Any, device: torch.device) -> None:
        """Take a model."""
        self.model = model
        self.device = device
        self.settings: dict[str, str | int | float | bool] = {}
        self.notes: list[str] = []

    def place(self) -> None:
        """Move to the device what is there between forwards, and install the engine's hooks.

        The device bytes of the run count from here on. ``model`` may be another object afterwards.
        On the CPU the weights that stay on the device become copies, so that they count as well.
        """

    def counting(self) -> AbstractContextManager[None]:
        """Inside, every fetch is a real copy, and counts; on the CPU stock fetches are aliases."""
        return nullcontext()

    def copied(self) -> tuple[int, int]:
        """Return all bytes so far that were copied to the device, and to the host."""
        return self.fetched_bytes, 0

    def record(self) -> None:
        """Record the timelines of the passes from now on."""

    def observed(self) -> Sequence[ObservedPass]:
        """Return the passes that ran by plan."""
        return ()

    def close(self) -> None:
        """End; nothing is asked after it."""
