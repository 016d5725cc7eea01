"""Ordinary actions on an attached model: none crashes, gives a wrong value, or is lost.

Each runs in a process of its own, so that a crash is that action's. The processes are forked from
one that has imported everything already.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.actions import models, weights
from tests.integration.actions.subjects import Subject, make_subject

SECONDS = 120

ACTIONS = {**weights.ACTIONS, **models.ACTIONS}
PRELOADED = [
    "torch._dynamo",
    "torch._inductor.config",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "tests.integration.actions.warm",
]


def _cases() -> list[Any]:
    cases = []
    for name in ACTIONS:
        cases += [(name, False, False), (name, True, False)]
    cases += [(name, False, False) for name in models.PLAIN_ACTIONS]
    cases += [(name, True, False) for name in models.DEEPSPEED_ACTIONS]
    for name in models.LANGUAGE_ACTIONS:
        cases += [(name, False, True), (name, True, True)]
    return [pytest.param(*case, id=f"{case[0]}{'-deepspeed' * case[1]}") for case in cases]


def _action(name: str) -> Callable[[Subject], None]:
    tables = (ACTIONS, models.PLAIN_ACTIONS, models.DEEPSPEED_ACTIONS, models.LANGUAGE_ACTIONS)
    (found,) = [table[name] for table in tables if name in table]
    return found


def _act(name: str, with_deepspeed: bool, language_model: bool, answer: Any) -> None:
    from tests.integration.engines import one_process_deepspeed

    try:
        if with_deepspeed:
            with one_process_deepspeed():
                _action(name)(make_subject(deepspeed=True, language_model=language_model))
        else:
            _action(name)(make_subject(deepspeed=False, language_model=language_model))
        answer.send("")
    except pytest.skip.Exception as skipped:
        answer.send(f"skipped: {skipped}")
    except BaseException:
        answer.send(traceback.format_exc())


@pytest.fixture(scope="module")
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def test_there_are_enough_of_them() -> None:
    assert len(ACTIONS) + len(models.LANGUAGE_ACTIONS) >= 60


@pytest.mark.parametrize(("name", "with_deepspeed", "language_model"), _cases())
def test_action(context: Any, name: str, with_deepspeed: bool, language_model: bool) -> None:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_act, args=(name, with_deepspeed, language_model, sender))
    process.start()
    sender.close()
    try:
        answered = receiver.poll(SECONDS)
        found = receiver.recv() if answered else f"no answer within {SECONDS} s"
    except EOFError:
        process.join()
        found = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if found.startswith("skipped: "):
        pytest.skip(found.removeprefix("skipped: "))
    assert not found, found
