"""Large buffers, attributes and entries of dictionaries: weights, if no forward changes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ds_finepage
from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, StoreError
from ds_finepage.execution.device import default_device
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.taskgraph import JOIN
from ds_finepage.runtime.handle import Handle
from tests.integration.engines import ds_config, one_process_deepspeed

WIDTH, GROUP = 512, 8
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


def packed_parts(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers of four bits, scales and minima of a square matrix."""
    make = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8, generator=make)
    scales = torch.rand(WIDTH, WIDTH // GROUP, 1, generator=make) / 64
    return numbers, scales, scales * -8


def product(x: torch.Tensor, numbers: Any, scales: Any, minima: Any) -> torch.Tensor:
    whole = torch.stack([numbers & 15, numbers >> 4], dim=-1).reshape(WIDTH, -1, GROUP)
    return nn.functional.linear(x, (whole * scales + minima).reshape(WIDTH, WIDTH))


class InBuffers(nn.Module):
    """Keeps all parts in buffers, as layers of GPTQ and AWQ do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, part in zip(("numbers", "scales", "minima"), packed_parts(seed), strict=True):
            self.register_buffer(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.numbers, self.scales, self.minima)


class InDictionary(nn.Module):
    """Keeps numbers in a parameter, and the rest in a dictionary, as layers of HQQ do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers, *rest = packed_parts(seed)
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.meta = dict(zip(("scales", "minima"), rest, strict=True))
        self.meta["table"] = torch.zeros(1 << 14)  # that no forward reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.numbers, self.meta["scales"], self.meta["minima"])


class OnParameter(nn.Module):
    """Keeps numbers in an attribute, and the rest in an object on a parameter (bitsandbytes)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.packed, *rest = packed_parts(seed)
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.bias.state = SimpleNamespace(inner=[*rest])  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales, minima = self.bias.state.inner
        return product(x, self.packed, scales, minima) + self.bias


FORMS = {"buffers": InBuffers, "dictionary": InDictionary, "object": OnParameter}


def large_tensors(model: nn.Module, form: str) -> list[torch.Tensor]:
    if form == "buffers":
        return [layer.numbers for layer in model]
    if form == "dictionary":
        return [layer.meta["table"] for layer in model]
    return [layer.packed for layer in model]


def under_the_least_budget(
    model: nn.Module, x: torch.Tensor, packed_bytes: int
) -> tuple[Handle, torch.Tensor]:
    """Attach, and hold results and peaks of an ample and of the least budget; return the result."""
    with torch.no_grad():
        expected = model(x)
        handle = attach(model, device_budget="1GiB")
        assert torch.equal(model(x), expected)
        assert handle.stats.weight_bytes >= packed_bytes
        budget_bytes = handle.stats.min_budget_bytes
        handle.replan(budget_bytes=budget_bytes)
        for _ in range(2):
            with DeviceMeter(default_device()) as meter:
                assert torch.equal(model(x), expected)
            assert meter.peak_bytes <= budget_bytes
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    return handle, expected


@pytest.mark.parametrize("form", FORMS)
def test_packed_layers_of_each_form_hold_the_budget_and_come_back(form: str) -> None:
    model = nn.Sequential(*[FORMS[form](seed) for seed in range(6)])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = large_tensors(model, form)
    addresses = [tensor.data_ptr() for tensor in before]
    packed_bytes = 6 * (WIDTH * WIDTH // 2 + 2 * WIDTH * WIDTH // GROUP * 4)
    handle, expected = under_the_least_budget(model, X, packed_bytes)
    assert handle.stats.passes[0].last_reloaded_bytes > 5 * WIDTH * WIDTH // 2
    assert any(task.op == JOIN for plan, _ in handle.plans() for task in plan.graph.tasks)
    shown = model.state_dict()
    assert list(shown) == list(state) and all(torch.equal(shown[n], state[n]) for n in state)
    handle.detach()
    assert all(a is b for a, b in zip(large_tensors(model, form), before, strict=True))
    assert [tensor.data_ptr() for tensor in before] == addresses
    assert torch.Tensor.data is torch._C.TensorBase.data
    with torch.no_grad():
        assert torch.equal(model(X), expected)


def names_of(handle: Handle) -> set[str]:
    """Return the names of the weights."""
    return set(handle._weights.masters)


def attached(model: nn.Module) -> Handle:
    return attach(model, device_budget="1GiB", device="cpu")


class Reader(nn.Module):
    """Adds a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 1 << 15))
        self.weight = nn.Parameter(torch.ones(1 << 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.table


ROW = torch.ones(1 << 15)


def write(model: Any) -> None:
    model.table.mul_(2)


def write_by_data(model: Any) -> None:
    model.table.data.add_(1)


def set_data(model: Any) -> None:
    model.table.data = torch.zeros(1 << 15)


def replace(model: Any) -> None:
    model.table = torch.full((1 << 15,), 3.0)


def assign(model: Any) -> None:
    model.load_state_dict({"table": -ROW, "weight": ROW}, assign=True)


def convert(model: Any) -> None:
    model.double()


@pytest.mark.parametrize("change", [write, write_by_data, set_data, replace, assign, convert])
def test_a_change_between_two_calls_is_taken_over(change: Any) -> None:
    model, same = Reader(), Reader()
    handle = attached(model)
    with torch.no_grad():
        for _ in range(2):
            model(ROW)
        change(model), change(same)
        for _ in range(2):
            assert torch.equal(model(ROW), same(ROW))
    assert names_of(handle) == {"table", "weight"}
    handle.detach()
    assert torch.equal(model.table, same.table)


def test_a_normalization_that_trains_is_no_weight() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(1 << 15))

    model, same = make(), make()
    x = torch.stack([ROW, 3 * ROW, -ROW])
    handle = attached(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), same(x))
    assert torch.equal(model[0].running_var, same[0].running_var)
    assert names_of(handle) == {"0.weight", "0.bias"}
    handle.detach()
    assert torch.equal(model[0].running_mean, same[0].running_mean)


def test_a_normalization_that_only_reads_is_a_weight() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1 << 15)).eval()
    handle = attached(model)
    with torch.no_grad():
        model(ROW[None])
    assert names_of(handle) >= {"0.running_mean", "0.running_var"}


class Cached(nn.Module):
    """Keeps rows of earlier calls in a buffer, as a static KV cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 1 << 12))
        self.weight = nn.Parameter(torch.ones(1 << 12))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, at, x * self.weight)
        return self.rows.sum(0)


class Viewed(Reader):
    """Returns a view of its buffer."""

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.weight, self.table[: 1 << 14]


class Replacing(Reader):
    """Puts another tensor in the place of its buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table * 2
        return x * self.weight + self.table


class Breaking(Reader):
    """Changes its buffer between two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x * self.weight + self.table
        torch._dynamo.graph_break()
        self.grow()
        return first + self.table

    @torch.compiler.disable
    def grow(self) -> None:
        self.table.add_(1)


class Unplanned(Reader):
    """Changes its buffer in a graph that has no plan, because a tensor is conjugated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.view_as_complex(x.reshape(-1, 2)).conj().real.sum()
        self.table.mul_(2)
        return first + self.table


def step(model: nn.Module, number: int) -> Any:
    if isinstance(model, Cached):
        return model(torch.full((1, 1 << 12), number + 1.0), torch.tensor([number]))
    return model(ROW + number)


@pytest.mark.parametrize("kind", [Cached, Viewed, Replacing, Breaking, Unplanned])
def test_a_buffer_that_the_forward_changes_is_no_weight(kind: type[nn.Module]) -> None:
    model, same = kind(), kind()
    handle = attached(model)
    with torch.no_grad():
        for number in range(4):
            found, expected = step(model, number), step(same, number)
            if kind is Viewed:
                assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
                assert found[1].data_ptr() == model.table.data_ptr()  # the buffer, and no copy
            else:
                assert torch.equal(found, expected)
    assert names_of(handle) == {"weight"}
    assert handle.stats.num_unplanned_graphs == (4 if kind is Unplanned else 0)
    handle.detach()
    for name, buffer in same.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


class Holder(nn.Module):
    """A module that is called outside any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Reader()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.compiler.disable(self.inner)(x) * 2


def test_a_module_outside_any_graph_has_its_buffers() -> None:
    model, same = Holder(), Holder()
    handle = attached(model)
    with torch.no_grad():
        assert torch.equal(model(ROW), same(ROW))
    assert names_of(handle) == {"inner.table", "inner.weight"}


def test_a_tensor_that_shares_its_storage_is_no_weight() -> None:
    model = Reader()
    model.part = model.table[:8]
    model.same = model.weight.detach()
    model.register_buffer("small", torch.zeros(64))
    model.register_buffer("grows", torch.ones(1 << 15).requires_grad_())
    model.register_buffer("wide", torch.zeros(1).expand(1 << 15))
    handle = attached(model)
    assert names_of(handle) == {"weight"}
    with pytest.raises(StoreError, match="detach it first"):
        attached(model)


def test_a_buffer_of_another_attached_model_is_no_weight() -> None:
    first, second = Reader(), Reader()
    second.table = first.table
    handles = [attached(model) for model in (first, second)]
    assert [names_of(handle) for handle in handles] == [{"table", "weight"}, {"weight"}]
    with torch.no_grad():
        assert torch.equal(first(ROW), second(ROW))


def test_a_buffer_that_was_refused_stays_refused_when_the_model_grows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "ds_finepage.runtime")
    model = nn.Sequential(Breaking())
    handle = attached(model)
    with torch.no_grad():
        model(ROW)
        model.append(Reader())
        model(ROW)
    assert names_of(handle) == {"0.weight", "1.table", "1.weight"}
    assert caplog.text.count("stay on the device: 0.table") == 1


def test_tied_buffers_are_one_weight() -> None:
    model = nn.ModuleList([Reader(), Reader()])
    model[1].table = model[0].table
    handle = attached(model)
    assert names_of(handle) == {"0.table", "0.weight", "1.weight"}


def test_tensors_of_inference_mode_are_taken_and_come_back() -> None:
    with torch.inference_mode():
        model, same = Reader(), Reader()
    table = model.table
    handle = attached(model)
    with torch.no_grad():
        assert torch.equal(model(ROW), same(ROW))
    assert names_of(handle) == {"table", "weight"}
    handle.detach()
    assert model.table is table and table.is_inference()


def test_a_refused_attach_leaves_buffers_as_they_were() -> None:
    model = Reader()
    address = model.table.data_ptr()
    with pytest.raises(ConfigError, match="device_budget"):
        attach(model, device_budget=1 << 60, device="cpu")
    assert model.table.data_ptr() == address
    assert torch.Tensor.data is torch._C.TensorBase.data


class Tokens(nn.Module):
    """Packed layers behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(*[FORMS[form](5) for form in FORMS])
        self.register_buffer("seen", torch.zeros(1 << 15))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.layers(self.embed(ids)[0])


def test_deepspeed_pages_large_buffers() -> None:
    model, ids = Tokens(), torch.arange(4)[None]
    with torch.no_grad():
        expected = model(ids)
    with one_process_deepspeed() as deepspeed:
        config = ds_config({"enabled": True, "device_budget": "1GiB"})
        engine, *_ = deepspeed.initialize(model=model, config=config)
        handle = ds_finepage.handle_of(engine)
        with torch.no_grad():
            assert torch.equal(engine(ids), expected)
            handle.replan(budget_bytes=handle.stats.min_budget_bytes)
            assert torch.equal(engine(ids), expected)
        assert names_of(handle) >= {"layers.0.numbers", "layers.1.meta.table", "layers.2.packed"}
        assert "seen" not in names_of(handle) and model.seen[0] == 3
        assert handle.stats.num_unplanned_graphs == 0
        engine.optimizer.detach_finepage()
        assert model.layers[0].numbers.equal(packed_parts(5)[0])
        engine.destroy()


def four_bit_layers() -> nn.Sequential:
    quantiser = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    settings = {"compute_dtype": torch.float32, "compress_statistics": False, "quant_type": "nf4"}
    layers = [quantiser.nn.Linear4bit(1024, 1024, **settings) for _ in range(3)]
    return nn.Sequential(*layers).to("cpu")  # which packs them


def half_quadratic_layers() -> nn.Sequential:
    quantiser = pytest.importorskip("hqq.core.quantize")
    torch.manual_seed(0)
    config = quantiser.BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    make = quantiser.HQQLinear
    return nn.Sequential(
        *[
            make(nn.Linear(1024, 1024), config, compute_dtype=torch.float32, device="cpu")
            for _ in range(3)
        ]
    )


@pytest.mark.parametrize("make", [four_bit_layers, half_quadratic_layers])
@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_layers_of_other_libraries_hold_the_budget(make: Any) -> None:
    model = make()
    x = torch.randn(2, 1024)
    packed_bytes = 3 * (1024 * 1024 // 2 + (64 << 10))  # numbers of four bits, and scales
    handle, expected = under_the_least_budget(model, x, packed_bytes)
    handle.detach()
    with torch.no_grad():
        assert torch.equal(model(x), expected)
