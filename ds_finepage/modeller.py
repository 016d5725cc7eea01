"""The prefill and a decode step of a generation, planned for a machine under any budget."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from ds_finepage.config import DeviceBudget
from ds_finepage.errors import CaptureError, FinepageError, reason_of
from ds_finepage.execution.device import Accelerator
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.budget import budget_on
from ds_finepage.planning.pipeline import PlanSettings, bound_of
from ds_finepage.planning.policies import EngineSettings, policy_named
from ds_finepage.planning.time_bound import end_times_ns, least_time_beside_host_ns
from ds_finepage.reporting.figures import PlanFigures
from ds_finepage.reporting.results import PhaseFigures
from ds_finepage.whatif import (
    CapturedModel,
    PlannedModel,
    capture_model,
    forms_of,
    plan_captured,
    plan_resident,
    problem_of,
    that_fits,
)


class Costs(NamedTuple):
    """The least times and bytes of a generation, for any placement of weights and KV cache."""

    prefill_ns: float  # of its tasks
    prefill_missing_bytes: float  # that it reloads; negative: that are left over
    step_ns: float  # the last step
    step_missing_bytes: float
    least_bytes: float  # the least budget of both passes
    kv_bytes: float  # after the last step
    host_bytes: float  # with that cache in host memory; without weights that a disk may have


class Modeller:
    """Models the prefill and the last decode step of a generation under a budget.

    Attributes:
        prefill: The first pass.
        decode: The step.
        profile: The machine.
        weights: The form of the weights that was asked for.
        new_tokens: Tokens that the generation makes.
        host_memory_bytes: Host memory of the machine; None if that is not known.
        budget_bytes: The limit on all device bytes.
        weight_bytes: Bytes of all weights.
    """

    def __init__(
        self,
        model: str | PretrainedConfig,
        *,
        batch: int,
        prompt_tokens: int,
        new_tokens: int | None = None,
        device_budget: str = "100%weights",
        hardware: str | HardwareProfile,
        dtype: str | None = None,
        split: bool = False,
        host_memory_bytes: int | None = None,
        weights: str | None = None,
        weights_group: int = GROUP,
        num_ranks: int = 1,
        kv_cache: str = "auto",
    ) -> None:
        """Capture both passes from the model's config.

        Args:
            model: A shipped name, a folder, a config.json, or a config.
            batch: Sequences in the batch.
            prompt_tokens: Tokens of each prompt.
            new_tokens: Tokens to generate after it. None models the step that makes the last one
                of ``prompt_tokens``.
            device_budget: As in a ds_config.
            hardware: A hardware profile, or the name or path of one.
            dtype: Of weights and activations; by default the one that suits the machine.
            split: Policies may cut weights, if they can.
            host_memory_bytes: Host memory of the machine; None if that is not known.
            weights: "bf16", "int8" or "int4"; by default they are as the config says.
            weights_group: Weights that share a scale in a packed form.
            num_ranks: Ranks that the model is cut over; the passes are those of the first.
            kv_cache: As in a ds_config: "auto", or where the KV cache is always.

        Raises:
            ConfigError: An argument cannot be used.
            CaptureError: The forward cannot be written as a taskgraph.
        """
        self.profile = load_profile(hardware) if isinstance(hardware, str) else hardware
        self.weights = weights
        self._split, self.host_memory_bytes, self._kv_cache = split, host_memory_bytes, kv_cache
        self.new_tokens = new_tokens or 1
        # The prefill makes the first token, and the cache never holds the last one.
        self._num_steps = max(1, self.new_tokens - 1)
        last = prompt_tokens if new_tokens is None else prompt_tokens + self._num_steps
        lengths = {"prefill": prompt_tokens, "decode": last}
        shared: dict[str, Any] = {"batch": batch, "profile": self.profile, "dtype": dtype}
        shared |= {"weights": weights, "weights_group": weights_group, "num_ranks": num_ranks}
        try:
            self.prefill, self.decode = (
                capture_model(model, phase=phase, seq=seq, kv_on_host=kv_cache == "host", **shared)
                for phase, seq in lengths.items()
            )
        except FinepageError:
            raise
        except Exception as error:  # any op may be new to the recorder
            raise CaptureError(reason_of(error)) from error
        self.weight_bytes = self.prefill.graph.weight_bytes
        self._set_budget(device_budget)

    def at(self, budget: str | int, profile: HardwareProfile | None = None) -> Modeller:
        """Return a modeller of the same passes under another budget.

        Args:
            budget: As in a ds_config; or bytes, which may be more than the device has.
            profile: Another machine that computes in the same dtype.

        Raises:
            ConfigError: It cannot be used.
        """
        other = copy.copy(self)
        other.profile = profile or self.profile
        other._set_budget(budget)
        return other

    def _set_budget(self, budget: str | int) -> None:
        if isinstance(budget, str):
            parsed = DeviceBudget.parse(budget, name="device_budget")
            budget = budget_on(parsed, self.weight_bytes, self.profile)
        self.budget_bytes = budget
        self._found: dict[str, EngineSettings] = {}

    def figures(
        self, policy: str, engine: EngineSettings | None = None
    ) -> tuple[PhaseFigures, PhaseFigures]:
        """Model the prefill and the decode step.

        Args:
            policy: A key of ``POLICIES``, or "" for an engine that keeps everything on the device.
            engine: Settings of the system that the policy stands for; None takes those of
                :meth:`engine`.

        Returns:
            Modelled time, modelled bytes to the device, and both lower bounds of a steady pass.

        Raises:
            ConfigError: Unknown policy.
            PlanInfeasibleError: The budget is too small for the policy; the error says why.
        """
        prefill, decode = self.planned(policy, engine)
        return _of(prefill.figures), _of(decode.figures)

    def planned(
        self, policy: str, engine: EngineSettings | None = None
    ) -> tuple[PlannedModel, PlannedModel]:
        """Plan the prefill and the decode step; the arguments are those of :meth:`figures`.

        Raises:
            ConfigError: Unknown policy.
            PlanInfeasibleError: The budget is too small for the policy; the error says why.
        """
        engine = engine or self.engine(policy)
        return self.first(policy, engine), self.step(policy, engine)

    def first(self, policy: str, engine: EngineSettings | None = None) -> PlannedModel:
        """Plan the prefill; arguments and errors are those of :meth:`step`."""
        return self._plan(self.prefill, policy, engine)

    def step(self, policy: str, engine: EngineSettings | None = None) -> PlannedModel:
        """Plan the decode step; its KV cache is where the prefill has left it.

        Args:
            policy: As for :meth:`figures`.
            engine: Settings of the system that the policy stands for; None chooses those that
                suit the pass by itself.

        Raises:
            ConfigError: Unknown policy.
            PlanInfeasibleError: The budget is too small for the policy; the error says why.
        """
        follows = None
        if policy and self._kv_cache == "auto":
            forms = forms_of(self.prefill, policy=policy, split=self._split)
            before, _ = that_fits(forms, self.budget_bytes)
            follows = self.decode.on_host if before.kv_on_host else None
        return self._plan(follows or self.decode, policy, engine)

    def ends(self, policy: str) -> tuple[int, int]:
        """Return the smallest budget that can run, and the one that pages nothing.

        Raises:
            ConfigError: Unknown policy.
        """
        both = (self.prefill, self.decode)
        whole = (forms_of(captured, policy=policy, split=False) for captured in both)
        least = max(min(form.needs.min_budget_bytes for form, _ in forms) for forms in whole)
        return least, max(captured.needs.needed_budget_bytes for captured in both)

    def engine(self, policy: str) -> EngineSettings | None:
        """Return the settings of the system that a policy stands for, the same in both passes.

        Args:
            policy: As for :meth:`figures`; one that stands for no other system has none.

        Raises:
            ConfigError: Unknown policy.
            PlanInfeasibleError: The budget is too small whatever the settings.
        """
        if not policy:
            return None
        choose = policy_named(policy).engine_settings
        if choose is None:
            return None
        if policy not in self._found:
            passes = [
                (
                    problem_of(
                        c, budget_bytes=self.budget_bytes, profile=self.profile, policy=policy
                    ),
                    num_runs,
                )
                for c, num_runs in ((self.prefill, 1), (self.decode, self._num_steps))
            ]
            self._found[policy] = choose(passes)
        return self._found[policy]

    def _plan(
        self, captured: CapturedModel, policy: str, engine: EngineSettings | None
    ) -> PlannedModel:
        if not policy:
            return plan_resident(captured, self.profile)
        return plan_captured(
            captured,
            budget_bytes=self.budget_bytes,
            profile=self.profile,
            policy=policy,
            split=self._split,
            host_memory_bytes=self.host_memory_bytes,
            engine=engine,
            kv_cache=self._kv_cache,
        )

    def costs(self) -> Costs:
        """Return the least times and bytes, by the lower bounds of both passes."""
        both = (self.prefill, self.decode)
        prefill, step = map(self._bounds_of, both)
        needs = [c.needs_if(cuts_weights=self._split, looks_up_rows=True) for c in both]
        least_bytes = max(each.min_budget_bytes for each in needs)
        host_bytes = self.decode.host_bytes  # a host that computes reads no files
        if not self.profile.has_host:
            host_bytes = self.decode.least_host_bytes(self.profile)
        return Costs(*prefill, *step, least_bytes, self.decode.kv_bytes, host_bytes)

    def _bounds_of(self, captured: CapturedModel) -> tuple[int, int]:
        """Return the time of the tasks of a pass, and the bytes that are missing.

        Beside a host that computes, the time is that of copies too, and no byte is missing.
        """
        settings = PlanSettings(
            policy="finepage",
            split=self._split,
            alignment=Accelerator.alignment,
            profile=self.profile,
        )
        arena_bytes = max(1, self.budget_bytes - captured.needs.non_arena_bytes)
        bound = bound_of(captured.graph, arena_bytes, settings)
        missing_bytes = bound.nbytes or bound.needed_bytes - bound.kept_bytes
        if self.profile.has_host:
            return least_time_beside_host_ns(bound, self.profile), min(0, missing_bytes)
        return max(end_times_ns(bound.graph, self.profile)), missing_bytes


def _of(figures: PlanFigures) -> PhaseFigures:
    return PhaseFigures(
        modelled_ns=figures.predicted_ns,
        modelled_h2d_bytes=figures.reloaded_bytes,
        lower_bound_bytes=figures.lower_bound_bytes,
        lower_bound_ns=figures.lower_bound_ns,
    )
