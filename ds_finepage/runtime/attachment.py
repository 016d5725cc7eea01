"""What stands in a module while it is attached: hooks, taken-over calls, settings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from ds_finepage.capture.tracing import OwnHooks, QuickTracing
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.fallback import Runner, hook_modules
from ds_finepage.execution.stores import WeightTable
from ds_finepage.integrations.transformers.preflight import LookAhead, WatchedGenerate
from ds_finepage.runtime.interception import (
    ModuleTree,
    PlannedCall,
    RunCall,
    allow_recompiles,
    attribute_restorer,
    captured_call,
    eager_where_refused,
    entries,
)

RunGraph = Callable[[GraphModule, Sequence[int], Sequence[Any]], Any]
"""Runs one of Dynamo's graphs: the graph, which arguments are parameters, the arguments."""

COMPILED_ONLY = ("use_associative_scan",)
"""Attributes by which modules of transformers take another algorithm where they are compiled; its
last bits are others than those of the plain model."""


def weak_backend(run_graph: RunGraph) -> Callable[..., Any]:
    """Return a Dynamo backend that does not keep a method's object alive.

    Dynamo keeps backends, and what they compile, as long as the code of the model's class.
    """
    reference = weakref.WeakMethod(run_graph)

    def backend(module: GraphModule, example_args: Sequence[Any]) -> Callable[..., Any]:
        positions = [i for i, a in enumerate(example_args) if isinstance(a, torch.nn.Parameter)]

        def run(*args: Any) -> Any:
            run_now = reference()
            assert run_now is not None, "a call of the model keeps its handle alive"
            return run_now(module, positions, args)

        return run

    return backend


class Attachment:
    """Installs all of it, and removes it again.

    Attributes:
        tree: The modules and parameters that it was installed in.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weights: WeightTable,
        *,
        run: RunCall,
        run_graph: RunGraph,
        runner: Runner,
        on_unplanned: Callable[[torch.nn.Module], None],
        num_runs: Callable[[], int],
        look_ahead: LookAhead,
        during_generation: Callable[[], AbstractContextManager[None]],
        refuse: Callable[..., PlanInfeasibleError],
    ) -> None:
        """Install it.

        Args:
            module: The root.
            weights: Its weights.
            run: Runs a call of the root, or of a part of it, by plan.
            run_graph: Runs a graph of such a call.
            runner: Tells whether a call runs.
            on_unplanned: Called before a module runs outside any graph.
            num_runs: Counts the graphs that ran.
            look_ahead: Stands in front of ``generate``.
            during_generation: Makes a context for each generation.
            refuse: Says what a refused generation needs; see :class:`WatchedGenerate`.
        """
        self._module = module
        self._weights = weights
        self._run = run
        self._run_graph = run_graph
        self._runner = runner
        self._on_unplanned = on_unplanned
        self._num_runs = num_runs
        self._in_front_of_generate = (look_ahead, during_generation, refuse)
        self._undo: list[Callable[[], None]] = []
        self._compiled: dict[int, Callable[..., Any]] = {}  # by id(module)
        self.tree = ModuleTree(module, weights)
        self.install()

    def install(self) -> None:
        """Install it in the modules that there are now."""
        module = self._module
        handles = hook_modules(module, self._weights, self._on_unplanned, self._runner)
        self._undo += [handle.remove for handle in handles]
        self._own_hooks = OwnHooks(module, handles)
        for part in entries(module, self._weights):
            self._undo.append(attribute_restorer(part, "_compiled_call_impl"))
            part._compiled_call_impl = PlannedCall(part, self._run, self._runner)
        for part in module.modules():
            for name in COMPILED_ONLY:
                if getattr(part, name, None) is True:
                    self._undo.append(attribute_restorer(part, name))
                    setattr(part, name, False)
        self._undo.append(allow_recompiles())
        generation = getattr(module, "generation_config", None)
        if generation is not None:  # transformers would compile a compiled call once more
            self._undo.append(attribute_restorer(generation, "disable_compile"))
            generation.disable_compile = True
        if generation is not None and hasattr(module, "generate"):
            self._undo.append(attribute_restorer(module, "generate"))
            watched: Any = WatchedGenerate(module, *self._in_front_of_generate)
            module.generate = watched
        self.tree.see()

    def remove(self) -> None:
        """Remove it; the module is as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self._compiled = {}

    def compiled(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the call of the root, or of a part of it, as Dynamo compiles it."""
        if self._own_hooks.changed():
            self._compiled = {}
        found = self._compiled.get(id(module))
        if found is None:
            tracing = QuickTracing(self._own_hooks)
            backend = tracing.wrap_backend(weak_backend(self._run_graph))
            compiled = torch.compile(captured_call(module, self._weights), backend=backend)
            found = eager_where_refused(tracing.wrap(compiled), module, self._num_runs)
            self._compiled[id(module)] = found
        return found
