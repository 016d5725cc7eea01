"""Actions that read, print, copy, serialise or change weights."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.integration.actions.subjects import (
    Net,
    Subject,
    equal_results,
    refused_by_deepspeed,
    run,
)

ACTIONS: dict[str, Callable[[Subject], None]] = {}
READS: list[str] = []
"""Names of actions that change nothing, so that they can follow one another."""


def action(act: Callable[[Subject], None]) -> Callable[[Subject], None]:
    ACTIONS[act.__name__] = act
    return act


def _reads(name: str, read: Callable[[Any], Any]) -> None:
    """Add an action that reads something off both models and compares what it finds."""

    def act(subject: Subject) -> None:
        found, expected = subject.both(read)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected)
        else:
            assert found == expected
        subject.same()

    ACTIONS[name] = act
    READS.append(name)


_reads("print_the_model", repr)
_reads("print_a_weight", lambda m: repr(m.up.weight))
_reads("format_a_weight", lambda m: f"{m.up.bias.detach()}")
_reads("clone_a_weight", lambda m: m.up.weight.clone())
_reads("mean_of_a_weight", lambda m: m.up.weight.mean())
_reads("list_of_a_weight", lambda m: m.up.weight.tolist())
_reads("numpy_of_a_weight", lambda m: m.up.weight.detach().numpy().tobytes())
_reads("data_of_a_weight", lambda m: m.up.weight.data.sum().item())
_reads("checksum_of_all", lambda m: sum(p.double().sum().item() for p in m.parameters()))
_reads("norm_of_all", lambda m: nn.utils.parameters_to_vector(m.parameters()).norm())
_reads("count_elements", lambda m: sum(p.numel() for p in m.parameters()))
_reads("count_bytes", lambda m: sum(p.untyped_storage().nbytes() for p in m.parameters()) > 0)
_reads("slice_a_weight", lambda m: m.up.weight[3:7, ::2].contiguous())
_reads("index_a_weight", lambda m: m.up.weight[5, 3].item())
_reads("compare_a_weight", lambda m: bool((m.up.weight == m.up.weight).all()))
_reads("cast_a_weight", lambda m: m.up.weight.to(torch.float64))
_reads("multiply_with_a_weight", lambda m: m.up.weight @ m.up.weight.t())
_reads("bytes_of_a_weight", lambda m: bytes(m.up.bias.untyped_storage())[:64])
_reads("state_dict", lambda m: {k: v.tolist() for k, v in m.state_dict().items()})
_reads("describe_state_dict", lambda m: str(m.state_dict()))
_reads("named_parameters", lambda m: {k: v.sum().item() for k, v in m.named_parameters()})
_reads("pickle_the_data", lambda m: pickle.loads(pickle.dumps(m.up.weight.data)).tolist())
_reads("buffers", lambda m: {k: v.tolist() for k, v in m.named_buffers()})
_reads("call_a_part", lambda m: run(m.up, torch.ones(2, 16)))
_reads("apply_a_function", lambda m: [m.apply(lambda part: None)] and m.up.weight.sum().item())


# Copies.


@action
def deepcopy_the_model(subject: Subject) -> None:
    twin = copy.deepcopy(subject.model)
    assert equal_results(twin, subject.plain, subject.x)
    with torch.no_grad():
        twin.up.weight.zero_()
    assert not equal_results(twin, subject.plain, subject.x)
    subject.same()


@action
def deepcopy_a_part(subject: Subject) -> None:
    part = copy.deepcopy(subject.model.blocks)
    x = torch.randn(3, 48)
    assert torch.equal(run(part, x), run(subject.plain.blocks, x))
    assert type(part[1].weight) is nn.Parameter
    subject.same()


@action
def copy_the_model(subject: Subject) -> None:
    twin = copy.copy(subject.model)
    assert equal_results(twin, subject.plain, subject.x)
    subject.same()


@action
def deepcopy_the_state(subject: Subject) -> None:
    state = copy.deepcopy(subject.model.state_dict())
    fresh = Net()
    fresh.load_state_dict(state)
    assert equal_results(fresh, subject.plain, subject.x)
    subject.same()


@action
def deepcopy_a_weight(subject: Subject) -> None:
    twin = copy.deepcopy(subject.model.up.weight)
    assert type(twin) is nn.Parameter and torch.equal(twin, subject.plain.up.weight)
    with torch.no_grad():
        twin.zero_()
    subject.same()


@action
def parameter_of_a_weight(subject: Subject) -> None:
    twin = nn.Parameter(subject.model.up.weight)
    assert torch.equal(twin, subject.plain.up.weight)
    subject.same()


# Serialisation.


@action
def save_and_load_the_state(subject: Subject) -> None:
    file = io.BytesIO()
    torch.save(subject.model.state_dict(), file)
    file.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(file))
    assert equal_results(fresh, subject.plain, subject.x)
    subject.same()


@action
def save_and_load_the_model(subject: Subject) -> None:
    file = io.BytesIO()
    if subject.engine is not None:
        refused_by_deepspeed(subject, lambda m: torch.save(m, file))
        return
    torch.save(subject.model, file)
    file.seek(0)
    fresh = torch.load(file, weights_only=False)
    assert equal_results(fresh, subject.plain, subject.x)
    subject.same()


@action
def pickle_the_model(subject: Subject) -> None:
    if subject.engine is not None:
        refused_by_deepspeed(subject, pickle.dumps)
        return
    fresh = pickle.loads(pickle.dumps(subject.model))
    assert equal_results(fresh, subject.plain, subject.x)
    subject.same()


@action
def save_safetensors(subject: Subject) -> None:
    from safetensors.torch import load_model, save_model

    with tempfile.TemporaryDirectory() as folder:
        save_model(subject.model, f"{folder}/model.safetensors")
        fresh = Net()
        load_model(fresh, f"{folder}/model.safetensors")
    assert equal_results(fresh, subject.plain, subject.x)
    subject.same()


# Changes of values.


def _changes(name: str, change: Callable[[Any], Any], *, needs_room: bool = False) -> None:
    """Add an action that changes both models; the next call gives the same."""

    def act(subject: Subject) -> None:
        if needs_room:
            subject.make_room()
        before = run(subject.plain, subject.x)
        subject.kept += subject.both(change)
        subject.same()
        assert not torch.equal(run(subject.plain, subject.x).to(before.dtype), before)

    ACTIONS[name] = act


def _without_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        with torch.no_grad():
            return change(model)

    return changed


def _assign(model: Any, path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, value)


def _set_row(model: Any) -> None:
    model.up.weight[3] = 5.0


def _add_to_data(model: Any) -> None:
    model.up.weight.data += 0.25


def _write_later(model: Any) -> Callable[[], Any]:
    alias = model.up.weight.data
    return lambda: alias.mul_(3)


def _prune(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.up, "weight", amount=0.5)


def _weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.up)
    model.up.parametrizations.weight.original0.data.mul_(2)


_changes("add_in_place", _without_grad(lambda m: m.up.weight.add_(0.5)))
_changes("copy_in_place", _without_grad(lambda m: m.up.weight.copy_(torch.ones(48, 16))))
_changes("fill_in_place", _without_grad(lambda m: m.up.bias.fill_(2.0)))
_changes("set_a_row", _without_grad(_set_row))
_changes("init_a_weight", lambda m: nn.init.constant_(m.down.weight, 0.1))
_changes("add_to_data_in_place", lambda m: m.up.weight.data.add_(0.5))
_changes("add_to_data", _add_to_data)
_changes("copy_into_data", lambda m: m.up.weight.data.copy_(torch.ones(48, 16)))
_changes("set_data", lambda m: setattr(m.up.weight, "data", torch.ones(48, 16)))
_changes("set_data_transposed", lambda m: setattr(m.up.weight, "data", torch.ones(16, 48).t()))
_changes("set_the_storage", _without_grad(lambda m: m.up.weight.set_(torch.ones(48, 16))))
_changes("write_through_a_view", _without_grad(lambda m: m.up.weight.view(-1)[:100].zero_()))
_changes("write_through_detach", lambda m: m.up.weight.detach().mul_(2))
_changes("write_through_state_dict", lambda m: m.state_dict()["up.weight"].mul_(2))
_changes("write_in_inference_mode", torch.inference_mode()(lambda m: m.up.weight.mul_(2)))
_changes("write_every_weight", _without_grad(lambda m: [p.mul_(1.5) for p in m.parameters()]))
_changes(
    "vector_to_parameters",
    lambda m: nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, sum(p.numel() for p in m.parameters())), m.parameters()
    ),
)
_changes("write_a_buffer", lambda m: m.scale.fill_(2.0))
_changes("replace_a_buffer", lambda m: m.register_buffer("scale", torch.tensor(3.0)))
_changes("prune_a_weight", _prune, needs_room=True)
_changes("weight_norm", _weight_norm)


@action
def load_a_state(subject: Subject) -> None:
    state = {k: v * 2 for k, v in Net().state_dict().items()}
    subject.both(lambda m: m.load_state_dict(state))
    subject.same()


@action
def load_and_assign_a_state(subject: Subject) -> None:
    subject.both(
        lambda m: m.load_state_dict({k: v * 2 for k, v in Net().state_dict().items()}, assign=True)
    )
    subject.same()
    subject.both(lambda m: m.up.weight.data.mul_(2))
    subject.same()


@action
def write_through_data_that_is_kept(subject: Subject) -> None:
    writes = subject.both(_write_later)
    subject.same()
    for _ in range(2):
        for write in writes:
            write()
        subject.same()


@action
def write_into_the_tensor_that_became_data(subject: Subject) -> None:
    values = torch.ones(48, 16), torch.ones(48, 16)
    subject.model.up.weight.data, subject.plain.up.weight.data = values
    subject.same()
    for value in values:
        value.mul_(2)
    if subject.engine is None:  # under ZeRO a partition takes the value, not the tensor
        subject.same()


@action
def write_through_numpy_and_refresh(subject: Subject) -> None:
    def write(model: Any) -> None:
        model.up.weight.detach().numpy()[:] *= 2

    subject.both(write)
    subject.handle.refresh()
    subject.same()


@action
def swap_two_weights(subject: Subject) -> None:
    def swap(model: Any) -> None:
        first, second = model.up.bias, model.blocks[1].bias
        first.data, second.data = second.data, first.data

    subject.both(swap)
    subject.same()


@action
def write_between_many_calls(subject: Subject) -> None:
    for step in range(6):
        name = ("up", "down")[step % 2]
        subject.both(lambda m, name=name: getattr(m, name).weight.data.mul_(1.25))  # type: ignore[misc]
        subject.same(times=1)
