"""The simulated ZeRO-Inference against the real one: bytes gathered and most bytes live, equal.

DeepSpeed runs in this process, on the CPU and with one rank, where a fetch copies nothing; but its
coordinator decides as it does anywhere, and what it fetches and releases when can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from ds_finepage.capture.from_config import capture_config
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.zero import EVERY_PARAMETER, ZeroSettings, authors_settings
from ds_finepage.planning.baselines.zero_search import best_settings
from ds_finepage.planning.problem import Problem
from tests.integration.engines import ds_config
from tests.integration.families import make_model
from tests.unit.planning.baselines.gathered import gathered

pytestmark = pytest.mark.usefixtures("deepspeed")

HIDDEN, VOCABULARY, PROMPT_LENGTH = 64, 500, 5
NUM_FORWARDS = 4  # the first records, the second is the first with a trace
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
LIKE_LLAMA = {**SIZES, "intermediate_size": 160}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(make_model, "llama", **LIKE_LLAMA),
    "tied llama": partial(make_model, "llama", **LIKE_LLAMA, tie_word_embeddings=True),
    "gpt2": partial(make_model, "gpt2", **SIZES),
    "opt": partial(make_model, "opt", **SIZES, ffn_dim=160, word_embed_proj_dim=HIDDEN),
    "mixtral": partial(make_model, "mixtral", **LIKE_LLAMA),  # has leaf modules
}


def of(bucket: int, persistence: int, **others: int) -> dict[str, int]:
    return {"prefetch_bucket_size": bucket, "param_persistence_threshold": persistence, **others}


MATRICES = 2 * HIDDEN * HIDDEN
# The two thresholds, both limits and the bucket: each out of the way, and each in it.
SETTINGS: dict[str, dict[str, int]] = {
    "defaults": {},
    "neither prefetch nor persistence": of(0, 0),
    "a small bucket": of(5_000, 100),
    "a larger bucket": of(15_000, 0),
    "the authors'": of(MATRICES, HIDDEN, max_live_parameters=MATRICES),
    "few live parameters": of(50_000, 1_000, max_live_parameters=60_000),
    "persistence knob": of(10_000, EVERY_PARAMETER, model_persistence_threshold=90_000),
    "persistence knob, few live parameters": of(
        MATRICES, EVERY_PARAMETER, model_persistence_threshold=120_000, max_live_parameters=MATRICES
    ),
    "no reuse": of(20_000, 0, max_reuse_distance=0),
    "some reuse": of(30_000, 0, max_reuse_distance=100_000),
}
CASES = [
    *(("llama", setting) for setting in SETTINGS),
    *(("gpt2", s) for s in ("defaults", "a small bucket", "persistence knob, few live parameters")),
    *(("tied llama", s) for s in ("no reuse", "some reuse", "few live parameters")),
    *(("opt", s) for s in ("a larger bucket", "persistence knob")),
    *(("mixtral", s) for s in ("a small bucket", "few live parameters", "persistence knob")),
]


class Counter:
    """Watches a coordinator: what was not there before a fetch and is behind it was gathered."""

    def __init__(self, coordinator: Any, parameters: list[Any]) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._absent = ZeroParamStatus.NOT_AVAILABLE
        self._parameters = parameters
        self._fetch = coordinator.fetch_sub_module
        coordinator.fetch_sub_module = self._counting_fetch
        self.begin()

    def begin(self) -> None:
        self.gathered_bytes = self.peak_live_bytes = 0

    def _live(self) -> list[Any]:
        return [p for p in self._parameters if p.ds_status != self._absent]

    def _counting_fetch(self, module: torch.nn.Module, forward: bool) -> None:
        before = {id(p) for p in self._live()}
        self._fetch(module, forward=forward)
        live = self._live()
        self.gathered_bytes += sum(_nbytes(p) for p in live if id(p) not in before)
        self.peak_live_bytes = max(self.peak_live_bytes, sum(map(_nbytes, live)))


def _nbytes(parameter: Any) -> int:
    return int(parameter.ds_numel * parameter.element_size())


@pytest.fixture
def start(deepspeed: Any, nothing_persisted: None) -> Iterator[Callable[..., Any]]:
    """``start(model name, settings, leaves)``: a model that stock ZeRO runs, and its counter."""
    from deepspeed.utils import set_z3_leaf_modules

    engines = []

    def make(
        name: str, settings: dict[str, int], leaves: tuple[str, ...] = ()
    ) -> tuple[Any, Counter]:
        model = MODELS[name]()
        zero: dict[str, Any] = {f"stage3_{key}": value for key, value in settings.items()}
        if leaves:
            set_z3_leaf_modules(model, list(leaves[-1:]))
        engine, *_ = deepspeed.initialize(model=model, config=ds_config(zero=zero))
        engines.append(engine)
        coordinator = engine.optimizer.get_param_coordinator()
        return engine.module, Counter(coordinator, list(model.parameters()))

    yield make
    for engine in engines:
        engine.destroy()


@cache
def captured(name: str, phase: str, seq: int) -> TaskGraph:
    return capture_config(MODELS[name]().config, phase=phase, batch=1, seq=seq, dtype="float32")


def prompt() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, PROMPT_LENGTH))


def check_steady_forward(
    started: tuple[Any, Counter], model_name: str, settings: ZeroSettings
) -> tuple[int, int]:
    """Hold what a steady forward gathers against what is simulated; return that."""
    model, counter = started
    with torch.no_grad():
        for _ in range(NUM_FORWARDS):
            counter.begin()
            model(prompt())
    simulated = gathered(captured(model_name, "prefill", PROMPT_LENGTH), settings)
    assert (counter.gathered_bytes, counter.peak_live_bytes) == simulated
    return simulated


@pytest.mark.parametrize(("model_name", "setting"), CASES)
def test_a_steady_forward_gathers_what_is_simulated(
    start: Callable[..., Any], model_name: str, setting: str
) -> None:
    settings = SETTINGS[setting]
    check_steady_forward(start(model_name, settings), model_name, ZeroSettings(**settings))


@pytest.mark.parametrize("setting", ["neither prefetch nor persistence", "a larger bucket"])
@pytest.mark.parametrize(
    ("model_name", "layer"), [("llama", "LlamaDecoderLayer"), ("opt", "OPTDecoderLayer")]
)
def test_layers_as_leaf_modules_gather_what_is_simulated(
    start: Callable[..., Any], model_name: str, layer: str, setting: str
) -> None:
    graph = captured(model_name, "prefill", PROMPT_LENGTH)
    leaves = (*ZeroSettings().leaf_classes, layer)
    settings = ZeroSettings(**SETTINGS[setting], leaf_classes=leaves)
    started = start(model_name, SETTINGS[setting], leaves)
    _, peak_bytes = check_steady_forward(started, model_name, settings)
    assert peak_bytes != gathered(graph, ZeroSettings(**SETTINGS[setting]))[1]


def test_the_settings_that_are_searched_gather_what_is_simulated(start: Callable[..., Any]) -> None:
    graph = captured("llama", "prefill", PROMPT_LENGTH)
    profile = load_profile("v100-16gb")
    settings = best_settings([(Problem(graph, graph.weight_bytes * 2 // 3, 64, profile), 1)])
    copied = {key.removeprefix("stage3_"): number for key, number in settings.keys.items()}
    assert check_steady_forward(start("llama", copied), "llama", settings)[0] > 0


def test_decode_gathers_what_is_simulated(start: Callable[..., Any]) -> None:
    model, counter = start("llama", SETTINGS["a small bucket"])
    # Ahead of DeepSpeed's own hook, which fetches for the model as a whole.
    model.register_forward_pre_hook(lambda *_: counter.begin(), prepend=True)
    with torch.no_grad():
        model.generate(prompt(), max_new_tokens=4, do_sample=False)
    graph = captured("llama", "decode", PROMPT_LENGTH + 3)
    simulated = gathered(graph, ZeroSettings(**SETTINGS["a small bucket"]))
    assert (counter.gathered_bytes, counter.peak_live_bytes) == simulated


def test_the_authors_settings_follow_from_the_hidden_size() -> None:
    for name in MODELS:
        graph = captured(name, "prefill", PROMPT_LENGTH)
        assert authors_settings(graph) == ZeroSettings(**SETTINGS["the authors'"])


def test_the_defaults_are_deepspeeds() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs, ours = DeepSpeedZeroConfig(), ZeroSettings()
    for name in SETTINGS["few live parameters"] | SETTINGS["persistence knob"]:
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.max_reuse_distance == theirs.max_reuse_distance
    leaves = [path.rpartition(".")[2] for path in theirs.leaf_module.classes]
    assert list(ours.leaf_classes) == leaves
