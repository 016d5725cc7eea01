"""Takes the calls of an attached model: notices changes, compiles, and runs them by plan."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from ds_finepage.capture.dynamo_graph import BufferChangedError, DynamoGraph
from ds_finepage.capture.tracing import has_paged_cache
from ds_finepage.capture.unguarded import kernel_settings
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.fallback import RunningCall
from ds_finepage.execution.large_buffers import LargeBuffers
from ds_finepage.execution.stores import NO_CHANGES, TakeWeights, WeightChanges, WeightTable
from ds_finepage.execution.subclasses import TakenApart
from ds_finepage.integrations.transformers.preflight import CacheUse, Preflight
from ds_finepage.runtime.assisting import Assistance
from ds_finepage.runtime.attachment import Attachment
from ds_finepage.runtime.drafts import Draft
from ds_finepage.runtime.kv_offload import CapturedCall
from ds_finepage.runtime.plan_runner import PlanRunner

logger = logging.getLogger(__name__)

AroundCall = Callable[[], AbstractContextManager[Any]]
"""Makes a context that holds while the model runs."""


class CallTaker:
    """Stands between the callers of a model and its plans.

    Attributes:
        handle: The handle of the model.
        running: Tells which thread runs a call now.
        lock: Held while a call runs, and while the handle changes something.
        assistance: The draft of the model.
        num_graph_runs: Runs of Dynamo's graphs so far.
        generation: Returns the context of one generation, from the use of its KV cache.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weights: WeightTable,
        runner: PlanRunner,
        *,
        apart: TakenApart,
        buffers: LargeBuffers,
        take: TakeWeights,
        around_call: AroundCall,
        handle: object,
    ) -> None:
        """Take over the calls of a model.

        :class:`ds_finepage.runtime.handle.Handle` describes the arguments.
        """
        self.handle = handle
        self.running = RunningCall()
        self.lock = threading.RLock()
        self.num_graph_runs = 0
        self._module = module
        self._weights = weights
        self._runner = runner
        self._apart = apart
        self._buffers = buffers
        self._first_graph_run = 0  # of the call that runs
        self._take = take
        self._around_call = around_call
        self._num_graphs = 0
        self._graphs: dict[Any, DynamoGraph] = {}
        self._unplanned_modules: list[torch.nn.Module] = []
        self.generation: Callable[[CacheUse], AbstractContextManager[None]] = runner.generation
        self._preflight = Preflight(module)
        self._attachment = Attachment(module, weights, self, runner.settings.device)
        self.assistance = Assistance(self, weights, runner)

    def remove(self) -> None:
        """Give the model its own calls back."""
        self.assistance.remove()
        self._attachment.remove()
        self._graphs.clear()

    # Calls of modules.

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model or of a part of it.

        Raises:
            PlanInfeasibleError: There is no room; the error names the need of the step that was
                refused.
        """
        with self.lock:
            if has_paged_cache(args, kwargs):
                # transformers writes the arguments on the default stream, and does not wait for it.
                device_of(self._runner.settings.device).follow_default_stream()
            self._runner.observer.begin_call()
            self._notice_changes()
            attachment = self.assistance.attachment_of(module) or self._attachment
            compiled = attachment.compiled(module)
            self.assistance.see_pass(module, kwargs)
            self._first_graph_run = self.num_graph_runs + 1
            self.running.begin()
            try:
                with self._around_call(), self._weights.in_form():
                    is_own = attachment is self._attachment
                    return self._run(CapturedCall(compiled, module, args, kwargs), is_own=is_own)
            finally:
                self.running.end()
                if self._runner.ranks.take_difference() and self.shares_steps:
                    self._forget_passes()  # each rank may have captured something else
                    torch.compiler.reset()
                self._release(self._buffers.replaced() + self._weights.written_buffers())

    def is_weight(self, value: Any) -> bool:
        """Tell whether an argument of a graph is a weight."""
        return value in self._weights

    def budget_bytes(self) -> int:
        """Return the device budget."""
        return self._runner.settings.budget_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; those of a draft are not among them."""
        return sum(master.numel() for master in self._weights.masters.values())

    def _run(self, call: CapturedCall, *, is_own: bool) -> Any:
        runner, settings = self._runner, self._runner.settings
        moves, starts = settings.moves_kv_caches, settings.starts_on_host
        if moves and is_own and runner.ranks.has_whole_model:  # all ranks decide alike then
            starts = starts or runner.kv_offload.use.competes
        try:
            return runner.kv_offload.call(call, may_move=moves, starts_on_host=starts)
        except PlanInfeasibleError as error:
            refusal = error.of_one_step()
        raise refusal

    def run_graph(self, module: GraphModule, positions: Sequence[int], args: Sequence[Any]) -> Any:
        """Run one of Dynamo's graphs.

        Weights are arguments of a graph. Where a graph is the forward of one module, Dynamo runs
        it for other modules of the same class too. Each choice of weights is a graph of ours, and
        so are other settings of torch's kernels.
        """
        self.num_graph_runs += 1
        if self.num_graph_runs > self._first_graph_run:  # other code ran since the last graph
            self._release(self._weights.written_buffers())
        while True:
            try:
                return self._run_graph(module, positions, args)
            except BufferChangedError as error:
                if not self._release([error.name]):
                    raise

    def _run_graph(self, module: GraphModule, positions: Sequence[int], args: Sequence[Any]) -> Any:
        chosen = (id(module), *(id(args[i]) for i in positions), kernel_settings())
        if chosen not in self._graphs:
            name = f"graph {self._num_graphs}"
            self._graphs[chosen] = DynamoGraph(module, args, self._weights.names, name)
            self._num_graphs += 1
        return self._runner.run(self._graphs[chosen], args)

    def run_unplanned(self, module: torch.nn.Module) -> None:
        """Prepare for a module that is called outside any graph."""
        self._weights.require_whole("a module that is called outside any graph")
        self._runner.counters.num_unplanned_modules += 1
        if module not in self._unplanned_modules:
            self._unplanned_modules.append(module)
            name = next((n for n, m in self._module.named_modules() if m is module), "")
            self._runner.warn_unplanned(
                f"module {name or 'at the root'} is called outside any graph"
            )
        self._runner.memory.to_released()

    # Generations.

    @property
    def shares_steps(self) -> bool:
        """True where a step of a generation needs all ranks, until the last of them is done."""
        return self._runner.ranks.collects_weights

    def preflight(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a generation that would run out of memory, before its first token.

        A shard is not checked: the model's config tells the sizes of the whole model.

        Raises:
            ConfigError: The prompt has no tokens, or more than a table of positions.
            PlanInfeasibleError: The KV cache fits nowhere, or the last step cannot be planned.
        """
        settings = self._runner.settings
        if self._runner.ranks.has_whole_model:
            free_bytes = self._runner.free_host_bytes
            self._preflight.require(
                args, kwargs, settings.budget_bytes, free_bytes, settings.planning
            )

    # Changes of the model.

    def _notice_changes(self) -> None:
        """Take over the changes that others made to the model since the last call."""
        self.take_over(self._weights.changes())
        if self._attachment.tree.has_new_parts() or self._buffers.replaced():
            self.take_weights()

    def shares_weights(self, draft: Draft) -> bool:
        """Tell whether a draft has weights of the model."""
        return any(parameter in draft for parameter in self._module.parameters())

    def take_weights(self) -> None:
        """Take the weights that the model has now, except those that its draft has too."""
        self._apart.take()
        fixed = self.assistance.draft or ()
        parameters = self._module.named_parameters()
        named: dict[str, torch.Tensor] = {n: p for n, p in parameters if p not in fixed}
        named |= self._buffers.find(self._weights.masters.values())
        self._weights.exchange(named, self._take)
        self._forget_passes()
        self._attachment.remove()
        self._attachment.install()

    def take_over(self, changes: WeightChanges) -> None:
        """Forget everything that a change of weights made wrong."""
        if changes is NO_CHANGES:
            return
        if changes.reshaped:
            self._forget_passes()
        elif changes.moved:
            self._runner.memory.to_released()  # executors copy from the old masters
        self._runner.memory.reload(changes.rewritten)

    def _release(self, names: Sequence[str]) -> bool:
        """Treat buffers that the forward changes as such from now on; tell whether any was not."""
        found = self._buffers.refuse(names)
        if found:
            logger.debug("buffers that the model changes stay on the device: %s", ", ".join(names))
            self._weights.release(found)
            self._forget_passes()
        return bool(found)

    def _forget_passes(self) -> None:
        self._runner.forget()
        self._graphs.clear()
