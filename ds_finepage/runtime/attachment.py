"""Installs planned calls, hooks and settings in a module, and removes them again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from ds_finepage.capture.tracing import OwnHooks, QuickTracing
from ds_finepage.capture.unguarded import Unguarded
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.fallback import hook_modules
from ds_finepage.execution.stores import WeightTable
from ds_finepage.integrations.transformers.batching import BATCHING, BudgetedBatching
from ds_finepage.integrations.transformers.drafting import is_assisted
from ds_finepage.integrations.transformers.preflight import cache_use_of
from ds_finepage.integrations.transformers.replaced import ReplacedMethod
from ds_finepage.runtime.interception import (
    ModuleTree,
    PlannedCall,
    captured_call,
    eager_where_refused,
    entries,
    move_buffers,
)
from ds_finepage.runtime.recompiles import CodeClaim

if TYPE_CHECKING:
    from ds_finepage.runtime.calls import CallTaker

logger = logging.getLogger(__name__)

COMPILED_ONLY = "use_associative_scan"
"""By this attribute modules of transformers take another algorithm where they are compiled. Its
last bits differ from those of the plain model."""


def weak_backend(calls: CallTaker) -> Callable[..., Any]:
    """Return a Dynamo backend that does not keep the receiver of its graphs alive.

    Dynamo keeps compiled code, and with it the backend, for as long as the code object of the
    forward lives, which is as long as its class does.
    """
    reference = weakref.ref(calls)

    def backend(module: GraphModule, example_args: Sequence[Any]) -> Callable[..., Any]:
        receiver = reference()
        assert receiver is not None, "a call of the model keeps the receiver alive"
        positions = [
            i
            for i, arg in enumerate(example_args)
            if isinstance(arg, torch.nn.Parameter) or receiver.is_weight(arg)
        ]
        del receiver

        def run(*args: Any) -> Any:
            now = reference()
            assert now is not None, "a call of the model keeps the receiver alive"
            return now.run_graph(module, positions, args)

        return run

    return backend


class PlannedGeneration(ReplacedMethod):
    """``generate`` of one model, with a preflight check before it."""

    def __init__(self, module: Any, calls: CallTaker) -> None:
        super().__init__(module, "generate")
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check, then generate."""
        if self._calls.shares_steps and kwargs.get("synced_gpus") is None:
            # transformers asks this itself, but only under HfDeepSpeedConfig.
            kwargs = {**kwargs, "synced_gpus": True}
        self._calls.preflight(args, kwargs)
        assistance = self._calls.assistance
        with assistance.turn(self._module, args, kwargs) as given:
            budget_bytes, weight_bytes = self._calls.budget_bytes(), self._calls.weight_bytes
            draft_bytes = 0 if assistance.draft is None else assistance.draft.nbytes
            use_of = partial(cache_use_of, self._module, args, given, weight_bytes=weight_bytes)
            assistance.use_alone = use_of(budget_bytes=budget_bytes, is_assisted=False)
            use = use_of(
                budget_bytes=budget_bytes - draft_bytes,
                is_assisted=is_assisted(self._module, args, given),
            )
            try:
                with self._calls.generation(use):
                    return self._original(*args, **given)
            except PlanInfeasibleError as error:
                can_repeat = assistance.can_repeat(kwargs)
                refusal = assistance.refusal(error)
        if not can_repeat:
            raise refusal
        logger.warning("a prompt has no room beside the draft: %s", refusal)
        return self(*args, **kwargs)


class Attachment:
    """All that is installed in a module while it is attached."""

    def __init__(
        self,
        module: torch.nn.Module,
        weights: WeightTable,
        calls: CallTaker,
        device: torch.device,
        generation: ReplacedMethod | None = None,
    ) -> None:
        """Install it.

        Args:
            module: The module.
            weights: The weights of the model.
            calls: Takes the calls.
            device: Where they run.
            generation: Stands for ``generate``; by default it checks each call beforehand.
        """
        self._module = module
        self._generation = generation
        self._weights = weights
        self._calls = calls
        self._device = device
        self._undo = ExitStack()
        self._compiled: dict[int, Callable[..., Any]] = {}  # by id(module)
        try:
            self.install()
        except BaseException:
            self.remove()
            raise

    def install(self) -> None:
        """Install it in the modules that there are now."""
        module, calls = self._module, self._calls
        hooks = hook_modules(module, self._weights, calls.run_unplanned, calls.running)
        for hook in hooks:
            self._undo.callback(hook.remove)
        move_buffers(module, self._device, self._undo)
        self._own_hooks = OwnHooks(module, hooks)
        self.entries = entries(module, self._weights)
        for part in self.entries:
            planned = PlannedCall(part, calls.call, calls.running, calls.handle)
            self._set(part, "_compiled_call_impl", planned)
        for part in module.modules():
            if getattr(part, COMPILED_ONLY, None) is True:
                self._set(part, COMPILED_ONLY, False)
        self._claim = CodeClaim(calls)
        self._undo.callback(self._claim.close)
        generation = getattr(module, "generation_config", None)
        if generation is not None:  # transformers would compile a compiled call once more
            self._set(generation, "disable_compile", True)
        if generation is not None and hasattr(module, "generate"):
            found = self._generation or PlannedGeneration(module, calls)
            self._set(module, "generate", found)
        if hasattr(module, BATCHING):
            self._set(module, BATCHING, BudgetedBatching(module, calls.budget_bytes))
        self.tree = ModuleTree(module, self._weights)
        self._unguarded = Unguarded(module)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; :meth:`remove` restores the object's own one, or its absence."""
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._undo.callback(vars(owner).pop, name, None)
        setattr(owner, name, value)

    def remove(self) -> None:
        """Remove it; the module is as it was."""
        self._compiled = {}
        self._undo.close()

    def compiled(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the call of the root, or of a part of it, as Dynamo compiles it."""
        if self._unguarded.changed():
            self._compiled = {}
        found = self._compiled.get(id(module))
        if found is None:
            found = self._compiled[id(module)] = self._compile(module)
        return found

    def _compile(self, module: torch.nn.Module) -> Callable[..., Any]:
        captured = captured_call(module, self._weights)
        # Dynamo skips the call of a module itself.
        first = module.forward if captured == module._call_impl else captured
        if (code := getattr(first, "__code__", None)) is not None:
            self._claim.add(code)
        tracing = QuickTracing(self._own_hooks, self._unguarded, self._claim.add)
        backend = tracing.wrap_backend(weak_backend(self._calls))
        return eager_where_refused(
            self._claim.within(tracing.wrap(torch.compile(captured, backend=backend))),
            module,
            lambda: self._calls.num_graph_runs,
        )
