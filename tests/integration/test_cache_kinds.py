"""KV caches of every kind that transformers has, under a small budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import Cache
from transformers.cache_utils import QuantizedLayer

from ds_finepage.api import attach
from ds_finepage.capture.recorder import require_plain
from ds_finepage.errors import CaptureError
from ds_finepage.execution.meter import DeviceMeter
from tests.integration.families import CACHE, make_model, token_ids, tokens

pytestmark = pytest.mark.usefixtures("fresh")

BUDGET = 700_000
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"cache": "dynamic"},
    "static": {"cache": "static"},
    "fp8": {"cache": "quantized", "cache_config": {"backend": "fp8"}},
}


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "static"), ("llama", "fp8"), ("mistral", "dynamic")]
)
def test_every_kind_of_cache_gives_its_tokens_within_the_budget(family: str, kind: str) -> None:
    model = make_model(family, num_hidden_layers=1)
    ids = token_ids(24, batch=2)
    plain = tokens(model, ids, 8, **KINDS[kind])
    handle = attach(model, device_budget=BUDGET, device="cpu")
    with DeviceMeter(torch.device("cpu")) as meter:
        assert torch.equal(tokens(model, ids, 8, **KINDS[kind]), plain)
    assert meter.peak_bytes <= BUDGET
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


class Halves(QuantizedLayer):
    """Keeps what it quantizes in a tensor that wraps two others, as quantizers do."""

    @torch._dynamo.disable
    def _quantize(self, tensor: torch.Tensor, axis: int) -> TwoTensor:
        half = tensor.to(torch.bfloat16).to(tensor.dtype)
        return TwoTensor(half, half.clone())

    def _dequantize(self, q_tensor: TwoTensor) -> torch.Tensor:
        return (q_tensor + 0).a


def test_a_cache_of_tensors_that_wrap_others_gives_its_tokens() -> None:
    model = make_model("llama", num_hidden_layers=1)

    def generate() -> torch.Tensor:
        cache = Cache(layers=[Halves(residual_length=3)])
        given: dict[str, Any] = {CACHE: cache}
        return model.generate(token_ids(9, batch=2), max_new_tokens=6, do_sample=False, **given)

    plain = generate()
    handle = attach(model, device_budget=BUDGET, device="cpu")
    assert torch.equal(generate(), plain)
    assert any("TwoTensor wraps other tensors" in r for r in handle.stats.unplanned_reasons)
    handle.detach()
    assert torch.equal(generate(), plain)


def test_a_tensor_that_wraps_others_is_not_planned() -> None:
    plain = torch.ones(2)
    require_plain(plain)
    require_plain(torch.nn.Parameter(plain))
    with pytest.raises(CaptureError, match="TwoTensor wraps other tensors"):
        require_plain(TwoTensor(plain, plain))
