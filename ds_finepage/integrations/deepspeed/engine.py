"""Functions for users of a DeepSpeed engine, or of a module that was attached without one."""

from __future__ import annotations

from typing import Any

from ds_finepage.errors import ConfigError
from ds_finepage.runtime.handle import Handle, handle_in
from ds_finepage.runtime.stats import Stats


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


def detach(engine: Any) -> None:
    """Turn an engine into stock ZeRO-Inference; one that is stock already stays as it is."""
    release = getattr(getattr(engine, "optimizer", None), "detach_finepage", None)
    if release is not None:
        release()
