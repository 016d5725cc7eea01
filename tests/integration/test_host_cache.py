"""A KV cache that has no room on the device, in host memory: same tokens, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ds_finepage.api import attach
from ds_finepage.capture.from_config import capture_config
from ds_finepage.execution import host_ops
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, TaskGraph
from ds_finepage.integrations.transformers.host_cache import move_to_host, seen_lengths, take_back
from ds_finepage.integrations.transformers.preflight import Longest, kv_bytes
from ds_finepage.planning.pipeline import needs_of
from ds_finepage.runtime.handle import Handle
from tests.integration.families import CACHE, LAST, WIDE_CACHE, greedy, make_model, token_ids

pytestmark = pytest.mark.usefixtures("fresh")


@dataclass
class Large:
    """A model whose KV cache is larger than the budget, and what plain transformers generated."""

    model: Any
    handle: Handle
    budget_bytes: int
    cache_bytes: int


BATCH, LENGTH, NEW = 6, 100, 6


@pytest.fixture(scope="module")
def large() -> Iterator[Large]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model = make_model("llama", **WIDE_CACHE)
    handle = attach(model, device_budget="64MiB", device="cpu")
    longest = Longest(BATCH, LENGTH + NEW, LENGTH)
    cache_bytes = kv_bytes(model.config, model.dtype, longest)
    assert cache_bytes is not None
    yield Large(model, handle, cache_bytes * 9 // 10, cache_bytes)
    handle.detach()


PAGED: dict[str, Callable[[Any], torch.Tensor]] = {
    "greedy": lambda m: greedy(m, input_ids=token_ids(LENGTH, batch=BATCH), max_new_tokens=NEW),
    "beams": lambda m: greedy(
        m, input_ids=token_ids(LENGTH, batch=2), num_beams=3, max_new_tokens=NEW
    ),
}


@pytest.mark.parametrize("name", PAGED)
def test_a_cache_larger_than_the_budget_goes_to_host_memory(large: Large, name: str) -> None:
    model, handle = large.model, large.handle
    handle.replan(budget_bytes=64 << 20)
    plain = PAGED[name](model)  # held against plain transformers by the tests above
    handle.replan(budget_bytes=large.budget_bytes)
    before = handle.stats.num_caches_on_host
    for _ in range(2):
        with DeviceMeter(torch.device("cpu")) as meter:
            assert torch.equal(PAGED[name](model), plain)
        assert 0 < meter.peak_bytes <= handle.stats.budget_bytes
    assert handle.stats.num_caches_on_host > before
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    assert handle.stats.budget_bytes < large.cache_bytes


def counted(graph: TaskGraph) -> tuple[int, ...]:
    """Return the rows in and out, the arena, and the bytes beside it without workspaces."""
    needs = needs_of(graph, alignment=64, cuts_weights=False)
    return (
        sum(b.nbytes for b in graph.buffers if graph.is_handed(b)),
        sum(graph.buffers[b].nbytes for t in graph.tasks if t.op == TO_HOST for b in t.writes),
        needs.min_arena_bytes,
        needs.non_arena_bytes - graph.workspace_bytes,
    )


def test_a_capture_from_the_config_counts_the_same_bytes(large: Large) -> None:
    """So predictions for a KV cache in host memory are those of a run."""
    large.handle.replan(budget_bytes=large.budget_bytes)
    PAGED["greedy"](large.model)
    compared = set()
    for ran in [found.graph for found in large.handle._runner.table.passes]:
        given = {ran.buffers[ran.tensors[i.tensor].buffer].id for i in ran.inputs}
        rows = [b for b in ran.buffers if b.kind is BufferKind.HOST]
        ids = next(t.shape for t in ran.tensors if t.dtype == "int64" and t.buffer in given)
        if not rows or ids[0] != BATCH or ids[1] not in (1, LENGTH):
            continue
        phase = "decode" if ids[1] == 1 else "prefill"
        live = next((ran.tensors[b.gather].shape[0] for b in ran.buffers if ran.is_handed(b)), 0)
        predicted = capture_config(
            large.model.config,
            phase=phase,
            batch=BATCH,
            seq=int(live + ids[1]),
            dtype=str(large.model.dtype).removeprefix("torch."),
            host_ops=host_ops,
        )
        assert counted(ran) == counted(predicted)
        compared.add(phase)
    assert compared == {"decode", "prefill"}


def test_a_cache_in_host_memory_can_be_cut_and_gone_on_with(large: Large) -> None:
    model, handle = large.model, large.handle
    ids = token_ids(LENGTH, batch=BATCH)

    def steps() -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            out = model(ids, **LAST)
            cache = out[CACHE]
            for step in range(4):
                new = token_ids(3, batch=BATCH, seed=step)
                out = model(new, **{CACHE: cache}, **LAST)
                found.append(out.logits)
                cache.crop(-2)
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.arange(0, 2 * BATCH, 2))
                assert cache.get_seq_length() == LENGTH + step + 1
        return found

    handle.replan(budget_bytes=64 << 20)
    plain = steps()
    handle.replan(budget_bytes=large.budget_bytes)
    before = handle.stats.num_caches_on_host
    for a, b in zip(steps(), plain, strict=True):
        assert torch.equal(a, b)
    assert handle.stats.num_caches_on_host == before + 1


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_a_cache_in_host_memory_goes_on_with_a_model_that_is_not_attached(mode: Any) -> None:
    model = make_model("llama")

    def steps(*, on_host: bool) -> list[torch.Tensor]:
        with mode():
            cache = model(token_ids(9, batch=2), **LAST)[CACHE]
            if on_host:
                assert move_to_host(cache)
        found = []
        with torch.no_grad():
            for seed in range(3):
                new = token_ids(1, batch=2, seed=seed)
                found.append(model(new, **{CACHE: cache}, **LAST).logits)
        assert cache.get_seq_length() == 9 + 3
        return found

    plain = steps(on_host=False)
    assert all(map(torch.equal, steps(on_host=True), plain))


def test_what_slid_out_of_a_window_cannot_be_taken_back() -> None:
    window = DynamicCache(config=make_model("mistral").config)
    before = seen_lengths([window])
    window.layers[0].update(*(torch.zeros(1, 2, 3, 32) for _ in range(2)))
    assert not take_back(before)


def test_an_error_leaves_the_cache_in_host_memory_as_it_was(large: Large) -> None:
    model, handle = large.model, large.handle
    ids, new = token_ids(LENGTH, batch=BATCH), token_ids(1, batch=BATCH)
    handle.replan(budget_bytes=large.budget_bytes)
    with torch.no_grad():
        cache = model(ids, **LAST)[CACHE]
        failing = iter([RuntimeError("stop")])

        def fail(*_: Any) -> None:
            for error in failing:
                raise error

        remove = handle.register_op_hook(after=fail)
        with pytest.raises(RuntimeError, match="stop"):
            model(new, **{CACHE: cache}, **LAST)
        remove()
        assert cache.get_seq_length() == LENGTH
        once = model(new, **{CACHE: cache}, **LAST).logits
    assert cache.get_seq_length() == LENGTH + 1
    handle.replan(budget_bytes=64 << 20)
    with torch.no_grad():
        cache = model(ids, **LAST)[CACHE]
        assert torch.equal(model(new, **{CACHE: cache}, **LAST).logits, once)
