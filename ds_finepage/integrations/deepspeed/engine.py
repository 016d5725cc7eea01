"""Functions for users of a DeepSpeed engine."""

from __future__ import annotations

from typing import Any

from ds_finepage.errors import ConfigError
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.stats import Stats


def handle_of(engine: Any) -> Handle:
    """Return the handle of an engine that runs by plan.

    Raises:
        ConfigError: The engine runs stock DeepSpeed; says why that may be.
    """
    handle = getattr(getattr(engine, "optimizer", None), "finepage", None)
    if handle is None:
        raise ConfigError(
            "this engine runs stock DeepSpeed. finepage is active only if ds_finepage was "
            "imported before deepspeed.initialize, the ds_config has "
            '"finepage": {"enabled": true}, and the engine was not detached or destroyed.'
        )
    assert isinstance(handle, Handle)
    return handle


def assert_active(engine: Any) -> None:
    """Fail unless the engine runs by plan.

    DeepSpeed accepts unknown sections without a word, so a script that forgot the import would
    silently measure stock ZeRO-Inference.

    Raises:
        ConfigError: It does not.
    """
    handle_of(engine)


def stats(engine: Any) -> Stats:
    """Return the counters of an engine that runs by plan.

    Raises:
        ConfigError: It does not run by plan.
    """
    return handle_of(engine).stats


def detach(engine: Any) -> None:
    """Turn an engine into stock ZeRO-Inference; one that is stock already stays as it is."""
    release = getattr(getattr(engine, "optimizer", None), "detach_finepage", None)
    if release is not None:
        release()
