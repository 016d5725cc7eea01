"""Life of an attached model: hooks, errors, interrupts, fallbacks, callers' modes, detach."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.execution import lanes as lanes_module
from ds_finepage.execution.executor import Executor
from ds_finepage.graph.taskgraph import Task
from ds_finepage.runtime.handle import Handle
from tests.integration.families import logits, make_model, tiny, token_ids, tokens
from tests.integration.parity import same_at_every_budget

PROMPT = token_ids(6)
DEBUG = DebugConfig(poison_vacated=True, lane_delay_seed=7)


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, Handle]]:
    """A one-layer model, its plain logits and tokens, and a handle that has captured both."""
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    plain = logits(model, PROMPT), tokens(model, PROMPT, 6)
    handle = attach(model, device_budget="16MiB", device="cpu")
    logits(model, PROMPT)
    tokens(model, PROMPT, 6)
    yield model, *plain, handle
    handle.detach()


@pytest.fixture
def attached(
    llama: tuple[Any, torch.Tensor, torch.Tensor, Handle],
) -> tuple[Any, torch.Tensor, torch.Tensor, Handle]:
    """The same, under the least budget and with debug mode on."""
    handle = llama[3]
    handle.replan(budget_bytes=handle.stats.min_budget_bytes, policy="finepage", debug=DEBUG)
    return llama


# Attaching and detaching.


def our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("finepage")}


def test_detaching_gives_the_model_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "SMALL_TRANSFER_BYTES", 0)
    torch._dynamo.reset()
    model = make_model("gemma", num_hidden_layers=1)
    plain, limit = logits(model, PROMPT), torch._dynamo.config.recompile_limit
    before, threads = looks(model), our_threads()
    values = [hash_of(p) for p in model.parameters()]
    for _ in range(2):
        handle = attach(model, device_budget="16MiB", device="cpu")
        assert handle.attached
        assert [hash_of(p) for p in model.parameters()] == values
        assert model.generation_config.disable_compile is True
        assert torch.equal(logits(model, PROMPT), plain)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        assert torch.equal(logits(model, PROMPT), plain)
        assert our_threads() > threads
        handle.detach()
        handle.detach()
        assert not handle.attached
        assert looks(model) == before
        assert torch._dynamo.config.recompile_limit == limit
        assert our_threads() <= threads
        assert torch.equal(logits(model, PROMPT), plain)


def looks(model: nn.Module) -> list[Any]:
    """Describe everything that attaching might have left behind."""
    found: list[Any] = [model._compiled_call_impl, model.generation_config.to_dict()]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert not parameter.is_inference()
        found.append((name, id(parameter), parameter.data_ptr(), parameter.shape))
        found.append((parameter.stride(), parameter.requires_grad, hash_of(parameter)))
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in vars(module).items() if "hooks" in k and hasattr(v, "__len__")]
        found.append((name, sorted(vars(module)), hooks))
    return found


def hash_of(parameter: torch.Tensor) -> bytes:
    return parameter.detach().view(torch.uint8).numpy().tobytes()


class MixedTypes(nn.Module):
    """bfloat16 products with float32 norms, as models keep them, and a column-major weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.bfloat16()
        self.norm.float()
        self.down.weight.data = self.down.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.float()).to(self.up.weight.dtype)
        return self.down(nn.functional.gelu(self.up(x)))


def test_weights_of_two_types_and_odd_layouts() -> None:
    model, x = MixedTypes().eval(), torch.randn(5, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        same_at_every_budget(model, lambda: model(x))
    assert model.down.weight.stride() == (1, 32)


def test_the_last_row_of_a_batch_is_that_of_plain_transformers() -> None:
    model, ids = make_model("llama"), token_ids(100, batch=6)
    last: dict[str, Any] = {"logits_to_keep": 1}  # a slice: its product is folded, or it is not
    plain = logits(model, ids, **last)
    handle = attach(model, device_budget="64MiB", device="cpu")
    handle.register_op_hook()  # the engine does not step aside
    assert torch.equal(logits(model, ids, **last), plain)
    assert handle.stats.num_resident_runs == 0


# Hooks, and what is raised in them.


@pytest.mark.parametrize("error", (KeyboardInterrupt, ValueError), ids=lambda e: e.__name__)
@pytest.mark.parametrize("when", ("first", "middle", "last"))
def test_after_an_error_in_the_middle_of_generate_the_next_call_is_right(
    attached: Any, error: type[BaseException], when: str
) -> None:
    model, plain, plain_tokens, handle = attached
    count = count_tasks(handle, lambda: tokens(model, PROMPT, 6))
    at = {"first": 1, "middle": count // 2, "last": count}[when]
    left = at

    def interrupt(task: Task, tensors: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("from a hook")

    remove = handle.register_op_hook(before=interrupt)
    with pytest.raises(error, match="from a hook"):
        tokens(model, PROMPT, 6)
    remove()
    assert torch.equal(tokens(model, PROMPT, 6), plain_tokens)
    assert torch.equal(logits(model, PROMPT), plain)


def count_tasks(handle: Handle, run: Callable[[], Any]) -> int:
    found = []
    remove = handle.register_op_hook(after=lambda task, results: found.append(task))
    run()
    remove()
    return len(found)


# Callers.


class _MasterReads(TorchDispatchMode):
    """Counts ops by whether they are given bytes of a host master."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._masters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.of_reloads, self.of_others = 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                if value.untyped_storage().data_ptr() in self._masters:
                    is_reload = op is torch.ops.aten.copy_.default and value is args[1]
                    self.of_reloads += is_reload
                    self.of_others += not is_reload and not op.is_view
        return op(*args, **(kwargs or {}))


def test_a_plan_reads_masters_in_reloads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    run, seen = Executor.run, []

    def watched(executor: Executor, *args: Any) -> Any:  # Dynamo makes no graph in such a mode
        with _MasterReads(model) as reads:
            found = run(executor, *args)
        seen.append((reads.of_reloads > 0, reads.of_others))
        return found

    model, x = tiny(), torch.randn(3, 16)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="1MiB", device="cpu")
        model(x)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        monkeypatch.setattr(Executor, "run", watched)
        for _ in range(2):  # entering a plan, and in its steady state
            assert torch.equal(model(x), plain)
    assert seen == [(True, 0)] * 2 and not handle.stats.num_unplanned_modules
