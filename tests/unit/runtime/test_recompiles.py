"""Dynamo's limits while models are attached, and the graphs that are left in shared code."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as graphs_of
from transformers.integrations import sdpa_attention
from transformers.utils.import_utils import is_torchdynamo_compiling

from ds_finepage._compat.torch import dynamo_config
from ds_finepage.runtime import recompiles
from ds_finepage.runtime.recompiles import LIMIT, MOST_GRAPHS, NO_LIMIT, TOTAL_LIMIT, CodeClaim

X = torch.ones(2)


class Owner:
    """Stands for what receives the calls of an attached model."""


@pytest.fixture(autouse=True)
def nothing_attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no model of another test count, and restore Dynamo's limits."""
    torch._dynamo.reset()
    monkeypatch.setattr(recompiles, "_claims", [])
    monkeypatch.setattr(recompiles, "_left", set())
    with dynamo_config.patch(recompile_limit=2, accumulated_recompile_limit=100):
        yield


def limits() -> list[int]:
    return [getattr(dynamo_config, name) for name in (LIMIT, TOTAL_LIMIT)]


def function() -> Callable[[torch.Tensor, int], torch.Tensor]:
    def add(x: torch.Tensor, number: int) -> torch.Tensor:
        return x + number

    add.__code__ = add.__code__.replace(co_name="another")  # a code object of its own
    return add


def code_of(call: Callable[..., object]) -> CodeType:
    found: CodeType = call.__code__  # type: ignore[attr-defined]
    return found


def compiled(call: Callable[..., torch.Tensor], times: int) -> list[int]:
    """Compile a function for several models; return the numbers of the graphs that were made."""
    made: list[int] = []

    def compiled_for(number: int) -> None:
        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            made.append(number)
            return graph.forward

        assert torch.equal(torch.compile(call, backend=backend)(X, 1), X + 1)

    for number in range(times):
        compiled_for(number)
    return made


def test_limits_are_high_in_calls_of_an_attached_model_in_any_thread() -> None:
    owner, seen = Owner(), []
    claim = CodeClaim(owner)
    call = claim.within(lambda: seen.append(limits()))
    other = threading.Thread(target=call)
    other.start()
    other.join()
    call()
    assert seen == 2 * [[MOST_GRAPHS, NO_LIMIT]]
    assert limits() == [2, 100]
    claim.close()
    claim.close()
    with dynamo_config.patch(recompile_limit=1000):
        CodeClaim(owner).within(lambda: seen.append(limits()))()
    assert seen[-1] == [1000, NO_LIMIT]  # the user's own


def test_a_limit_that_is_set_meanwhile_stays() -> None:
    owner, seen = Owner(), []
    claim = CodeClaim(owner)
    dynamo_config.recompile_limit = 7
    claim.add(code_of(function()))
    claim.within(lambda: seen.append(limits()))()
    assert seen == [[7, NO_LIMIT]]
    claim.close()
    assert limits() == [7, 100]


def test_each_model_may_have_a_number_of_graphs_beside_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recompiles, "MOST_GRAPHS", 3)
    add, owners = function(), [Owner() for _ in range(3)]
    claims = []
    for owner in owners:
        claims.append(CodeClaim(owner))
        claims[-1].add(code_of(add))
        assert claims[-1].within(compiled)(add, 5) == [0, 1, 2]
    for claim in claims:
        claim.close()


def test_graphs_go_with_the_last_model_that_has_some() -> None:
    add, owners = function(), [Owner() for _ in range(2)]
    claims = [CodeClaim(owner) for owner in owners]
    for claim in claims:
        claim.add(code_of(add))
    assert claims[0].within(compiled)(add, 3) == [0, 1, 2]
    claims[0].close()
    assert len(graphs_of(code_of(add))) == 3
    claims[1].close()
    assert graphs_of(code_of(add)) == []


def test_code_without_a_claim_keeps_its_graphs() -> None:
    add, owner = function(), Owner()
    claim = CodeClaim(owner)
    compiled(add, 1)
    claim.close()
    assert len(graphs_of(code_of(add))) == 1


def test_code_that_dynamo_gave_up_makes_graphs_again() -> None:
    add, owner = function(), Owner()
    assert compiled(add, 4) == [0, 1]
    claim = CodeClaim(owner)
    assert compiled(add, 1) == []
    claim.add(code_of(add))
    assert claim.within(compiled)(add, 1) == [0]
    claim.close()


def test_code_that_is_to_be_skipped_stays_so() -> None:
    add, owner = function(), Owner()
    torch._dynamo.eval_frame.skip_code(code_of(add))
    claim = CodeClaim(owner)
    claim.add(code_of(add))
    assert claim.within(compiled)(add, 1) == []
    claim.close()


def test_graphs_of_a_model_that_is_forgotten_go_later() -> None:
    """The collector may run while Dynamo is at work in that code."""
    add, owner = function(), Owner()
    CodeClaim(owner).add(code_of(add))
    compiled(add, 1)
    del owner
    gc.collect()
    assert len(graphs_of(code_of(add))) == 1
    other = Owner()
    CodeClaim(other).close()
    assert graphs_of(code_of(add)) == []


@pytest.mark.skipif(not hasattr(sdpa_attention, "pack_gqa"), reason="older transformers")
def test_attention_is_compiled_as_in_eager_mode_while_models_are_attached() -> None:
    torch.manual_seed(0)
    layer: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    query, rows = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 25, 32)
    given = (layer, query, rows, rows.flip(0), torch.arange(25).expand(2, 1, 1, 25) > 11)
    expected = sdpa_attention.sdpa_attention_forward(*given)[0]
    claims = [CodeClaim(owner := Owner()), CodeClaim(owner)]
    assert not sdpa_attention.is_torchdynamo_compiling()
    assert sdpa_attention.is_torchdynamo_compiling is not is_torchdynamo_compiling
    claims[0].close()
    compiled = torch.compile(sdpa_attention.sdpa_attention_forward, backend="eager")
    assert torch.equal(compiled(*given)[0], expected)
    claims[1].close()
    assert vars(sdpa_attention)["is_torchdynamo_compiling"] is is_torchdynamo_compiling
