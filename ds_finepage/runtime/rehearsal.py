"""Finds the budget that a refused call needs, by going through the call without running it.

One error knows the need of one step: of the pass that came first, some of whose ops could not be
measured in so little room. A larger budget shows the next step. So a rehearsal goes through the
call under one budget after the other: it captures, measures and plans every pass, and returns
zeros. The error then names the first budget under which nothing is refused.

[Note: two rounds]
An estimate of a kernel's workspace may be above the figure that is measured once there is room. The
first round therefore uses estimates that are never too high, and finds the least budget. The second
round verifies it with the estimates that the engine uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ds_finepage._compat.transformers import is_initialized
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.call_tensors import CallTensors
from ds_finepage.execution.device import device_of, fork_rng
from ds_finepage.execution.executor import OpHook, PassCounters, Residents
from ds_finepage.execution.moving import MovingViews
from ds_finepage.execution.stores import WeightTable
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.integrations.transformers.host_cache import HostLayer
from ds_finepage.integrations.transformers.preflight import cache_use_of, setting_of
from ds_finepage.integrations.transformers.room import RoomLayer
from ds_finepage.runtime.captured_call import CapturedCall
from ds_finepage.runtime.device_memory import DeviceState
from ds_finepage.runtime.live_tensors import LiveTensors
from ds_finepage.runtime.passes import BoundPass, Pass
from ds_finepage.runtime.plan_runner import PlanRunner
from ds_finepage.runtime.settings import RunSettings

logger = logging.getLogger(__name__)

MAX_ROUNDS = 16
"""Budgets to try; each one shows the need of one more step."""

GROWING = (DynamicLayer, RoomLayer)
"""The layers of a KV cache on the device that grow with every token."""

OF_THE_CALLER = (
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
)
"""Arguments of ``generate`` that would notice a rehearsal."""


class RehearsalError(Exception):
    """A rehearsal cannot go on without running something."""


class _LastStepSeenError(Exception):
    """A rehearsal of a generation has reached its last step."""


class UnrunPass:
    """Stands in for an executor, and returns zeros."""

    def __init__(self, memgraph: MemGraph, settings: RunSettings) -> None:
        """Prepare for a plan.

        Args:
            memgraph: The plan.
            settings: Name the device.
        """
        self.counters = PassCounters()
        self._sizes = MovingViews(memgraph.graph)
        self._tensors = CallTensors(
            memgraph.graph,
            self._sizes,
            device=settings.device,
            pinned=settings.pins_memory,
            zeros=True,
        )

    def set_sizes(self, args: Sequence[Any]) -> bool:
        """Prepare for the sizes of a call; False where the plan has no room for them."""
        return self._sizes.set_sizes(args)

    def run(self, args: Sequence[Any], host_outputs: Sequence[Any], residents: Residents) -> Any:
        """Return the outputs of the pass, filled with zeros."""
        return self._tensors.outputs(args, host_outputs, self._tensors.of_call(args))


class RehearsedMemory:
    """Stands in for device memory, and holds nothing."""

    can_be_resident = False
    state = DeviceState.RELEASED
    held_bytes = 0

    def __init__(self, settings: RunSettings) -> None:
        """Stand in for the memory of one device."""
        self.residents: Residents = {}
        self._settings = settings

    def to_released(self) -> None:
        """Do nothing."""

    def to_paged(self, arena_bytes: int) -> None:
        """Do nothing."""

    def to_resident(self) -> int:
        """Do nothing."""
        return 0

    def reload(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def keeper(self, nbytes: int) -> None:
        """Return None: there is no arena."""

    def bind(self, found: Pass, in_place: frozenset[int], hooks: Sequence[OpHook]) -> BoundPass:
        """Bind a planned pass to zeros."""
        assert found.memgraph is not None
        executor = UnrunPass(found.memgraph, self._settings)
        found.bind(executor)
        return executor


class Rehearsal:
    """Goes through the calls of a model under one budget.

    Attributes:
        runner: Captures, measures and plans; its passes return zeros.
    """

    def __init__(self, runner: PlanRunner) -> None:
        """Rehearse with a runner of one's own."""
        self.runner = runner

    def call(self, call: CapturedCall) -> Any:
        """Go through a call of a module; see :meth:`PlanRunner.call`."""
        return self.runner.call(call)


class GenerationRehearsal(Rehearsal):
    """Goes through the first and the last step of a generation.

    Every step between needs less than the last one.
    """

    def __init__(
        self,
        runner: PlanRunner,
        root: torch.nn.Module,
        num_new: int | None,
        max_length: int | None,
    ) -> None:
        """Rehearse a generation.

        Args:
            runner: Captures, measures and plans; its passes return zeros.
            root: The model.
            num_new: Tokens to generate; None where ``max_length`` counts.
            max_length: Tokens of the prompt and the result; None where nothing limits them.
        """
        super().__init__(runner)
        self._root = root
        self._num_new = num_new
        self._max_length = max_length

    def call(self, call: CapturedCall) -> Any:
        """Go through a step, or jump from the second step to the last one."""
        if call.module is self._root:
            caches = call.caches(growing=True)
            num_rows = max((cache.get_seq_length() for cache in caches), default=0)
            last = self._last_length(num_rows)
            if 0 < num_rows <= last and all(_stretch(self.runner, c, last) for c in caches):
                super().call(replace(call, kwargs=_with_masks(call.kwargs, num_rows, last)))
                raise _LastStepSeenError
        return super().call(call)

    def _last_length(self, num_rows: int) -> int:
        """Return the length of the KV cache before the last step."""
        if self._num_new is not None:
            return num_rows + self._num_new - 2
        return num_rows if self._max_length is None else self._max_length - 2


MakeRehearsal = Callable[[PlanRunner], Rehearsal]
Attempt = Callable[[PlanRunner], None]


class Rehearser:
    """Rehearses refused calls of one model.

    Attributes:
        current: The rehearsal that goes on; the model's calls go there meanwhile.
    """

    def __init__(self, module: torch.nn.Module, weights: WeightTable, runner: PlanRunner) -> None:
        """Start without a rehearsal.

        Args:
            module: The model.
            weights: Its host masters.
            runner: Refused the calls; a rehearsal takes its settings and its measured ops.
        """
        self.current: Rehearsal | None = None
        self._module = module
        self._weights = weights
        self._runner = runner

    def refused_call(self, refusal: PlanInfeasibleError, call: CapturedCall) -> PlanInfeasibleError:
        """Return the error of a refused call; it names a budget that is enough, if one is found.

        Args:
            refusal: The error of the pass that was refused.
            call: The call.
        """

        def attempt(runner: PlanRunner) -> None:
            args, kwargs = self._runner.kv_offload.with_own_caches(call.args, call.kwargs)
            runner.call(replace(call, args=args, kwargs=kwargs))

        return self._with_least_budget(refusal, attempt, Rehearsal)

    def refused_generation(
        self,
        refusal: PlanInfeasibleError,
        generate: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> PlanInfeasibleError:
        """Return the error of a refused generation; it names a budget that is enough, if one is.

        Args:
            refusal: The error of the step that was refused.
            generate: The model's own ``generate``.
            args: Its positional arguments.
            kwargs: Its named arguments.
        """
        if self._runner.kv_offload.is_generating or self.current is not None:
            return refusal
        root, device = self._module, self._runner.settings.device
        num_new = setting_of(root, args, kwargs, "max_new_tokens")
        max_length = setting_of(root, args, kwargs, "max_length")
        use = cache_use_of(root, args, kwargs)

        def attempt(runner: PlanRunner) -> None:
            own_args, own_kwargs = self._runner.kv_offload.with_own_caches(args, kwargs)
            own_kwargs = {n: v for n, v in own_kwargs.items() if n not in OF_THE_CALLER}
            # Zeros may mean the end of a text.
            own_kwargs["min_new_tokens"] = num_new if num_new is not None else 2
            try:
                with fork_rng([device]), runner.kv_offload.generation(use):
                    generate(*own_args, **own_kwargs)
            except _LastStepSeenError:
                pass

        def make(runner: PlanRunner) -> Rehearsal:
            return GenerationRehearsal(runner, root, num_new, max_length)

        return self._with_least_budget(refusal, attempt, make)

    def _with_least_budget(
        self, refusal: PlanInfeasibleError, attempt: Attempt, make: MakeRehearsal
    ) -> PlanInfeasibleError:
        """Return a refusal with a budget under which an attempt is not refused."""
        if refusal.min_budget_bytes is None:
            return refusal
        self._runner.memory.to_released()
        try:
            least = self.least_budget(attempt, make)
        except Exception as error:  # the caller's code runs here, with zeros
            logger.info("the need of the whole call is not known: %r", error)
            return refusal
        finally:
            self.current = None
        if least in (None, self._runner.settings.budget_bytes, refusal.min_budget_bytes):
            return refusal
        assert least is not None
        return refusal.of_whole_call(least)

    def least_budget(self, attempt: Attempt, make: MakeRehearsal) -> int | None:
        """Find a budget under which an attempt is not refused; see [Note: two rounds].

        Args:
            attempt: Goes through the call.
            make: Makes the rehearsal that receives the calls of the model meanwhile.

        Returns:
            Bytes; None where no budget was found.
        """
        settings = self._runner.settings
        budget_bytes = settings.budget_bytes
        most = budget_bytes + device_of(settings.device).memory_info()[0] // 2
        for is_modest in (True, False):
            for _ in range(MAX_ROUNDS):
                found = self._refusal(attempt, make, budget_bytes, is_modest=is_modest)
                if found is None:
                    break
                if found.min_budget_bytes is None or found.min_budget_bytes <= budget_bytes:
                    return None
                budget_bytes = found.min_budget_bytes
                if budget_bytes > most:
                    return budget_bytes  # no larger budget can be tried here
            else:
                return None
        return budget_bytes

    def _refusal(
        self, attempt: Attempt, make: MakeRehearsal, budget_bytes: int, *, is_modest: bool
    ) -> PlanInfeasibleError | None:
        """Go through a call under a budget; return the refusal, if there is one."""
        meter = self._runner.table.maker.meter
        settings = replace(self._runner.settings, budget_bytes=budget_bytes, plan_dir=None)
        runner = PlanRunner(
            settings,
            self._weights,
            RehearsedMemory(settings),
            meter.modest(is_modest=is_modest),
            live=LiveTensors(self._runner.live),
            on_unplanned=_give_up,
        )
        self.current = make(runner)
        try:
            attempt(runner)
        except PlanInfeasibleError as error:
            return error.bare()
        finally:
            self.current = None
            grown = runner.table.maker.meter.library_bytes - meter.library_bytes
            meter.library_bytes += grown
            self._runner.table.count_library()
        return None


def _with_masks(kwargs: Mapping[str, Any], num_rows: int, last: int) -> dict[str, Any]:
    """Return the arguments of a step, with masks for a longer cache."""
    found = dict(kwargs)
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor) or not name.endswith("attention_mask"):
            continue
        if value.shape[-1] == num_rows + 1:
            more = value.new_ones((*value.shape[:-1], last - num_rows))
            found[name] = torch.cat([value, more], dim=-1)
    return found


def _stretch(runner: PlanRunner, cache: Any, num_rows: int) -> bool:
    """Make a cache as long as it becomes; move it to host memory where the device is too small.

    Returns:
        False where a layer is of an unknown kind.
    """
    budget_bytes = runner.settings.budget_bytes
    for layer in cache.layers:
        known = type(layer) in (*GROWING, DynamicSlidingWindowLayer)
        if not known and not isinstance(layer, HostLayer) and layer.get_max_length() < 1:
            return False
    full = [layer for layer in cache.layers if type(layer) in GROWING and is_initialized(layer)]
    most = sum((t.nbytes // t.shape[-2]) * num_rows for x in full for t in _rows(x))
    if most > budget_bytes and not (
        runner.settings.moves_kv_caches and runner.kv_offload.move(cache)
    ):
        return False
    for layer in cache.layers:
        if isinstance(layer, HostLayer):
            layer.stretch(num_rows)
        elif type(layer) in GROWING and is_initialized(layer):
            layer.keys, layer.values = (_rows_like(t, num_rows) for t in _rows(layer))
        elif type(layer) is DynamicSlidingWindowLayer and is_initialized(layer):
            _stretch_window(layer, num_rows)
    return True


def _rows(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def _rows_like(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows.new_zeros((*rows.shape[:-2], num_rows, rows.shape[-1]))


def _stretch_window(layer: DynamicSlidingWindowLayer, num_rows: int) -> None:
    kept = layer.sliding_window - 1
    made = [_rows_like(t, min(num_rows, kept + 1)) for t in _rows(layer)]
    layer.keys, layer.values = (t[:, :, -kept:, :] for t in made)
    layer.cumulative_length = num_rows


def _give_up(reason: str) -> None:
    raise RehearsalError(reason)
