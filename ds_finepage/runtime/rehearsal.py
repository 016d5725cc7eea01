"""What a refused call needs, found by going through it without running it.

One error knows the need of one step: the pass that came first, of which some ops could not be
measured in so little room. Raising the budget to that shows the next step. So the call is gone
through here, with a copy of the handle under one budget after the other: passes are captured,
measured and planned as ever, and what they would return is full of zeros. The budget under which
nothing is refused any more is the one that the error names.

[Note: two rounds]
An estimate of a kernel's workspace may be above what is measured once there is room. The budgets
are therefore looked for with estimates that are never too high, which ends at the least; then it
is verified with those that the engine goes by.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ds_finepage._compat.transformers import is_initialized, max_length
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.arena import view_of
from ds_finepage.execution.executor import PassCounters, Residents
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.moving import MovingViews
from ds_finepage.execution.probe import free_bytes
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, GraphOutput
from ds_finepage.integrations.transformers.host_cache import HostLayer, caches_among
from ds_finepage.integrations.transformers.preflight import setting_of
from ds_finepage.runtime.kv_offload import CachedCalls
from ds_finepage.runtime.live_tensors import Held
from ds_finepage.runtime.pass_table import Captures
from ds_finepage.runtime.stats import Stats

if TYPE_CHECKING:
    from ds_finepage.runtime.handle import Handle

logger = logging.getLogger(__name__)

MAX_ROUNDS = 16
"""Budgets to try, each of which shows that the next step needs more."""

OF_THE_CALLER = (
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
)
"""Arguments of ``generate`` that would notice a rehearsal."""

Attempt = Callable[[Any], None]


class RehearsalError(Exception):
    """What comes next in a call is not known without running it."""


class _LastStepSeenError(Exception):
    """A generation has been looked at up to its last step."""


class UnrunPass:
    """Stands in for an executor: a pass that returns zeros."""

    def __init__(self, memgraph: MemGraph, *, device: torch.device, pinned: bool) -> None:
        """Look at a plan.

        Args:
            memgraph: The plan.
            device: Where results are.
            pinned: Whether host memory is to be pinned.
        """
        self.counters = PassCounters()
        self._graph = memgraph.graph
        self._moving = MovingViews(memgraph.graph)
        self._device = device
        self._pinned = pinned

    def set_sizes(self, args: Sequence[Any]) -> bool:
        """Prepare for the sizes of a call; False where the plan has no room for them."""
        return self._moving.set_sizes(args)

    def run(self, args: Sequence[Any], host_outputs: Sequence[Any], residents: Residents) -> Any:
        """Return what a pass would, with zeros in it."""
        bases: dict[int, tuple[torch.Tensor, int]] = {}
        for given in self._graph.inputs:
            view, arg = self._moving.views[given.tensor], args[given.position]
            bases[view.buffer] = (arg, (arg.storage_offset() - view.offset) * arg.element_size())
        return tuple(self._output(o, args, host_outputs, bases) for o in self._graph.outputs)

    def _output(
        self,
        output: GraphOutput,
        args: Sequence[Any],
        host_outputs: Sequence[Any],
        bases: dict[int, tuple[torch.Tensor, int]],
    ) -> Any:
        if output.position is not None:
            return args[output.position]
        if output.host is not None:
            return host_outputs[output.host]
        if output.tensor is None:
            return None
        view = self._moving.views[output.tensor]
        buffer = self._graph.buffers[view.buffer]
        if view.buffer not in bases:
            nbytes = self._moving.nbytes(buffer)
            if buffer.kind is BufferKind.HOST:
                made = host_bytes(nbytes, pinned=self._pinned)
            else:
                made = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            bases[view.buffer] = (made, 0)
        return view_of(bases[view.buffer][0], view, bases[view.buffer][1])


def run_call(
    handle: Handle,
    compiled: Callable[..., Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call of a model; where that has no room, say what would be enough.

    Raises:
        PlanInfeasibleError: There is no room. In a generation that is said of one step, and the
            generation as a whole is rehearsed.
    """
    calls = handle._cached_calls
    try:
        return calls.call(compiled, module, args, kwargs)
    except PlanInfeasibleError as error:
        if calls.is_generating or handle._acting is not handle:
            raise
        refusal = error.bare()

    def attempt(shadow: Any) -> None:
        own_args, own_kwargs = calls.apart((args, kwargs))
        shadow._cached_calls.call(compiled, module, own_args, own_kwargs)

    raise _with_least_budget(handle, refusal, attempt)


def refuse_generation(
    handle: Handle,
    refusal: PlanInfeasibleError,
    generate: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PlanInfeasibleError:
    """Return the error of a generation that has no room, with a budget that is enough for it."""
    if handle._cached_calls.is_generating or handle._acting is not handle:
        return refusal
    root = handle._module
    new, most = (setting_of(root, args, kwargs, n) for n in ("max_new_tokens", "max_length"))

    def attempt(shadow: Any) -> None:
        own_args, own_kwargs = handle._cached_calls.apart((args, kwargs))
        own_kwargs = {n: v for n, v in own_kwargs.items() if n not in OF_THE_CALLER}
        own_kwargs["min_new_tokens"] = new if new is not None else 2  # zeros may mean an end
        shadow._perform = functools.partial(_call_or_jump, shadow, new, most)
        devices = [shadow._device] if shadow._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), shadow._cached_calls.generation():
                generate(*own_args, **own_kwargs)
        except _LastStepSeenError:
            pass

    return _with_least_budget(handle, refusal, attempt)


def _call_or_jump(
    shadow: Any,
    num_new: int | None,
    max_length: int | None,
    compiled: Callable[..., Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Go through a call of a generation; from its first step go to its last one.

    All steps between need less than the last.
    """
    if module is shadow._module:
        caches = caches_among((*args, *kwargs.values()), growing=True)
        num_rows = max((cache.get_seq_length() for cache in caches), default=0)
        last = num_rows
        if num_new is not None:
            last = num_rows + num_new - 2
        elif max_length is not None:
            last = max_length - 2
        if 0 < num_rows <= last and all(_stretch(shadow, cache, last) for cache in caches):
            shadow._cached_calls.call(compiled, module, args, _with_masks(kwargs, num_rows, last))
            raise _LastStepSeenError
    return shadow._cached_calls.call(compiled, module, args, kwargs)


def _with_masks(kwargs: Mapping[str, Any], num_rows: int, last: int) -> dict[str, Any]:
    """Return a step's arguments with masks for a longer cache."""
    found = dict(kwargs)
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor) or not name.endswith("attention_mask"):
            continue
        if value.shape[-1] == num_rows + 1:
            more = value.new_ones((*value.shape[:-1], last - num_rows))
            found[name] = torch.cat([value, more], dim=-1)
    return found


def _stretch(shadow: Any, cache: Any, num_rows: int) -> bool:
    """Make a cache as long as it will be, in host memory where it becomes too large for the device.

    Returns:
        False where there is a layer of a kind that nothing is known of.
    """
    for layer in cache.layers:
        known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not known and not isinstance(layer, HostLayer) and max_length(layer) < 1:
            return False
    full = [
        layer for layer in cache.layers if type(layer) is DynamicLayer and is_initialized(layer)
    ]
    most = sum((t.nbytes // t.shape[-2]) * num_rows for x in full for t in _rows(x))
    if most > shadow.stats.budget_bytes and not shadow._cached_calls.move(cache):
        return False
    for layer in cache.layers:
        if isinstance(layer, HostLayer):
            layer.stretch(num_rows)
        elif type(layer) is DynamicLayer and is_initialized(layer):
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


# Going through a call.


def _with_least_budget(
    handle: Handle, refusal: PlanInfeasibleError, attempt: Attempt
) -> PlanInfeasibleError:
    """Return a refusal with a budget under which an attempt is not refused."""
    if refusal.min_budget_bytes is None:
        return refusal
    handle._make_room()
    try:
        least = _least_budget(handle, attempt)
    except Exception as error:  # it is the caller's code that is gone through, with zeros
        logger.info("what the whole call needs is not known: %r", error)
        return refusal
    finally:
        handle._acting = handle
    if least in (None, handle.stats.budget_bytes, refusal.min_budget_bytes):
        return refusal
    assert least is not None
    return refusal.of_whole_call(least)


def _least_budget(handle: Handle, attempt: Attempt) -> int | None:
    """Find a budget under which an attempt is not refused; see [Note: two rounds]."""
    budget_bytes = handle.stats.budget_bytes
    most = budget_bytes + free_bytes(handle._device) // 2
    for is_modest in (True, False):
        for _ in range(MAX_ROUNDS):
            found = _refusal(handle, attempt, budget_bytes, is_modest=is_modest)
            if found is None:
                break
            if found.min_budget_bytes is None or found.min_budget_bytes <= budget_bytes:
                return None
            budget_bytes = found.min_budget_bytes
            if budget_bytes > most:
                return budget_bytes  # no more can be tried out here
        else:
            return None
    return budget_bytes


def _refusal(
    handle: Handle, attempt: Attempt, budget_bytes: int, *, is_modest: bool
) -> PlanInfeasibleError | None:
    """Go through a call under a budget; return what is refused, if anything is."""
    shadow = _shadow(handle, budget_bytes, is_modest=is_modest)
    handle._acting = shadow
    try:
        attempt(shadow)
    except PlanInfeasibleError as error:
        return error.bare()
    finally:
        handle._acting = handle
        grown = shadow._captures.costs.library_bytes - handle._captures.costs.library_bytes
        handle._captures.count_library(grown)
    return None


def _shadow(handle: Handle, budget_bytes: int, *, is_modest: bool) -> Any:
    """Copy a handle: all that it remembers is the copy's own, and nothing runs."""
    shadow: Any = copy.copy(handle)
    pinned = handle._device.type == "cuda"
    shadow.stats = Stats(budget_bytes, handle.stats.weight_bytes)
    shadow._arena, shadow._arena_limit, shadow._residents = None, budget_bytes, {}
    shadow._last = shadow._entered = shadow._plan_dir = None
    shadow._held = Held(handle._held)
    shadow._cached_calls = CachedCalls(
        shadow.stats, pinned=pinned, may_move=handle._cached_calls.may_move
    )
    shadow._captures = Captures(
        shadow.stats,
        handle._captures.costs.modest(is_modest=is_modest),
        alignment=handle._alignment,
        all_weights_bytes=handle._weights.block_bytes,
        may_cut=lambda: handle._split,
        make_room=lambda: None,
    )
    shadow._captures.warn_unplanned = _give_up
    shadow._may_step_aside = lambda found: False
    shadow._built = functools.partial(UnrunPass, device=handle._device, pinned=pinned)
    return shadow


def _give_up(reason: str) -> None:
    raise RehearsalError(reason)
