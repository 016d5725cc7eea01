"""Attention to rows of a KV cache in host memory, by a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ds_finepage.execution import host_attention as kernel
from ds_finepage.execution.host_attention import host_attention
from ds_finepage.graph.attention import DTYPES, SPAN_TOKENS

pytestmark = pytest.mark.skipif(kernel.why_not() is not None, reason="needs a C compiler")

BATCH, SHARED, WIDTH = 2, 3, 20


def states(
    num_live: int,
    *,
    times: int = 2,
    num_new: int = 1,
    value_width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, new keys, values, new values."""
    generator = torch.Generator().manual_seed(num_live)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    keys, values = (
        (drawn(num_live, BATCH, SHARED, width), drawn(num_new, BATCH, SHARED, width))
        for width in (WIDTH, value_width)
    )
    return drawn(BATCH, SHARED * times, num_new, WIDTH), *keys, *values


def exact(given: tuple[torch.Tensor, ...], mask: Any = None, **settings: Any) -> torch.Tensor:
    query, *rows = (tensor.double() for tensor in given)
    keys, values = (torch.cat(rows[n : n + 2]).permute(1, 2, 0, 3) for n in (0, 2))
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=True, **settings
    )


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=str)
@pytest.mark.parametrize("num_live", [0, 1, 31, 32, 3 * SPAN_TOKENS + 5])
def test_it_is_the_attention_of_torch(num_live: int, dtype: torch.dtype) -> None:
    given = states(num_live, dtype=dtype)
    found = host_attention(*given, None, None)
    assert found.dtype is dtype and found.shape == given[0].shape
    limit = torch.finfo(dtype).eps * torch.cat(given[3:]).abs().max()
    assert (found - exact(given)).abs().max() <= limit


@pytest.mark.parametrize("sizes", [{"times": 1}, {"num_new": 4}, {"value_width": 7}], ids=str)
def test_sizes(sizes: dict[str, int]) -> None:
    given = states(300, **sizes)
    found = host_attention(*given, None, 0.3)
    torch.testing.assert_close(found.double(), exact(given, scale=0.3), atol=1e-6, rtol=1e-5)


def test_a_mask_hides_tokens_or_adds_to_their_scores() -> None:
    given = states(300, num_new=2)
    hides = torch.rand(BATCH, 1, 2, 302, generator=torch.Generator().manual_seed(0)) < 0.5
    hides[0, :, :, :290] = False  # as padding: a whole span
    for mask in (hides, hides[:, :, :1], hides[:1], hides.float()):
        found = host_attention(*given, mask, None)
        torch.testing.assert_close(found.double(), exact(given, mask), atol=1e-6, rtol=1e-5)


def test_a_sequence_without_any_token_has_no_effect_on_the_others() -> None:
    given = states(40)
    mask = torch.ones(BATCH, 1, 1, 41, dtype=torch.bool)
    mask[1] = False
    found = host_attention(*given, mask, None)
    torch.testing.assert_close(found[0].double(), exact(given)[0], atol=1e-6, rtol=1e-5)


def test_the_number_of_threads_changes_no_bit() -> None:
    given, before = states(2000), torch.get_num_threads()
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(host_attention(*given, None, None))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_rows_that_are_not_dense_are_read_as_they_lie() -> None:
    given = states(50)
    others = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in given]
    assert not others[1].is_contiguous()
    assert torch.equal(host_attention(*others, None, None), host_attention(*given, None, None))


def test_it_has_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(kernel, "_compiled", lambda: lambda *args: given.append(args[-1]))
    monkeypatch.setattr(kernel, "num_threads", lambda wanted: -wanted)
    host_attention(*states(5), None, None)
    assert given == [-torch.get_num_threads()]


def test_its_shape_is_known_without_running_it() -> None:
    given = [tensor.to("meta") for tensor in states(9, value_width=7)]
    assert host_attention(*given, None, None).shape == (BATCH, 2 * SHARED, 1, 7)


def test_a_machine_that_compiles_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "compiled", lambda *_, **__: "there is no C compiler")
    assert kernel.why_not() == "there is no C compiler"
