"""Runs actions in a process of their own, so that a crash is theirs.

The processes are forked from one that has imported everything already, and has attached to a model.
"""

from __future__ import annotations

import multiprocessing
import traceback
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.actions import lives, models, weights
from tests.integration.actions.subjects import make_subject
from tests.integration.engines import one_process_deepspeed

SECONDS = 120

PRELOADED = [
    "torch._dynamo",
    "torch._inductor.config",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "tests.integration.actions.warm",
]

NET_ACTIONS = {**weights.ACTIONS, **models.ACTIONS, **lives.ACTIONS}
ALL_ACTIONS = {**NET_ACTIONS, **lives.PLAIN, **lives.DEEPSPEED, **lives.LANGUAGE}


def run_in_a_process(*names: str, deepspeed: bool) -> None:
    """Run actions on one model, one by one.

    Fails with what the first one said that went wrong, or with the status of the process.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_act, args=(names, deepspeed, sender))
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(SECONDS) else f"no answer within {SECONDS} s"
    except EOFError:
        process.join()
        found = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if found.startswith("skipped: "):
        pytest.skip(found.removeprefix("skipped: "))
    assert not found, found


def _act(names: tuple[str, ...], deepspeed: bool, answer: Any) -> None:
    (is_language_model,) = {name in lives.LANGUAGE for name in names}
    name = "nothing"
    try:
        with ExitStack() as stack:
            if deepspeed:  # whose process group has threads, which do not outlive a fork
                stack.enter_context(one_process_deepspeed())
                subject = make_subject(deepspeed=True, language_model=is_language_model)
            else:
                from tests.integration.actions.warm import SUBJECTS  # made before the fork

                SUBJECTS.pop(not is_language_model).handle.detach()
                subject = SUBJECTS.pop(is_language_model)
            for name in names:
                ALL_ACTIONS[name](subject)
                if subject.handle is not None and subject.handle.attached:
                    subject.same()
        answer.send("")
    except pytest.skip.Exception as skipped:
        answer.send(f"skipped: {skipped}")
    except BaseException:
        answer.send(f"{name}: {traceback.format_exc()}")
