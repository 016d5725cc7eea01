"""Actions of several threads and models, of detaching and freeing, and on language models."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import tempfile
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import StoreError
from tests.integration.actions.models import replace_a_module
from tests.integration.actions.subjects import Actions, Net, Subject, equal_results, run
from tests.integration.families import greedy

SECONDS = 30

ACTIONS, PLAIN, DEEPSPEED, LANGUAGE = (Actions() for _ in range(4))
"""On a net however it is attached, plainly, or by DeepSpeed; and on a language model."""


# Threads, and several models.


@ACTIONS.add
def two_threads(subject: Subject) -> None:
    expected, found = run(subject.plain, subject.x), []

    def call() -> None:
        found.extend(run(subject.model, subject.x) for _ in range(8))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24 and all(torch.equal(f, expected) for f in found)


@ACTIONS.add
def write_in_another_thread(subject: Subject) -> None:
    def write() -> None:
        subject.both(lambda m: m.up.weight.data.mul_(2))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


@ACTIONS.add
def call_in_a_forked_process(subject: Subject) -> None:
    """A server that loads a model and forks its workers then."""
    subject.handle.replan(debug=DebugConfig(lane_delay_seed=1))  # threads make all copies
    subject.same()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(SECONDS)
            subject.same()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@ACTIONS.add
def share_memory_between_processes(subject: Subject) -> None:
    subject.both(lambda m: m.share_memory())
    subject.same()
    assert all(p.is_shared() for p in subject.model.parameters())
    subject.both(lambda m: m.up.weight.data.mul_(2))


@ACTIONS.add
def two_models(subject: Subject) -> None:
    other = Net()
    other.up.weight.data.mul_(2)
    x = torch.randn(5, 16)
    expected = run(other, x)
    handle = attach(other, device_budget="1MiB", device="cpu")
    for _ in range(3):
        assert torch.equal(run(other, x), expected)
        subject.same(times=1)
    handle.detach()
    subject.both(lambda m: m.up.weight.data.mul_(2))


@ACTIONS.add
def attach_twice(subject: Subject) -> None:
    other = nn.Sequential(nn.Linear(16, 48))
    other[0].weight = subject.model.up.weight
    for module in (subject.model, subject.model.blocks, other):
        with pytest.raises(StoreError, match="belongs to a model that ds_finepage is attached to"):
            attach(module, device_budget="1MiB", device="cpu")


@ACTIONS.add
def debug_mode(subject: Subject) -> None:
    subject.handle.replan(debug=DebugConfig(poison_vacated=True, lane_delay_seed=3))
    subject.both(lambda m: m.up.weight.data.mul_(2))


@ACTIONS.add
def change_while_everything_fits(subject: Subject) -> None:
    subject.make_room()
    subject.same(times=3)
    assert subject.handle.stats.num_resident_runs
    subject.both(lambda m: m.up.weight.data.mul_(2))
    subject.same()
    subject.both(lambda m: setattr(m.up.weight, "data", torch.ones(48, 16)))
    subject.same()
    with torch.no_grad():
        subject.both(lambda m: m.down.weight.add_(1))


# Detaching and freeing.


@ACTIONS.add
def detach_in_between(subject: Subject) -> None:
    with torch.no_grad():
        subject.both(lambda m: m.down.bias.add_(1))
    assert equal_results(subject.detached(), subject.plain, subject.x)


@PLAIN.add
def detach_and_attach_again(subject: Subject) -> None:
    for _ in range(2):
        subject.handle.detach()
        subject.handle.detach()
        subject.both(lambda m: m.up.weight.data.mul_(1.5))
        subject.same()
        subject.handle = attach(subject.model, device_budget="1GiB", device="cpu")
        subject.same()


@ACTIONS.add
def detach_a_changed_model(subject: Subject) -> None:
    subject.both(replace_a_module)
    subject.both(lambda m: m.down.half().float())
    subject.same()
    subject.both(lambda m: m.up.weight.data.mul_(3))
    assert equal_results(subject.detached(), subject.plain, subject.x)


@ACTIONS.add
def delete_everything(subject: Subject) -> None:
    dead = [weakref.ref(o) for o in (subject.model, subject.handle, subject.model.up.weight)]
    arena = subject.handle._memory._arena
    assert arena is not None
    dead.append(weakref.ref(arena.bytes))
    del arena
    if subject.engine is not None:
        dead.append(weakref.ref(subject.engine))
    subject.model = subject.engine = subject.handle = None
    gc.collect()
    assert [ref() is None for ref in dead] == [True] * len(dead)
    for thread in threading.enumerate():
        if thread.name.startswith("finepage"):
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert subject.plain.up.weight.data is not None
    assert nn.Parameter.data is torch._C.TensorBase.data


# DeepSpeed.


@ACTIONS.add
def gather_and_read(subject: Subject) -> None:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(subject.model.parameters())):
        assert torch.equal(subject.model.up.weight, subject.plain.up.weight)
        subject.same()
    assert torch.equal(subject.model.up.weight, subject.plain.up.weight)


@ACTIONS.add
def gather_and_write(subject: Subject) -> None:
    import deepspeed

    for model in (subject.model, subject.plain):
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            with torch.no_grad():
                model.up.weight.mul_(2)
                model.down.weight.data.add_(1)
    assert torch.equal(subject.model.up.weight, subject.plain.up.weight)


@DEEPSPEED.add
def call_the_engine(subject: Subject) -> None:
    assert equal_results(subject.engine, subject.plain, subject.x)


@DEEPSPEED.add
def consolidated_state(subject: Subject) -> None:
    fresh = Net()
    fresh.load_state_dict(subject.engine._zero3_consolidated_16bit_state_dict())
    assert equal_results(fresh, subject.plain, subject.x)


@DEEPSPEED.add
def destroy_the_engine(subject: Subject) -> None:
    subject.engine.destroy()
    assert not subject.handle.attached


# Language models.


def _same_tokens(subject: Subject) -> None:
    found, expected = subject.both(greedy)
    assert torch.equal(found, expected)


@LANGUAGE.add
def generate_after_a_change(subject: Subject) -> None:
    subject.make_room()
    _same_tokens(subject)
    subject.both(lambda m: m.lm_head.weight.data.mul_(-1))
    _same_tokens(subject)


@LANGUAGE.add
def resize_the_vocabulary(subject: Subject) -> None:
    def resize(model: Any) -> None:
        torch.manual_seed(1)
        model.resize_token_embeddings(300, mean_resizing=False)

    subject.make_room()
    subject.both(resize)
    subject.same()
    _same_tokens(subject)


@LANGUAGE.add
def tie_the_head(subject: Subject) -> None:
    def tie(model: Any) -> None:
        model.lm_head.weight = model.model.embed_tokens.weight

    subject.make_room()
    subject.both(tie)


@LANGUAGE.add
def save_pretrained(subject: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        fresh = type(subject.plain).from_pretrained(folder).eval()
    assert equal_results(fresh, subject.plain, subject.x)


@LANGUAGE.add
def deepcopy_and_generate(subject: Subject) -> None:
    twin = copy.deepcopy(subject.model)
    assert torch.equal(greedy(twin), greedy(subject.plain))
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    assert not torch.equal(run(twin, subject.x), run(subject.plain, subject.x))


LANGUAGE.gives(
    "pickle_and_generate", lambda m: greedy(pickle.loads(pickle.dumps(m))), deepspeed=False
)
LANGUAGE.gives("memory_footprint", lambda m: m.get_memory_footprint())


@LANGUAGE.add
def merge_lora(subject: Subject) -> None:
    peft = pytest.importorskip("peft")

    def merged(model: Any) -> Any:
        torch.manual_seed(2)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).eval()
        first = run(adapted, subject.x)
        whole = adapted.merge_and_unload()
        assert whole is model
        return first

    subject.make_room()
    found, expected = subject.both(merged)
    assert torch.equal(found, expected)
