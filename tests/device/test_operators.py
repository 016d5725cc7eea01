"""Operators on the test device: the CPU's results, bit for bit, without waits of the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.device import card

Operator = Callable[..., torch.Tensor]

SYNC_FREE: dict[str, Operator] = {
    "add a number": lambda x: x + 1.5,
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: F.linear(x, x[0], x[0, :, 0]),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (8,), x[0, 0], x[0, 1]),
    "rms norm": lambda x: F.rms_norm(x, (8,), x[0, 0]),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(2, 2, 4, 8)] * 3),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(2, 2, 4, 8)] * 3, is_causal=True
    ),
    "embedding": lambda x: F.embedding(torch.ones(2, dtype=torch.long, device=x.device), x[0]),
    "index_put": lambda x: x.clone().index_put_(
        (torch.arange(2, device=x.device), torch.arange(2, device=x.device)), x[0, 0], True
    ),
    "index": lambda x: x[:, torch.arange(3, 0, -2, device=x.device)],
    "scatter": lambda x: x.scatter(2, x.argsort(-1), 1.0),
    "topk": lambda x: torch.cat([t.to(x.dtype) for t in x.topk(3)], -1),
    "cumsum": lambda x: x.cumsum(1),
    "conv1d": lambda x: F.conv1d(x, x[:2, :8, :3].mT.repeat(1, 8, 1)[:, :8, :3]),
    "where": lambda x: torch.where(x > 0, x, -x),
    "cat, stack, split": lambda x: torch.stack(torch.cat([x, x], 1).split(4, 1)),
    "arange": lambda x: x + torch.arange(8, device=x.device),
    "triu": lambda x: torch.full((8, 8), 3.0, device=x.device, dtype=x.dtype).triu(1),
    "repeat and expand": lambda x: x[:1].expand(2, -1, -1).repeat(1, 2, 1),
    "views": lambda x: x.transpose(0, 1).unfold(2, 3, 2)[..., 1].reshape(-1, 3).t().contiguous(),
    "batch norm": lambda x: F.batch_norm(x, x[0, 0], x[0, 1].abs()),
    "einsum": lambda x: torch.einsum("bij,bkj->ik", x, x),
    "to another dtype": lambda x: x.to(torch.float64).sum(0).to(x.dtype),
}
WAITING: dict[str, Operator] = {
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: x.round().unique(),
    "repeat_interleave": lambda x: x[0].repeat_interleave(torch.arange(8, device=x.device), dim=0),
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def values(request: pytest.FixtureRequest) -> torch.Tensor:
    """Return numbers on the CPU."""
    return torch.randn(2, 8, 8, dtype=request.param)


@pytest.mark.parametrize("name", SYNC_FREE)
def test_results_are_those_of_the_cpu(
    device: torch.device, values: torch.Tensor, name: str
) -> None:
    operator = SYNC_FREE[name]
    on_card = values.to(device)
    operator(on_card)  # shapes are learned
    card.set_delay("kernel", random_ns=100_000)
    card.set_sync_debug_mode("error")
    result = operator(on_card)
    card.set_sync_debug_mode("default")
    expected = operator(values)
    assert result.device == device
    assert result.stride() == expected.stride()
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("name", WAITING)
def test_results_whose_shape_is_data(device: torch.device, values: torch.Tensor, name: str) -> None:
    card.reset_counters()
    result = WAITING[name](values.to(device))
    assert card.counters()["syncs"] >= 2  # the copy to the device, and the operator
    assert torch.equal(result.cpu(), WAITING[name](values))


def test_results_go_where_out_says(device: torch.device) -> None:
    values = torch.arange(6.0)
    on_card = values.to(device)
    out = torch.empty(0, device=device)
    torch.add(on_card, 1, out=out)  # grows
    assert torch.equal(out.cpu(), values + 1)
    target = torch.zeros(2, 6, device=device)
    torch.mul(on_card, 2, out=target[1])
    assert torch.equal(target.cpu(), torch.stack([torch.zeros(6), values * 2]))
    places = torch.empty(0, dtype=torch.long, device=device)
    torch.nonzero(on_card > 3, out=places)
    assert places.flatten().tolist() == [4, 5]


def test_tensors_are_views_of_one_storage(device: torch.device) -> None:
    base = torch.zeros(12, dtype=torch.uint8, device=device)
    numbers = torch.empty(0, device=device).set_(base.untyped_storage(), 1, (2,), (1,))
    numbers.fill_(1)
    assert base.cpu().view(torch.float32).tolist() == [0.0, 1.0, 1.0]
    base.view(torch.float32)[2:].add_(4)
    assert numbers.tolist() == [1.0, 5.0]
    numbers.resize_(5)
    assert numbers[:2].tolist() == [1.0, 5.0] and base.untyped_storage().nbytes() == 24
    numbers.set_()
    assert numbers.numel() == 0


def test_items_are_read(device: torch.device) -> None:
    assert torch.tensor(3.5, device=device).item() == 3.5
    assert torch.tensor([[7]], device=device).item() == 7
    with pytest.raises(RuntimeError, match="2 elements"):
        torch.ones(2, device=device).item()


def test_numbers_are_read_when_the_operator_is_called(device: torch.device) -> None:
    number = torch.tensor(2.0)
    tensor = torch.ones(3, device=device)
    with card.held():
        result = tensor * number
        number.fill_(9)
    assert result.tolist() == [2.0] * 3


def test_integers_can_be_counted(device: torch.device) -> None:
    numbers = torch.tensor([1, 2, 1, 0], dtype=torch.int32)
    found = torch.histc(numbers.to(device), bins=4, min=0, max=3)
    assert found.dtype == torch.int32 and found.tolist() == [1, 2, 1, 0]
    expected = torch.histc(numbers.float(), bins=4, min=0, max=3)
    assert torch.equal(torch.histc(numbers.float().to(device), 4, 0, 3).cpu(), expected)


def test_tensors_of_the_host_are_refused(device: torch.device) -> None:
    tensor = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3).add_(tensor)
    assert tensor[torch.tensor([0, 2])].tolist() == [1.0, 1.0]  # indices may come from the host


def test_errors_of_the_call_are_those_of_the_cpu(device: torch.device) -> None:
    tensor = torch.ones(3, 4, device=device)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        tensor @ tensor
    with pytest.raises(RuntimeError, match="invalid for input of size 12"):
        tensor.view(5)
    with pytest.raises(IndexError):
        tensor.sum(7)
    torch.accelerator.synchronize()


def test_random_numbers_follow_the_seed(device: torch.device) -> None:
    torch.manual_seed(3)
    expected = [torch.randn(5), torch.rand(3), torch.randperm(6)]
    torch.manual_seed(3)
    card.set_delay("kernel", random_ns=1_000_000)
    side = torch.Stream(device)
    found = [torch.randn(5, device=device)]
    with side:  # takes its numbers after the stream before
        found.append(torch.rand(3, device=device))
    found.append(torch.randperm(6, device=device))
    torch.accelerator.synchronize()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_random_states_can_be_kept(device: torch.device) -> None:
    with torch.random.fork_rng([0], device_type="slowcard"):
        first = torch.rand(3, device=device)
    assert torch.equal(torch.rand(3, device=device).cpu(), first.cpu())
    own = torch.Generator(device).manual_seed(5)
    assert own.device == device
    found = torch.rand(3, generator=own, device=device)
    assert torch.equal(found.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device=device)
