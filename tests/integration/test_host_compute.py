"""Products that the host computes, with weights where their masters lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import ConfigError
from ds_finepage.execution import disk, file_weights, host_attention
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.attention import HOST_ATTENTION, Attention
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.packing import native
from ds_finepage.planning import pipeline
from ds_finepage.planning.host_lane import can_attend, can_multiply
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_attention import with_host_attention
from ds_finepage.planning.rewrite.host_products import with_host_rows
from ds_finepage.planning.rewrite.split import Divisible
from ds_finepage.runtime.handle import Handle
from ds_finepage.runtime.ranks import Ranks
from tests.integration.families import (
    SLOW_LINK,
    WIDE_CACHE,
    greedy,
    left_padded,
    logits,
    make_model,
    token_ids,
    tokens,
)
from tests.integration.test_experts import EXPERTS

CPU = torch.device("cpu")
WITH_HOST = replace(SLOW_LINK, host_bytes_per_s=4e8, host_flops_per_s=1e12)
"""A machine whose host computes faster than its link copies."""

NUM_TOKENS = 12
Choose = Callable[[Sequence[Divisible]], dict[int, int]]


def every_row(units: Sequence[Divisible]) -> dict[int, int]:
    return {unit.buffer: unit.num_rows for unit in units}


def some_weights(units: Sequence[Divisible]) -> dict[int, int]:
    rng, (first, *others) = random.Random(len(units)), units
    found = {unit.buffer: rng.choice([0, unit.num_rows]) for unit in others}
    return found | {first.buffer: first.num_rows}


def some_rows(units: Sequence[Divisible]) -> dict[int, int]:
    rng = random.Random(len(units))
    steps = {unit.buffer: unit.exact_rows or 1 for unit in units}
    return {u.buffer: rng.randint(0, u.num_rows // (n := steps[u.buffer])) * n for u in units}


def take_way(monkeypatch: pytest.MonkeyPatch, way: Callable[[Problem], TaskGraph]) -> None:
    """Let plans of the product have a lane of the host, also where it is slower."""
    monkeypatch.setattr(pipeline, "with_host_lane", lambda problem: [way(problem)])
    monkeypatch.setattr(pipeline, "predicted_ns", lambda plan, _: -len(plan.graph.host_tasks))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Choose], None]]:
    """Let the host compute what a test chooses, however long that takes."""

    def force(choose: Choose) -> None:
        def way(problem: Problem) -> TaskGraph:
            units = can_multiply(problem.graph)
            return with_host_rows(problem.graph, units, choose(units))

        take_way(monkeypatch, way)

    torch._dynamo.reset()
    yield force


def attached(model: Any, budget: str = "60%weights", **settings: Any) -> Handle:
    given = {"profile": WITH_HOST, "host_compute": "auto", **settings}
    return attach(model, device="cpu", device_budget=budget, **given)


def num_host_tasks(handle: Handle) -> int:
    return sum(len(memgraph.graph.host_tasks) for memgraph, _ in handle.plans())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choose", [every_row, some_weights])
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_whole_products_of_the_host_give_the_same_bits_within_the_budget(
    family: str, choose: Choose, dtype: torch.dtype, forced: Any
) -> None:
    model, ids = make_model(family, dtype=dtype), token_ids(9)
    expected = logits(model, ids), tokens(model, ids, NUM_TOKENS, cache=None)
    forced(choose)
    handle = attached(model)
    with DeviceMeter(CPU) as meter:
        assert torch.equal(logits(model, ids), expected[0])
        assert torch.equal(tokens(model, ids, NUM_TOKENS, cache=None), expected[1])
    assert num_host_tasks(handle) > 0
    assert meter.peak_bytes <= handle.stats.budget_bytes
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    handle.detach()
    assert torch.equal(logits(model, ids), expected[0])


@pytest.mark.parametrize(
    ("family", "dtype", "budget"),
    [("mixtral", torch.float32, "3MiB"), ("qwen3_moe", torch.bfloat16, "600KiB")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_host_multiplies_by_whole_experts(
    family: str, dtype: torch.dtype, budget: str, forced: Any
) -> None:
    model, ids = make_model(family, dtype, **EXPERTS[family]), token_ids(5)
    model.set_experts_implementation("grouped_mm")
    expected = tokens(model, ids, NUM_TOKENS, cache=None)
    forced(every_row)
    handle = attached(model, budget)
    with DeviceMeter(CPU) as meter:
        assert torch.equal(tokens(model, ids, NUM_TOKENS, cache=None), expected)
    assert meter.peak_bytes <= handle.stats.budget_bytes
    on_host = {
        buffer.name
        for memgraph, _ in handle.plans()
        for buffer in memgraph.graph.buffers
        if buffer.kind is BufferKind.MASTER
    }
    assert any("experts" in name for name in on_host)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("choose", [every_row, some_weights, some_rows])
def test_packed_products_of_the_host_give_the_same_bits(
    weights: str, choose: Choose, forced: Any
) -> None:
    ids = token_ids(9)
    alone = attached(model := make_model("llama"), "1MiB", host_compute="off", weights=weights)
    expected = logits(model, ids), tokens(model, ids, NUM_TOKENS, cache=None)
    alone.detach()
    forced(choose)
    handle = attached(model, "400KiB", weights=weights)
    assert torch.equal(logits(model, ids), expected[0])
    assert torch.equal(tokens(model, ids, NUM_TOKENS, cache=None), expected[1])
    assert num_host_tasks(handle) > 0


@pytest.mark.parametrize("seed", range(4))
def test_cut_products_have_the_tokens_of_whole_ones_and_no_larger_error(
    seed: int, forced: Any
) -> None:
    model, ids = make_model("llama"), token_ids(9 + seed)
    plain = logits(model, ids)
    true = logits(make_model("llama").double(), ids)
    forced(some_rows)
    handle = attached(model, split=True)
    assert num_host_tasks(handle) == 0  # nothing is planned yet
    error = (logits(model, ids) - true).abs().max()
    assert num_host_tasks(handle) > 0
    assert error <= 2 * (plain - true).abs().max()


def test_cut_products_give_equal_tokens_in_bfloat16(forced: Any) -> None:
    model, ids = make_model("llama", dtype=torch.bfloat16), token_ids(9)
    expected = tokens(model, ids, NUM_TOKENS, cache=None)
    forced(some_rows)
    handle = attached(model, split=True)
    assert torch.equal(tokens(model, ids, NUM_TOKENS, cache=None), expected)
    assert num_host_tasks(handle) > 0


def test_delays_on_every_lane_change_nothing(forced: Any) -> None:
    model, ids = make_model("llama"), token_ids(9)
    forced(some_weights)
    handle = attached(model)
    expected = tokens(model, ids, 3, cache=None)
    for seed in range(50):
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed, max_lane_delay_us=300)
        handle.replan(debug=debug)
        assert torch.equal(tokens(model, ids, 3, cache=None), expected)


def each(attended: Sequence[Attention]) -> Sequence[Attention]:
    return attended


def every_second(attended: Sequence[Attention]) -> Sequence[Attention]:
    return attended[::2]


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let the host attend in the layers that a test chooses, however long that takes."""

    def force(choose: Any) -> None:
        def way(problem: Problem) -> TaskGraph:
            return with_host_attention(problem.graph, choose(can_attend(problem.graph)))

        take_way(monkeypatch, way)

    torch._dynamo.reset()
    return force


def num_attended(handle: Handle) -> int:
    tasks = (task for memgraph, _ in handle.plans() for task in memgraph.graph.tasks)
    return sum(task.op == HOST_ATTENTION for task in tasks)


def steps(model: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of two prompts, and their logits."""
    found = model.generate(
        **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("choose", [each, every_second])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "phi"])
def test_attention_of_the_host_has_no_larger_error(
    family: str, choose: Any, pad: int, attends: Any
) -> None:
    given = left_padded(30, pad)
    expected, plain = steps(model := make_model(family), **given)
    _, true = steps(make_model(family).double(), **given)
    attends(choose)
    handle = attached(model, "80%weights", kv_cache="host")
    with DeviceMeter(CPU) as meter:
        found, near = steps(model, **given)
    assert torch.equal(found, expected)
    assert (near - true).abs().max() <= 2 * (plain - true).abs().max()
    assert num_attended(handle) > 0 and meter.peak_bytes <= handle.stats.budget_bytes
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("choose", [each, every_second])
def test_attention_of_the_host_gives_equal_tokens_in_bfloat16(
    choose: Any, family: str, attends: Any
) -> None:
    given = left_padded(30, 5)
    expected, _ = steps(model := make_model(family, dtype=torch.bfloat16), **given)
    attends(choose)
    handle = attached(model, "80%weights", kv_cache="host")
    assert torch.equal(steps(model, **given)[0], expected) and num_attended(handle) > 0


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}],
    ids=str,
)
def test_beams_drafts_and_static_caches_give_equal_tokens(
    settings: dict[str, Any], attends: Any
) -> None:
    model = make_model("llama")
    expected = greedy(model, **settings)
    attends(each)
    handle = attached(model, "80%weights", kv_cache="host")
    assert torch.equal(greedy(model, **settings), expected)
    assert (num_attended(handle) > 0) is ("cache_implementation" not in settings)


def test_delays_on_every_lane_change_no_attention(attends: Any) -> None:
    model, ids = make_model("llama"), token_ids(9)
    attends(every_second)
    handle = attached(model, "80%weights", kv_cache="host")
    expected = tokens(model, ids, 4, cache=None)
    for seed in range(50):
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed, max_lane_delay_us=300)
        handle.replan(debug=debug)
        assert torch.equal(tokens(model, ids, 4, cache=None), expected)
    assert num_attended(handle) > 0


def test_the_planner_lets_the_host_attend_where_that_is_faster() -> None:
    model, ids = make_model("llama", **WIDE_CACHE), token_ids(60, batch=4)
    expected = tokens(model, ids, NUM_TOKENS, cache=None)
    handle = attached(model, "2MiB", kv_cache="host")
    assert torch.equal(tokens(model, ids, NUM_TOKENS, cache=None), expected)
    assert num_attended(handle) > 0


@pytest.mark.parametrize("split", [False, True])
def test_the_planner_lets_the_host_compute_where_that_is_faster(split: bool) -> None:
    model, ids = make_model("llama", dtype=torch.bfloat16), token_ids(9)
    expected = tokens(model, ids, NUM_TOKENS, cache=None)
    copied = []
    for host_compute in ("off", "auto"):
        handle = attached(model, host_compute=host_compute, split=split)
        assert torch.equal(tokens(model, ids, NUM_TOKENS, cache=None), expected)
        assert (num_host_tasks(handle) > 0) is (host_compute == "auto")
        copied.append(sum(memgraph.reloaded_bytes for memgraph, _ in handle.plans()))
        handle.detach()
    assert copied[1] < copied[0]


def test_the_host_is_measured_where_the_profile_does_not_know_it() -> None:
    handle = attached(make_model("llama"), profile=SLOW_LINK)
    assert handle.profile.has_host and handle.profile.h2d_bytes_per_s == SLOW_LINK.h2d_bytes_per_s
    handle.detach()
    handle = attached(make_model("llama"), host_compute="off")
    assert not handle.profile.has_host


def test_a_changed_weight_is_the_one_that_the_host_reads(forced: Any) -> None:
    model, ids = make_model("llama"), token_ids(9)
    forced(every_row)
    handle = attached(model)
    before = logits(model, ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(2)
    after = logits(model, ids)
    handle.detach()
    assert torch.equal(after, logits(model, ids)) and not torch.equal(after, before)


def test_hooks_see_the_products_of_the_host(forced: Any) -> None:
    model, ids = make_model("llama"), token_ids(9)
    forced(every_row)
    handle = attached(model)
    logits(model, ids)
    seen: list[tuple[str, Any]] = []
    handle.register_op_hook(before=lambda task, operands: seen.append((task.op, operands)))
    logits(model, ids)
    products = [operands for op, operands in seen if op == "aten.mm.default"]
    shapes = {tuple(weight.shape) for _, weight in products}
    assert tuple(model.lm_head.weight.t().shape) in shapes


def test_a_policy_without_the_lane_says_so(caplog: pytest.LogCaptureFixture) -> None:
    handle = attached(make_model("llama"), policy="horizon")
    assert "finepage.host_compute has no effect: policy horizon" in caplog.text
    assert not handle.profile.has_host


def test_packed_weights_need_a_compiler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "there is no C compiler")
    handle = attached(make_model("llama"), weights="int4")
    assert "this machine compiles none: there is no C compiler" in caplog.text
    assert not handle.profile.has_host
    handle.detach()
    handle = attached(make_model("llama"))
    assert handle.profile.has_host


def test_attention_needs_a_compiler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_attention, "why_not", lambda: "there is no C compiler")
    handle = attached(make_model("llama"))
    assert "this machine compiles none: there is no C compiler" in caplog.text
    assert not handle.profile.has_host


@pytest.mark.parametrize("shared", [{"has_whole_model": False}, {"collects_weights": True}])
def test_ranks_that_share_a_model_compute_on_the_device(
    shared: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"of_all": lambda self, row: [row]}
    handle = attached(make_model("llama"), ranks=type("SharedRanks", (Ranks,), shared | rows)())
    assert "finepage.host_compute has no effect: several ranks share the model" in caplog.text
    assert not handle.profile.has_host


def test_weights_in_files_are_no_weights_in_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (disk, file_weights):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 12)
    make_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    handle = attached(model, host_budget=weight_bytes // 2)
    assert "finepage.host_compute has no effect: weights lie in files" in caplog.text
    assert not handle.profile.has_host
    handle.detach()


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="finepage.host_compute: 'on' is unknown. Write "):
        attached(make_model("llama"), host_compute="on")
