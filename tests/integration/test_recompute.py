"""A mask and rotary tables that are used at both ends of a model give way in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import Task
from ds_finepage.planning.finepage import search as finepage
from ds_finepage.planning.liveness import live_activation_bytes
from ds_finepage.planning.rewrite.recompute import CHEAP_OPS
from ds_finepage.runtime.handle import Handle

ROWS, WIDTH, WIDE = 96, 64, 512
TABLE_BYTES = 4 * ROWS * (ROWS + 2 * WIDTH)  # the mask and two tables, in float32
DEBUG = DebugConfig(poison_vacated=True, lane_delay_seed=3)

# A link that is slow beside a CPU, so that what pays does not hang on the machine.
PROFILE = dataclasses.replace(
    load_profile("v100-16gb"), h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6, name="slow link"
)


class Ends(nn.Module):
    """Attends and rotates first and last, with a wide block in between."""

    def __init__(self, width: int = WIDTH, wide: int = WIDE) -> None:
        super().__init__()
        self.width = width
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ROWS)
        mask = (at[:, None] < at[None, :]).to(x.dtype) * -1e9
        angles = at[:, None] * torch.arange(self.width)[None, :] / self.width
        cos, sin = angles.cos(), angles.sin()
        x = self.mix(self.first(x), mask, cos, sin)
        x = self.down(torch.relu(self.up(x)))
        for layer in self.more:
            x = layer(x)
        return self.mix(self.last(x), mask, cos, sin)

    def mix(
        self, x: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x * cos + x.flip(-1) * sin
        return torch.softmax(x @ x.transpose(0, 1) + mask, -1) @ x


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Ends().eval()


def attached(model: nn.Module, x: torch.Tensor, budget_bytes: int, **settings: object) -> Handle:
    """Attach, and run one pass."""
    handle = attach(
        model,
        device_budget=budget_bytes,
        device="cpu",
        policy="finepage",
        profile=PROFILE,
        **settings,
    )
    with torch.no_grad():
        model(x)
    return handle


def steady_bytes(
    model: nn.Module, x: torch.Tensor, budget_bytes: int, plain: torch.Tensor
) -> tuple[int, int]:
    """Return the bytes that a steady pass reloads and offloads, and its largest sum of live ones.

    Results are held against the plain ones on the way.
    """
    handle = attached(model, x, budget_bytes, split=False)
    handle.replan(debug=DEBUG)
    try:
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(model(x), plain)
        ((memgraph, _),) = handle.plans()
        (counted,) = handle.stats.passes
        moved = counted.last_reloaded_bytes + counted.last_offloaded_bytes
        assert counted.lower_bound_bytes <= counted.last_reloaded_bytes
        return moved, max(live_activation_bytes(memgraph.graph, 64))
    finally:
        handle.detach()


def test_fewer_bytes_move_and_the_result_is_the_same(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        plain = model(x)
    handle = attached(model, x, 16 << 20, split=False)
    needed = handle.stats.needed_budget_bytes
    handle.detach()
    # Not all weights fit beside the tables.
    budget_bytes = needed - TABLE_BYTES // 2
    torch._dynamo.reset()
    moved, live = steady_bytes(model, x, budget_bytes, plain)
    monkeypatch.setattr(finepage, "recompute", lambda graph, *_, **__: graph)
    torch._dynamo.reset()
    moved_without, live_without = steady_bytes(model, x, budget_bytes, plain)
    assert live_without - live >= TABLE_BYTES // 2
    assert moved < moved_without


def test_hooks_see_what_runs_again(model: nn.Module) -> None:
    x = torch.randn(ROWS, WIDTH)
    handle = attached(model, x, 16 << 20, split=False)
    seen: list[Task] = []
    handle.register_op_hook(after=lambda task, results: seen.append(task))
    handle.replan(budget_bytes=handle.stats.needed_budget_bytes - TABLE_BYTES // 2)
    for num_plans in (2, 3):
        seen.clear()
        with torch.no_grad():
            model(x)
        ((memgraph, _),) = handle.plans()
        assert len(memgraph.graph.tasks) > handle.stats.passes[0].num_tasks
        assert seen == list(memgraph.graph.tasks)
        assert handle.stats.num_plans == num_plans
        handle.replan()


def test_every_cheap_op_exists_and_draws_no_random_numbers() -> None:
    for name in sorted(CHEAP_OPS):
        packet = getattr(torch.ops.aten, name.removeprefix("aten."))
        tags = [tag for o in packet.overloads() for tag in getattr(packet, o).tags]
        assert torch.Tag.nondeterministic_seeded not in tags, name
