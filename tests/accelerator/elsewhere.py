"""A plugin of pytest that runs tests written for the CPU on an accelerator.

    python -m pytest -n 0 -p tests.accelerator.elsewhere tests/integration/test_families.py

It takes the accelerator of this process, or loads the test device. In the test modules it puts
things in the place of others:

- ``attach(model, device="cpu")`` attaches on the accelerator. Tensors of a call go there, and the
  tensors that it returns come back to the CPU; a KV cache stays where it is.
- ``DeviceMeter`` reads the accelerator's own statistics.
- ``make_model(family)`` makes a model in the dtype of ``--models-in``, where a test names none.

So a test holds results of the accelerator against those of plain transformers on the CPU. Tests of
how the CPU itself is metered or planned for are skipped; ``OF_THE_CPU`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from ds_finepage._compat.transformers import CACHE_NAMES
from ds_finepage.api import attach
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.handle import Handle
from tests.device import loading

OF_THE_CPU = {
    "test_measuring_ops_takes_no_more_than_the_budget": "the device's statistics see it anyway",
    "test_a_refusal_ends_when_what_was_held_is_let_go": "results go to the CPU, so nothing is held",
}
"""Tests that are skipped, with the reasons."""


num_attached = 0
"""Models that were attached on the accelerator so far."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-in",
        choices=("float32", "bfloat16"),
        default="float32",
        help="the dtype of models for which a test names none",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{num_attached} attached on {_accelerator().type}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    replacements = _replacements(_accelerator(), getattr(torch, config.getoption("models_in")))
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for name, here in replacements.items():
            if hasattr(module, name):
                setattr(module, name, here)
    for item in items:
        reason = OF_THE_CPU.get(getattr(item, "originalname", item.name))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _accelerator() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    try:
        return loading.load(1)
    except loading.DeviceMissing as error:
        raise pytest.UsageError(str(error)) from error


def _replacements(where: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    from tests.integration.families import make_model  # not before conftest.py has set the scene

    return {
        "CPU": where,
        "attach": partial(attached, where),
        "DeviceMeter": lambda device: DeviceMeter(where),
        "OpMeter": lambda device: OpMeter(where),
        "make_model": lambda family, dtype=dtype, **given: make_model(family, dtype, **given),
    }


def attached(where: torch.device, model: Any, *, device: str, **settings: Any) -> Handle:
    """Attach on the accelerator; callers of the model stay on the CPU."""
    global num_attached
    assert device == "cpu"
    handle = attach(model, device=where, **settings)
    num_attached += 1
    # Both are put back by detach, which knows them as its own.
    model._compiled_call_impl = _Carried(model._compiled_call_impl, where)
    if hasattr(model, "generate"):
        model.generate = _Carried(model.generate, where)
    return handle


class _Carried:
    """A function whose tensors are carried to a device, and its results back."""

    inside = False

    def __init__(self, function: Callable[..., Any], where: torch.device) -> None:
        self._function, self._where = function, where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _Carried.inside:
            return self._function(*args, **kwargs)
        _Carried.inside = True
        try:
            found = self._function(*_moved(args, self._where), **_moved(kwargs, self._where))
        finally:
            _Carried.inside = False
        return _moved(found, torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _moved(value: Any, where: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(where)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, where) for v in value)
    if isinstance(value, Mapping):
        for key in list(value):  # in place: a model's output keeps its class
            if key not in CACHE_NAMES:
                value[key] = _moved(value[key], where)  # type: ignore[index]
        return value
    return value
