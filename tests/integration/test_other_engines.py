"""Accelerate as an arm: tokens, counted bytes against simulated ones, all restored."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import hooks
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from ds_finepage.capture.from_config import capture_config
from ds_finepage.checker.checker import check
from ds_finepage.compare.accelerate_arm import KEPT, modules_to_place, pins_weights
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.stopwatch import timed_forwards
from ds_finepage.errors import ConfigError
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.accelerate import MapSettings, map_modules, plan_accelerate_map
from ds_finepage.planning.liveness import ample_arena_bytes
from ds_finepage.planning.problem import Problem
from tests.integration.engines import load_arm, static_tokens
from tests.unit.compare.runs import request

HIDDEN, NUM_LAYERS, VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 64, 2, 500, 7, 4
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        eos_token_id=None,
    ),
    "tied gpt2": GPT2Config(  # has parameters outside of leaf modules too
        n_embd=HIDDEN,
        n_layer=NUM_LAYERS,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
every_model = pytest.mark.parametrize("model_name", CONFIGS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a checkpoint of each model."""
    torch.manual_seed(0)
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp("model")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.generation_config.pad_token_id = 0
        model.save_pretrained(found[name])
    return found


def request_of(folder: Path, share: float = 0.6, **changes: Any) -> RunRequest:
    """Ask for a run under a budget of a share of the weights, and something for activations."""
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    given = {"budget_bytes": int(share * weight_bytes) + 300_000, "settings": {KEPT: 2}, **changes}
    return request(
        "accelerate-map", folder, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, **given
    )


def generate(model: Any) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return static_tokens(model, ids, NEW_TOKENS)


@cache
def captured(name: str, phase: str) -> TaskGraph:
    seq = PROMPT_TOKENS + (0 if phase == "prefill" else NEW_TOKENS - 1)
    return capture_config(CONFIGS[name], phase=phase, batch=1, seq=seq, dtype="float32")


def simulated(engine: Engine, graph: TaskGraph) -> MemGraph:
    num_modules = engine.settings["modules_on_device"]
    assert isinstance(num_modules, int) and 0 < num_modules < len(map_modules(graph))
    arena_bytes = ample_arena_bytes(graph, 64)
    settings = MapSettings(num_modules)
    return check(plan_accelerate_map(Problem(graph, arena_bytes, 64, engine=settings)))


@every_model
def test_tokens_are_equal_and_counted_bytes_are_the_simulated_ones(
    folders: dict[str, Path], model_name: str
) -> None:
    asked = request_of(folders[model_name])
    engine = load_arm(asked)
    expected = generate(engine.model)
    with DeviceMeter(engine.device) as meter, engine.counting():
        engine.place()
        with timed_forwards(engine) as counted:
            assert torch.equal(generate(engine.model), expected)
    assert torch.equal(generate(engine.model), expected)  # by their own hooks alone
    largest_bytes = max(weight.nbytes for weight in engine.model.parameters())
    assert largest_bytes <= meter.peak_bytes <= asked.budget_bytes
    prefill, *_, decode = counted
    for phase, found in (("prefill", prefill), ("decode", decode)):
        memgraph = simulated(engine, captured(model_name, phase))
        assert (found.h2d_bytes, found.d2h_bytes) == (
            memgraph.reloaded_bytes,
            memgraph.offloaded_bytes,
        )
    engine.close()


@every_model
@pytest.mark.parametrize("num_kept", [0, 2])
def test_everything_is_as_before_at_the_end(
    folders: dict[str, Path], model_name: str, num_kept: int
) -> None:
    engine = load_arm(request_of(folders[model_name], settings={KEPT: num_kept}))
    model, setter = engine.model, hooks.set_module_tensor_to_device
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    expected = generate(model)
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    with engine.counting():
        assert hooks.set_module_tensor_to_device is not setter
        engine.place()
        generate(model)
    assert hooks.set_module_tensor_to_device is setter
    engine.close()
    after = dict(model.named_parameters())  # tied ones once, as before
    assert list(after) == list(weights)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("counts", [False, True])
def test_a_fetch_is_a_copy_while_it_counts_and_else_an_alias(
    folders: dict[str, Path], counts: bool
) -> None:
    engine = load_arm(request_of(folders["llama"], settings={"modules_on_device": 0}))
    masters = {w.data_ptr() for w in engine.model.parameters()}
    used = []
    head = engine.model.lm_head
    linear = torch.nn.functional.linear

    def seen(data: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        used.append(weight.data_ptr())
        return linear(data, weight, bias)

    with ExitStack() as stack:
        if counts:
            stack.enter_context(engine.counting())
        engine.place()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.nn.functional, "linear", seen)
        before, _ = engine.copied()
        generate(engine.model)
    assert used and head is engine.model.lm_head
    assert masters.isdisjoint(used) if counts else masters.issuperset(used)
    assert (engine.copied()[0] != before) is counts
    engine.close()


def test_weights_beside_those_of_submodules_have_no_place() -> None:
    class Beside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.inner.extra = torch.nn.Linear(2, 2)

    model = torch.nn.Sequential()
    model.add_module("first", Beside())
    with pytest.raises(ConfigError, match="first.inner has weights or buffers beside those of"):
        modules_to_place(model)
    with pytest.raises(ConfigError, match="the model itself has weights"):
        modules_to_place(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("zero", "expected"),
    [({}, False), ({"offload_param": {"device": "cpu", "pin_memory": True}}, True)],
)
def test_the_ds_config_says_whether_weights_are_pinned(zero: Any, expected: bool) -> None:
    assert pins_weights({"zero_optimization": zero}) is expected
