"""What is asked before a generation begins, worked out from settings and a config alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.integrations.transformers.drafting import is_assisted
from ds_finepage.integrations.transformers.preflight import (
    CacheUse,
    Longest,
    Preflight,
    cache_use_of,
    kv_bytes,
    longest_of,
    require_memory,
    require_positions,
    require_tokens,
)
from ds_finepage.planning.budget import LARGE_SHARE, SMALL_SHARE
from ds_finepage.planning.pipeline import PlanSettings
from ds_finepage.runtime.attachment import PlannedGeneration

IDS = torch.zeros(3, 6, dtype=torch.int64)


def model(**defaults: Any) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        generation_config=SimpleNamespace(**defaults),
    )


@pytest.mark.parametrize(
    ("settings", "defaults", "expected"),
    [
        ({"max_new_tokens": 4}, {}, (3, 10)),
        ({"max_length": 30}, {}, (3, 30)),
        ({"max_length": 5}, {}, (3, 7)),  # generate makes one token at least
        ({}, {}, (3, 7)),
        ({}, {"max_new_tokens": 5}, (3, 11)),
        ({"max_new_tokens": 4, "max_length": 30}, {}, (3, 10)),
        ({"max_new_tokens": 4, "num_beams": 4}, {}, (12, 10)),
        ({"max_new_tokens": 4, "num_beams": 2, "num_return_sequences": 5}, {}, (15, 10)),
        ({"max_new_tokens": 4}, {"num_beams": 3, "max_new_tokens": 9}, (9, 10)),
    ],
)
def test_the_longest_call_follows_from_the_settings(
    settings: dict[str, int], defaults: dict[str, int], expected: tuple[int, int]
) -> None:
    for args, kwargs in (((IDS,), {}), ((), {"input_ids": IDS}), ((), {"inputs": IDS})):
        found = longest_of(model(**defaults), args, {**kwargs, **settings})
        assert found == Longest(*expected, prompt_tokens=6)
    config = SimpleNamespace(**settings)
    if not defaults:
        assert longest_of(model(), (IDS, config), {}) == Longest(*expected, prompt_tokens=6)
        named = {"generation_config": config}
        assert longest_of(model(), (IDS,), named) == Longest(*expected, prompt_tokens=6)


def test_what_does_not_tell_is_not_guessed() -> None:
    assert longest_of(model(), (), {"max_new_tokens": 4}) is None
    assert longest_of(model(), (IDS[0],), {"max_new_tokens": 4}) is None
    of_two = model()
    of_two.config.is_encoder_decoder = True
    assert longest_of(of_two, (IDS,), {"max_new_tokens": 4}) is None


def config(**changes: Any) -> Any:
    text = SimpleNamespace(
        **{
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "num_hidden_layers": 5,
            **changes,
        }
    )
    return SimpleNamespace(get_text_config=lambda decoder: text)


LONGEST = Longest(3, 100, 6)
ROW = 2 * 3 * 2 * 8 * 2  # keys and values, sequences, heads, width, bytes of an element


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5 * 100 * ROW),
        ({"num_key_value_heads": None}, 5 * 100 * ROW * 4),
        ({"head_dim": 32}, 5 * 100 * ROW * 4),
        ({"sliding_window": 40}, 5 * 40 * ROW),
        ({"sliding_window": 400}, 5 * 100 * ROW),
        (
            {
                "sliding_window": 40,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2,
            },
            (3 * 40 + 2 * 100) * ROW,
        ),
        ({"layer_types": ["full_attention"] * 4 + ["linear_attention"]}, None),
        ({"hidden_size": None}, None),
        ({"num_hidden_layers": 0}, None),
    ],
    ids=str,
)
def test_the_bytes_of_a_kv_cache_follow_from_the_config(
    changes: dict[str, Any], expected: int | None
) -> None:
    assert kv_bytes(config(**changes), torch.bfloat16, LONGEST) == expected
    in_float32 = kv_bytes(config(**changes), torch.float32, LONGEST)
    assert in_float32 == (None if expected is None else 2 * expected)


def test_a_config_that_refuses_to_be_asked_tells_nothing() -> None:
    class Refusing:
        def get_text_config(self, decoder: bool) -> Any:
            raise RuntimeError("differs from layer to layer")

    assert kv_bytes(Refusing(), torch.float32, LONGEST) is None


def test_device_and_host_together_have_to_hold_the_cache() -> None:
    require_memory(100, 60, 60, 40, LONGEST)
    with pytest.raises(PlanInfeasibleError, match="device_budget is 60 bytes and 39 bytes of host"):
        require_memory(100, 60, 60, 39, LONGEST)
    with pytest.raises(PlanInfeasibleError, match="59 bytes and 40 bytes of host"):
        require_memory(100, 50, 59, 40, LONGEST)


def test_the_device_has_to_hold_the_cache_of_one_layer() -> None:
    with pytest.raises(PlanInfeasibleError, match="61 bytes.* of KV cache in one layer"):
        require_memory(100, 61, 60, 10**6, LONGEST)


class WithPositions(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=10)
        self.add_module(name, nn.Embedding(10, 2))


@pytest.mark.parametrize("name", ("wpe", "position_embeddings", "embed_positions"))
def test_a_prompt_has_to_fit_a_table_of_positions(name: str) -> None:
    require_positions(WithPositions(name), Longest(1, 30, 10))
    require_positions(WithPositions("embed_tokens"), Longest(1, 30, 29))
    with pytest.raises(ConfigError, match=rf"has 11 tokens.*knows 10 positions \({name}\)"):
        require_positions(WithPositions(name), Longest(1, 12, 11))


def test_a_prompt_has_a_token_or_embeddings() -> None:
    preflight, empty = Preflight(model()), IDS[:, :0]
    settings = PlanSettings(
        policy="finepage", split=False, alignment=64, profile=load_profile("t4")
    )
    for args, kwargs in (((empty,), {}), ((), {"input_ids": empty}), ((), {"inputs": empty})):
        with pytest.raises(ConfigError, match="no tokens: .* leave input_ids out to begin with"):
            preflight.require(args, kwargs, 1 << 20, 1 << 20, settings)
    require_tokens(Longest(3, 7, prompt_tokens=6), {})
    require_tokens(Longest(3, 1, prompt_tokens=0), {"inputs_embeds": torch.zeros(3, 6, 8)})


def test_a_generation_tells_how_it_uses_its_cache() -> None:
    """No step reads the last token; beams get another order after each step."""

    def use(made: Any, args: tuple[Any, ...], **given: Any) -> CacheUse:
        sizes = {"budget_bytes": 1000, "weight_bytes": 0}
        return cache_use_of(made, args, given, **sizes, is_assisted=False)

    asked = {"max_new_tokens": 4}
    assert use(model(), (IDS,), **asked) == CacheUse(longest=9)
    assert use(model(), (IDS,), **asked, num_beams=1) == CacheUse(longest=9)
    of_beams = CacheUse(longest=9, is_reordered=True)
    assert use(model(), (IDS,), **asked, num_beams=2) == of_beams
    assert use(model(num_beams=3), (IDS,), **asked) == of_beams
    assert use(model(), (), num_beams=2) == CacheUse(is_reordered=True)


def test_a_cache_takes_room_at_once_or_competes_or_grows() -> None:
    """By its part of the budget, and by whether all weights fit beside it."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    made = SimpleNamespace(config=config, dtype=torch.float32, generation_config=None)
    asked = {"max_new_tokens": 4}
    longest = longest_of(made, (IDS,), asked)
    assert longest is not None
    nbytes = kv_bytes(config, made.dtype, longest) or 0
    enough, few = nbytes * SMALL_SHARE, nbytes * LARGE_SHARE

    def use(budget_bytes: int, weight_bytes: int = 1 << 40, **given: Any) -> tuple[bool, bool]:
        is_assisted = given.pop("is_assisted", False)
        args = (IDS,) if given else ()
        sizes = {"budget_bytes": budget_bytes, "weight_bytes": weight_bytes}
        found = cache_use_of(made, args, given, **sizes, is_assisted=is_assisted)
        return found.is_made_at_once, found.competes

    assert use(enough, **asked) == (True, False)
    assert use(enough - 1, **asked) == use(few + 1, **asked) == (False, False)
    assert use(few, is_assisted=True, **asked) == (True, False)
    assert use(few - 1, is_assisted=True, **asked) == (False, False)
    assert use(2 * nbytes + 1, is_assisted=True, **asked) == (False, False)
    longer = {"max_new_tokens": 3 * IDS.shape[1]}
    assert use(few - 1, is_assisted=True, **longer)[0] is False
    longer["max_new_tokens"] += 1  # it would double more than twice, and few passes follow a plan
    assert use(few - 1, is_assisted=True, **longer)[0] is True
    assert use(few - 1, **longer)[0] is False
    assert use(2 * nbytes, is_assisted=True, **asked) == (True, True)
    assert use(few, **asked) == (False, True)
    assert use(few, few - nbytes, **asked) == (False, False)  # all of it fits
    assert use(few, few - nbytes + 1, **asked) == (False, True)
    assert use(few, **asked, num_beams=2) == (False, False)  # its rows change their order
    assert use(1 << 40) == (False, False)  # its length is not known


def test_a_generation_tells_whether_its_tokens_are_drafted() -> None:
    def asks(**given: Any) -> bool:
        return is_assisted(model(), (IDS,), given)

    assert not asks() and not asks(assistant_model=None, num_beams=2)
    assert asks(assistant_model=object()) and asks(prompt_lookup_num_tokens=3)
    assert is_assisted(model(prompt_lookup_num_tokens=3), (IDS,), {})


class Generating:
    """A model that notes its generations."""

    def __init__(self) -> None:
        self.order: list[Any] = []

    def generate(self, *args: Any, **kwargs: Any) -> str:
        """Theirs."""
        self.order.append("generate")
        if kwargs.get("has_no_room"):
            raise PlanInfeasibleError("no room")
        return f"{args} {kwargs}"


class Watcher:
    """Notes what it is told in the order of a model."""

    shares_steps = False
    budget_bytes = staticmethod(lambda: 1000)
    weight_bytes = 1000
    assistance = SimpleNamespace(turn=lambda module, args, kwargs: nullcontext(kwargs), draft=None)

    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def preflight(self, args: Any, kwargs: Any) -> None:
        self.order.append((args, kwargs))

    @contextmanager
    def generation(self, use: CacheUse) -> Iterator[None]:
        assert use == CacheUse()  # the arguments tell nothing
        self.order.append("begin")
        yield
        self.order.append("end")


def watched(module: Generating) -> PlannedGeneration:
    watcher: Any = Watcher(module.order)
    return PlannedGeneration(module, watcher)


def test_generate_is_asked_first_and_then_called_as_it_was() -> None:
    module = Generating()
    generate = watched(module)
    assert generate(1, a=2) == "(1,) {'a': 2}"
    assert module.order == [((1,), {"a": 2}), "begin", "generate", "end"]
    assert generate.__doc__ == "Theirs."


def test_ranks_that_share_steps_go_on_until_the_last_of_them_is_done() -> None:
    module = Generating()
    generate = watched(module)
    generate._calls.shares_steps = True  # type: ignore[misc]
    assert generate(1) == "(1,) {'synced_gpus': True}"
    assert generate(synced_gpus=False) == "() {'synced_gpus': False}"


def test_a_copy_of_a_model_generates_by_itself() -> None:
    module = Generating()
    module.generate = watched(module)  # type: ignore[method-assign]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.generate(3) == "(3,) {}"
        assert twin.order == ["generate"] and module.order == []
