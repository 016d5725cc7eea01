"""The engines of the comparison, in this process: counted bytes, peaks, timelines, failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage._compat.torch import _profiler_enabled
from ds_finepage.compare import finepage_arms, worker, zero_arms
from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.compare.engine import REQUESTS, Engine
from ds_finepage.compare.modelling import model_arm
from ds_finepage.compare.worker import NUM_RECORDED, RUN_FILE, RUNS, TOKENS_FILE, Worker
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.modeller import Modeller
from ds_finepage.planning.policies import POLICIES
from ds_finepage.reporting.results import Run, load_passes
from tests.integration.cli.models import small_model
from tests.integration.compare.compared import Compared
from tests.integration.engines import ZERO_ON_CPU
from tests.unit.compare.runs import request

pytestmark = pytest.mark.usefixtures("nothing_persisted")

VOCABULARY = 2000
"""With fewer rows the stock engine keeps every weight on the device."""

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
}
BATCH, PROMPT, NEW = 2, 6, 5
DS_CONFIG = {**ZERO_ON_CPU, "bf16": {"enabled": True}}
ZERO_ARMS = [arm for arm in ARMS if arm.startswith("zero")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, str(small_model(folder, **SHAPE)))
    shape = {"batch": BATCH, "prompt_tokens": PROMPT, "new_tokens": NEW}
    models = Modeller(str(folder), **shape, device_budget="90%weights", hardware="t4")
    return Compared(folder, DS_CONFIG, models, **shape)


@pytest.fixture(scope="module")
def expected(compared: Compared) -> list[list[int]]:
    """The tokens of plain transformers."""
    return compared.tokens(compared.plain())


@pytest.mark.parametrize("arm", ZERO_ARMS)
def test_stock_copies_what_is_simulated(
    arm: str, compared: Compared, expected: list[list[int]], tmp_path: Path
) -> None:
    assert ARMS[arm].policy in POLICIES
    found, tokens = compared.run(arm, tmp_path)
    for phase in (found.prefill, found.decode):
        assert phase.h2d_bytes == phase.modelled_h2d_bytes
        assert phase.h2d_bytes and phase.d2h_bytes == 0 and phase.wall_ns
    assert tokens == [expected] * 3  # two counted calls and a timed one
    modelled = model_arm(ARMS[arm], compared.models)
    assert modelled.settings.items() <= found.settings.items()
    assert 0 < found.load_ns < found.first_token_ns < found.load_ns + found.first_call_ns
    assert found.peak_bytes and found.probe_bytes_per_s and found.host_bytes


def test_the_fetches_of_later_engines_are_not_counted_any_more(
    compared: Compared, tmp_path: Path
) -> None:
    from ds_finepage._compat.deepspeed import partition_parameters

    fetch = partition_parameters._no_gather_coalesced
    compared.run("zero", tmp_path)
    assert partition_parameters._no_gather_coalesced is fetch


def test_plain_counts_every_weight(
    compared: Compared, expected: list[list[int]], tmp_path: Path
) -> None:
    found, tokens = compared.run("plain", tmp_path)
    assert tokens == [expected] * 3
    assert found.peak_bytes and found.peak_bytes > compared.models.weight_bytes
    assert (found.prefill.h2d_bytes, found.decode.d2h_bytes) == (0, 0)


def test_ours_holds_the_budget_and_shows_its_passes(
    compared: Compared, expected: list[list[int]], tmp_path: Path
) -> None:
    found, tokens = compared.run("finepage", tmp_path)
    budget_bytes = compared.models.budget_bytes
    assert tokens == [expected] * (3 + NUM_RECORDED)
    assert found.peak_bytes and found.peak_bytes <= budget_bytes
    assert found.settings == {"policy": "finepage", "device_budget": budget_bytes}
    passes = {each.name: each for each in load_passes(tmp_path)}
    assert {"prefill", "decode"} <= set(passes)
    for name in ("prefill", "decode"):  # the host's time before the lanes begin
        assert min(span.start_ns for span in passes[name].predicted.spans) > 0
    decode = passes["decode"]
    assert found.decode.predicted_ns == decode.predicted.total_ns
    assert found.decode.h2d_bytes == decode.memgraph.reloaded_bytes > 0
    assert decode.measured is not None and found.link_bytes_per_s
    assert found.first_token_ns > found.load_ns > 0


def test_a_batch_cannot_be_drafted_for(compared: Compared, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="assists one sequence, and the batch has 2"):
        compared.run("finepage-draft", tmp_path)


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[str]]]:
    """Return what an engine has observed, and its notes, for counters of a handle."""

    def observe(**counters: Any) -> tuple[Any, list[str]]:
        given = {"unplanned_reasons": (), "num_caches_on_host": 0, **counters}
        handle = SimpleNamespace(stats=SimpleNamespace(**given), observed=lambda: ["a pass"])
        monkeypatch.setattr(finepage_arms, "handle_of", lambda engine: handle)
        engine = finepage_arms.FinepageEngine(None, torch.device("cpu"), {})
        return engine.observed(), engine.notes

    return observe


def test_an_engine_that_runs_something_without_a_plan_is_refused(
    observed: Callable[..., tuple[Any, list[str]]],
) -> None:
    assert observed() == (["a pass"], [])
    assert observed(num_caches_on_host=1) == (["a pass"], ["the KV cache is in host memory"])
    with pytest.raises(FinepageError, match="ran without a plan: this; that"):
        observed(unplanned_reasons=("this", "that"))


@pytest.mark.parametrize(
    ("error", "reason", "out_of_memory"),
    [
        (torch.OutOfMemoryError("no room\nat all"), "OutOfMemoryError: no room", True),
        (ConfigError("it says why"), "it says why", False),
        (KeyError("key"), "KeyError: 'key'", False),
    ],
)
def test_an_error_of_an_engine_is_a_run_with_a_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
    out_of_memory: bool,
) -> None:
    fail_with(error, tmp_path, monkeypatch)
    found = RUNS.validate_json((tmp_path / RUN_FILE).read_bytes())
    assert (found.reason, found.out_of_memory) == (reason, out_of_memory)
    assert (found.arm, found.budget_bytes) == ("plain", 7)
    assert json.loads((tmp_path / TOKENS_FILE).read_text()) == []


def fail_with(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker fail."""

    def fail(self: Worker, folder: Path) -> Run:
        raise error

    monkeypatch.setattr(Worker, "run", fail)
    asked = REQUESTS.dump_json(request("plain", budget_bytes=7))
    (folder / "request.json").write_bytes(asked)
    worker.main([str(folder / "request.json"), str(folder)])


@pytest.mark.parametrize(("world_size", "is_metered"), [("1", True), ("2", False)])
def test_partitions_of_several_ranks_are_no_device_bytes_on_the_cpu(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, world_size: str, is_metered: bool
) -> None:
    metered: list[bool] = []

    class Placed(Engine):
        def place(self) -> None:
            metered.append(_profiler_enabled())

    def generate(self: Worker, engine: Engine, watch: Any = None) -> Any:
        metered.append(_profiler_enabled())
        raise KeyError("enough")

    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(Worker, "_generate", generate)
    with pytest.raises(KeyError, match="enough"):
        Worker(compared.request("zero"))._count(Placed(None, torch.device("cpu")), 0)
    assert metered == [is_metered, True]


def test_stock_is_partitioned_after_it_is_cut(compared: Compared) -> None:
    cut = {**DS_CONFIG, "tensor_parallel": {"autotp_size": 2}}
    engine = zero_arms.load(compared.request("zero", ds_config=cut))
    assert all(p.numel() and not hasattr(p, "ds_tensor") for p in engine.model.parameters())


def test_a_rank_that_fails_ends_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as error:
        fail_with(KeyError("key"), tmp_path, monkeypatch)
    assert error.value.code == 1
    assert RUNS.validate_json((tmp_path / RUN_FILE).read_bytes()).reason == "KeyError: 'key'"


# Shipped names.


def test_a_shipped_name_becomes_a_checkpoint_of_fewer_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ds_finepage.capture import models as shipped

    small = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=300)
    monkeypatch.setattr(shipped, "load_model_config", lambda name: small)
    make_checkpoint(tmp_path, "llama-7b", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(model.model.layers) == 2 and model.dtype is torch.bfloat16
    assert 0.04 < float(model.lm_head.weight.detach().float().std()) < 0.06
    assert (tmp_path / "tokenizer.json").exists()


def test_a_shipped_model_without_room_in_host_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers of llama-3.1-405b have .* Give fewer --layers"):
        make_checkpoint(tmp_path, "llama-3.1-405b")


def test_a_report_of_the_users_ds_config_does_not_slow_the_timed_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        finepage_arms, "load_under_deepspeed", lambda request, config: given.append(config)
    )
    monkeypatch.setattr(finepage_arms, "deepspeed_device", lambda: torch.device("cpu"))
    ds_config = {"finepage": {"report": "folder", "split": True}}
    finepage_arms.load(request("finepage", ds_config=ds_config))
    (config,) = given
    assert config["finepage"]["report"] is None and config["finepage"]["split"]
