"""The engines of the comparison, in this process: counted bytes, peaks, timelines, failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage._compat.torch import _profiler_enabled
from ds_finepage.compare import finepage_arms, worker, zero_arms
from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.compare.engine import Engine, RunRequest, save_request
from ds_finepage.compare.modelling import model_arm
from ds_finepage.compare.orchestrate import completed, make_prompts
from ds_finepage.compare.worker import NUM_RECORDED, RUN_FILE, RUNS, TOKENS_FILE, Worker
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.modeller import Modeller
from ds_finepage.planning.policies import POLICIES
from ds_finepage.reporting.results import Run, load_passes
from tests.integration.cli.models import small_model
from tests.integration.engines import one_process_deepspeed

VOCABULARY = 2000
"""With fewer rows the stock engine keeps every weight on the device."""

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
}
BATCH, PROMPT, NEW = 2, 6, 5
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
ZERO_ARMS = [arm for arm in ARMS if arm.startswith("zero")]


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[Any]:
    """DeepSpeed with one process on the CPU, whatever else this machine has."""
    with one_process_deepspeed() as found:
        yield found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, str(small_model(folder, **SHAPE)))
    return folder


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> Modeller:
    return Modeller(
        str(checkpoint),
        batch=BATCH,
        prompt_tokens=PROMPT,
        new_tokens=NEW,
        device_budget="90%weights",
        hardware="t4",
    )


@pytest.fixture
def request_of(
    checkpoint: Path, models: Modeller, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunRequest]:
    from deepspeed.runtime.zero.partition_parameters import Init

    # It counts over all models of a process, and would stop at the threshold of one.
    monkeypatch.setattr(Init, "num_persisted_elements", 0)
    prompts = make_prompts(checkpoint, batch=BATCH, prompt_tokens=PROMPT)

    def make(arm: str, **changes: Any) -> RunRequest:
        given: dict[str, Any] = {
            "arm": arm,
            "model_dir": str(checkpoint),
            "ds_config": DS_CONFIG,
            "device": "cpu",
            "budget_bytes": models.budget_bytes,
            "batch": BATCH,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "repeats": 1,
            "settings": model_arm(ARMS[arm], models).settings,
            "prompt_ids": prompts,
            **changes,
        }
        return RunRequest(**given)

    return make


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.tensor(make_prompts(checkpoint, batch=BATCH, prompt_tokens=PROMPT))
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
    tokens: list[list[int]] = found.tolist()
    return tokens


def ran(request: RunRequest, folder: Path) -> tuple[Run, list[Any]]:
    made = Worker(request)
    return made.run(folder), made.tokens


@pytest.mark.parametrize("arm", ZERO_ARMS)
def test_stock_copies_what_is_simulated(
    arm: str,
    request_of: Callable[..., RunRequest],
    models: Modeller,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    assert ARMS[arm].policy in POLICIES
    modelled = model_arm(ARMS[arm], models)
    found, tokens = ran(request_of(arm), tmp_path)
    found = completed(found, modelled, models.weight_bytes)
    for phase in (found.prefill, found.decode):
        assert phase.h2d_bytes == phase.modelled_h2d_bytes
        assert phase.h2d_bytes and phase.d2h_bytes == 0 and phase.wall_ns
    assert tokens == [expected] * 3  # two counted calls and a timed one
    assert modelled.settings.items() <= found.settings.items()
    assert 0 < found.load_ns < found.first_token_ns < found.load_ns + found.first_call_ns
    assert found.peak_bytes and found.probe_bytes_per_s and found.host_bytes


def test_the_fetches_of_later_engines_are_not_counted_any_more(
    request_of: Callable[..., RunRequest], tmp_path: Path
) -> None:
    from ds_finepage._compat.deepspeed import partition_parameters

    fetch = partition_parameters._no_gather_coalesced
    ran(request_of("zero"), tmp_path)
    assert partition_parameters._no_gather_coalesced is fetch


def test_plain_counts_every_weight(
    request_of: Callable[..., RunRequest],
    models: Modeller,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    found, tokens = ran(request_of("plain"), tmp_path)
    assert tokens == [expected] * 3
    assert found.peak_bytes and found.peak_bytes > models.weight_bytes
    assert (found.prefill.h2d_bytes, found.decode.d2h_bytes) == (0, 0)


def test_ours_holds_the_budget_and_shows_its_passes(
    request_of: Callable[..., RunRequest],
    models: Modeller,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    found, tokens = ran(request_of("finepage"), tmp_path)
    assert tokens == [expected] * (3 + NUM_RECORDED)
    assert found.peak_bytes and found.peak_bytes <= models.budget_bytes
    assert found.settings == {"policy": "finepage", "device_budget": models.budget_bytes}
    passes = {each.name: each for each in load_passes(tmp_path)}
    assert {"prefill", "decode"} <= set(passes)
    for name in ("prefill", "decode"):  # the host's time before the lanes begin
        assert min(span.start_ns for span in passes[name].predicted.spans) > 0
    decode = passes["decode"]
    assert found.decode.predicted_ns == decode.predicted.total_ns
    assert found.decode.h2d_bytes == decode.memgraph.reloaded_bytes > 0
    assert decode.measured is not None and found.link_bytes_per_s
    assert found.first_token_ns > found.load_ns > 0


class FakeHandle:
    """Has counters, and one pass that was observed."""

    def __init__(self, **counters: Any) -> None:
        given = {"unplanned_reasons": (), "num_caches_on_host": 0, **counters}
        self.stats = SimpleNamespace(**given)

    def observed(self) -> list[str]:
        return ["a pass"]


def observed(monkeypatch: pytest.MonkeyPatch, handle: FakeHandle) -> tuple[Any, list[str]]:
    monkeypatch.setattr(finepage_arms, "handle_of", lambda engine: handle)
    engine = finepage_arms.FinepageEngine(None, torch.device("cpu"), {})
    return engine.observed(), engine.notes


def test_an_engine_that_runs_something_without_a_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(FinepageError, match="ran without a plan: this; that"):
        observed(monkeypatch, FakeHandle(unplanned_reasons=("this", "that")))


def test_a_cache_in_host_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert observed(monkeypatch, FakeHandle()) == (["a pass"], [])
    _, notes = observed(monkeypatch, FakeHandle(num_caches_on_host=1))
    assert notes == ["the KV cache is in host memory"]


@pytest.mark.parametrize(
    ("error", "reason", "out_of_memory"),
    [
        (torch.OutOfMemoryError("no room\nat all"), "OutOfMemoryError: no room", True),
        (ConfigError("it says why"), "it says why", False),
        (KeyError("key"), "KeyError: 'key'", False),
    ],
)
def test_an_error_of_an_engine_is_a_run_with_a_reason(
    request_of: Callable[..., RunRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
    out_of_memory: bool,
) -> None:
    def fail(self: Worker, folder: Path) -> Run:
        raise error

    monkeypatch.setattr(Worker, "run", fail)
    save_request(request_of("plain"), tmp_path / "request.json")
    worker.main([str(tmp_path / "request.json"), str(tmp_path)])
    found = RUNS.validate_json((tmp_path / RUN_FILE).read_bytes())
    assert (found.reason, found.out_of_memory) == (reason, out_of_memory)
    assert (found.arm, found.budget_bytes) == ("plain", request_of("plain").budget_bytes)
    assert json.loads((tmp_path / TOKENS_FILE).read_text()) == []


@pytest.mark.parametrize(("world_size", "is_metered"), [("1", True), ("2", False)])
def test_partitions_of_several_ranks_are_no_device_bytes_on_the_cpu(
    request_of: Callable[..., RunRequest],
    monkeypatch: pytest.MonkeyPatch,
    world_size: str,
    is_metered: bool,
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
        Worker(request_of("zero"))._count(Placed(None, torch.device("cpu")), 0)
    assert metered == [is_metered, True]


def test_stock_is_partitioned_after_it_is_cut(
    request_of: Callable[..., RunRequest], deepspeed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = {**DS_CONFIG, "tensor_parallel": {"autotp_size": 2}}
    engine = zero_arms.load(request_of("zero", ds_config=cut))
    assert all(p.numel() and not hasattr(p, "ds_tensor") for p in engine.model.parameters())


def test_a_rank_that_fails_ends_with_a_status(
    request_of: Callable[..., RunRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Worker, folder: Path) -> Run:
        raise KeyError("key")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Worker, "run", fail)
    save_request(request_of("plain"), tmp_path / "request.json")
    with pytest.raises(SystemExit) as error:
        worker.main([str(tmp_path / "request.json"), str(tmp_path)])
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
    request = RunRequest(
        arm="finepage",
        model_dir="",
        ds_config={"finepage": {"report": "folder", "split": True}},
        device="cpu",
        budget_bytes=1,
        batch=1,
        prompt_tokens=2,
        new_tokens=4,
        repeats=1,
        settings={},
    )
    finepage_arms.load(request)
    (config,) = given
    assert config["finepage"]["report"] is None and config["finepage"]["split"]
