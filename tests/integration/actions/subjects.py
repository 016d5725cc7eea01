"""A small model, attached plainly or by DeepSpeed, beside an equal one that is not attached."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.runtime.handle import Handle
from tests.integration.engines import ds_config
from tests.integration.families import make_model, token_ids


class Net(nn.Module):
    """Two products, a norm, a table, dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(24, 16)
        self.up = nn.Linear(16, 48)
        self.blocks = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU())
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(48, 16)
        self.register_buffer("scale", torch.tensor(0.5))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.table.weight.t()
        hidden = torch.softmax(hidden, dim=-1) @ self.table.weight
        return self.down(self.dropout(self.blocks(self.up(hidden)))) * self.scale


@dataclass
class Subject:
    """What an action works on.

    Attributes:
        model: The attached model.
        plain: One that was equal to it before.
        x: What both are called with.
        handle: At work on the model.
        engine: DeepSpeed's, where it was attached by that.
        kept: Keeps things alive until the action is over.
    """

    model: Any
    plain: Any
    x: torch.Tensor
    handle: Handle
    engine: Any = None
    kept: list[Any] = field(default_factory=list)

    def both(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Do something with both models; return both results."""
        return act(self.model), act(self.plain)

    def same(self, *, times: int = 2) -> None:
        """Hold the results of both models against each other, bit by bit."""
        for _ in range(times):
            assert equal_results(self.model, self.plain, self.x)

    def make_room(self) -> None:
        """Go on with room for whatever the action needs; weights stay if they fit."""
        self.handle.replan(budget_bytes=1 << 30)

    def detached(self) -> Any:
        """Detach; return what is called then."""
        if self.engine is None:
            self.handle.detach()
            return self.model
        from ds_finepage.integrations.deepspeed.engine import detach

        detach(self.engine)
        return self.engine


class Actions(dict[str, Callable[[Subject], None]]):
    """Actions by name. After each of them, both models are held against each other."""

    def add(self, act: Callable[[Subject], None]) -> Callable[[Subject], None]:
        """Add an action under its name; a decorator."""
        self[act.__name__] = act
        return act

    def gives(self, name: str, get: Callable[[Any], Any], *, deepspeed: bool = True) -> None:
        """Add an action that gets something of both models and compares what it finds.

        Args:
            name: Of the action.
            get: Gets it of a model.
            deepspeed: Whether it can be got of a module with DeepSpeed's own hooks.
        """

        def act(subject: Subject) -> None:
            if subject.engine is not None and not deepspeed:
                with pytest.raises(AttributeError, match="DeepSpeedEngine"):
                    get(subject.model)
                return
            found, expected = subject.both(get)
            if isinstance(expected, torch.Tensor):
                assert torch.equal(found, expected)
            else:
                assert found == expected

        self[name] = act


def run(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a model on numbers, or on token ids."""
    with torch.no_grad():
        found = model(x)
    result = getattr(found, "logits", found)
    assert isinstance(result, torch.Tensor)
    return result


def equal_results(model: Any, plain: Any, x: torch.Tensor) -> bool:
    """Tell whether two models give the same bits."""
    torch.manual_seed(3)  # of dropout
    found = run(model, x)
    torch.manual_seed(3)
    expected = run(plain, x)
    return found.dtype == expected.dtype and torch.equal(found, expected)


def make_subject(*, deepspeed: bool, language_model: bool) -> Subject:
    """Attach to a model; some of its weights stay on the device, the others stream."""
    torch.set_num_threads(1)
    if language_model:
        model, x = make_model("llama", num_hidden_layers=1), token_ids(7)
    else:
        model, x = Net(), torch.randn(5, 16)
    plain = copy.deepcopy(model)
    engine = None
    if deepspeed:
        import deepspeed as ds

        from ds_finepage.integrations.deepspeed.engine import handle_of

        config = ds_config({"enabled": True, "device_budget": "1GiB"})
        engine, *_ = ds.initialize(model=model, config=config)
        model, handle = engine.module, handle_of(engine)
    else:
        handle = attach(model, device_budget="1GiB", device="cpu")
    subject = Subject(model, plain, x, handle, engine)
    subject.same(times=1)
    stats = handle.stats
    handle.replan(budget_bytes=(2 * stats.min_budget_bytes + stats.needed_budget_bytes) // 3)
    subject.same()
    last = handle.stats.passes[-1]
    assert 0 < last.last_reloaded_bytes < stats.weight_bytes, "some weights are to stay"
    gc.collect()
    return subject
