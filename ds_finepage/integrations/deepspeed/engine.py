"""Functions for users of a DeepSpeed engine, or of a module that was attached without one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ds_finepage.errors import ConfigError
from ds_finepage.graph.packed import GROUP
from ds_finepage.integrations.transformers.preflight import is_quantised
from ds_finepage.packing.model import form_of
from ds_finepage.runtime.handle import Handle, handle_in
from ds_finepage.runtime.stats import Stats
from ds_finepage.units import require_count

if TYPE_CHECKING:
    from ds_finepage.batches import BestBatch


def handle_of(engine: Any) -> Handle:
    """Return the handle of an engine or a module that runs by plan.

    Args:
        engine: An engine of DeepSpeed, or a module that :func:`ds_finepage.attach` was given.

    Raises:
        ConfigError: It runs without plans; says why that may be.
    """
    handle = getattr(getattr(engine, "optimizer", None), "finepage", None) or handle_in(engine)
    if handle is None:
        found = (
            "this engine runs stock DeepSpeed"
            if hasattr(engine, "optimizer")
            else f"this {type(engine).__name__} runs without ds_finepage"
        )
        raise ConfigError(
            f"{found}. finepage is active in an engine only if ds_finepage was imported before "
            'deepspeed.initialize, the ds_config has "finepage": {"enabled": true}, and the engine '
            "was not detached or destroyed. A module needs ds_finepage.attach(module, "
            "device_budget=...), and runs by plan until it is detached."
        )
    assert isinstance(handle, Handle)
    return handle


def assert_active(engine: Any) -> None:
    """Fail unless the engine or the module runs by plan.

    DeepSpeed accepts unknown sections without a word, so a script that forgot the import would
    silently measure stock ZeRO-Inference.

    Args:
        engine: As for :func:`handle_of`.

    Raises:
        ConfigError: It does not.
    """
    handle_of(engine)


def stats(engine: Any) -> Stats:
    """Return the counters of an engine or a module that runs by plan.

    Args:
        engine: As for :func:`handle_of`.

    Raises:
        ConfigError: It does not run by plan.
    """
    return handle_of(engine).stats


def best_batch(
    engine: Any, prompt_length: int, new_tokens: int, *, most: int | None = None
) -> BestBatch:
    """Find the batch that makes most tokens a second under the budget, before any prompt is run.

    Passes are captured from the model's config, and their times predicted.

    Args:
        engine: As for :func:`handle_of`.
        prompt_length: Tokens of the longest prompt.
        new_tokens: Tokens to generate behind each.
        most: Sequences at most, for example the number of prompts.

    Raises:
        ConfigError: It does not run by plan, or nothing can be predicted; a length cannot be used.
        CaptureError: The model cannot be captured from its config.
        PlanInfeasibleError: One sequence has no room; the error has the least budget.
    """
    from ds_finepage.batches import MOST_SEQUENCES, find_best  # attach() does without them
    from ds_finepage.modeller import Modeller

    require_count(prompt_length, "prompt_length")
    require_count(new_tokens, "new_tokens")
    handle = handle_of(engine)
    module, settings = getattr(engine, "module", engine), handle.settings
    policy, packed = settings.config.policy, form_of(module)
    has_config = hasattr(getattr(module, "config", None), "save_pretrained")
    reasons = {
        "several ranks share the model": handle.is_shared,
        f"policy {policy} is not finepage": policy != "finepage",
        f"{type(module).__name__} has no config of transformers": not has_config,
        "another library has quantised it": has_config and not packed and is_quantised(module),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(f"best_batch: {reason}. Time a few batches instead.")
    make = partial(
        Modeller,
        module.config,
        prompt_tokens=prompt_length,
        new_tokens=new_tokens,
        device_budget=str(settings.budget_bytes),
        hardware=settings.profile,
        dtype=str(module.dtype).removeprefix("torch."),
        split=settings.planning.split,
        # The weights are in host memory already, and count.
        host_memory_bytes=handle.free_host_bytes + handle.stats.weight_bytes,
        weights=packed.name if packed else None,
        weights_group=packed.group if packed else GROUP,
    )
    return find_best(make, kv_cache=settings.config.kv_cache, most=most or MOST_SEQUENCES)


def detach(engine: Any) -> None:
    """Turn an engine into stock ZeRO-Inference; one that is stock already stays as it is."""
    release = getattr(getattr(engine, "optimizer", None), "detach_finepage", None)
    if release is not None:
        release()
