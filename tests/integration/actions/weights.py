"""Actions that read, print, copy, serialise or change weights."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from tests.integration.actions.subjects import Actions, Net, Subject, equal_results, run

ACTIONS = Actions()
X = torch.linspace(-1, 1, 80).view(5, 16)


def _copied_part(model: Any) -> tuple[type, list[Any]]:
    part = copy.deepcopy(model.blocks)
    return type(part[1].weight), run(part, torch.ones(3, 48)).tolist()


def _net_of(load: Callable[[Any], Any]) -> torch.Tensor:
    """Return the result of a net that has only the weights that are loaded into it."""
    net = Net()
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    load(net)
    return run(net, X)


def _saved(value: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **how)


def _by_safetensors(model: Any) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, f"{folder}/model.safetensors")
        return _net_of(lambda net: load_model(net, f"{folder}/model.safetensors"))


READS: dict[str, Callable[[Any], Any]] = {
    "print_the_model": repr,
    "numpy_of_a_weight": lambda m: m.up.weight.detach().numpy().tobytes(),
    "data_of_a_weight": lambda m: m.up.weight.data.sum().item(),
    "checksum_of_all": lambda m: sum(p.double().sum().item() for p in m.parameters()),
    "norm_of_all": lambda m: nn.utils.parameters_to_vector(m.parameters()).norm(),
    "count_bytes": lambda m: sum(p.untyped_storage().nbytes() for p in m.parameters()) > 0,
    "bytes_of_a_weight": lambda m: bytes(m.up.bias.untyped_storage())[:64],
    "state_dict": lambda m: {k: v.tolist() for k, v in m.state_dict().items()},
    "pickle_the_data": lambda m: pickle.loads(pickle.dumps(m.up.weight.data)).tolist(),
    "buffers": lambda m: {k: v.tolist() for k, v in m.named_buffers()},
    "call_a_part": lambda m: run(m.up, torch.ones(2, 16)),
    "parameter_of_a_weight": lambda m: nn.Parameter(m.up.weight),
    "copy_the_model": lambda m: run(copy.copy(m), X),
    "deepcopy_a_part": _copied_part,
    "deepcopy_the_state": lambda m: _net_of(
        lambda net: net.load_state_dict(copy.deepcopy(m.state_dict()))
    ),
    "save_and_load_the_state": lambda m: _net_of(
        lambda net: net.load_state_dict(_saved(m.state_dict()))
    ),
    "save_safetensors": _by_safetensors,
}
"""What changes nothing, so that one can follow another."""

for _name, _read in READS.items():
    ACTIONS.gives(_name, _read)

ACTIONS.gives(
    "save_and_load_the_model", lambda m: run(_saved(m, weights_only=False), X), deepspeed=False
)
ACTIONS.gives("pickle_the_model", lambda m: run(pickle.loads(pickle.dumps(m)), X), deepspeed=False)


@ACTIONS.add
def deepcopy_the_model(subject: Subject) -> None:
    twin = copy.deepcopy(subject.model)
    assert equal_results(twin, subject.plain, subject.x)
    with torch.no_grad():
        twin.up.weight.zero_()
    assert not equal_results(twin, subject.plain, subject.x)


@ACTIONS.add
def deepcopy_a_weight(subject: Subject) -> None:
    twin = copy.deepcopy(subject.model.up.weight)
    assert type(twin) is nn.Parameter and torch.equal(twin, subject.plain.up.weight)
    with torch.no_grad():
        twin.zero_()


# Changes of values.


def _changes(name: str, change: Callable[[Any], Any], *, needs_room: bool = False) -> None:
    """Add an action that changes both models, and the results of both."""

    def act(subject: Subject) -> None:
        if needs_room:
            subject.make_room()
        before = run(subject.plain, subject.x)
        subject.kept += subject.both(change)
        subject.same()
        assert not torch.equal(run(subject.plain, subject.x).to(before.dtype), before)

    ACTIONS[name] = act


def _without_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torch.no_grad()(change)


def _set_row(model: Any) -> None:
    model.up.weight[3] = 5.0


def _add_to_data(model: Any) -> None:
    model.up.weight.data += 0.25


def _prune(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.up, "weight", amount=0.5)


def _weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.up)
    model.up.parametrizations.weight.original0.data.mul_(2)


def _swap(model: Any) -> None:
    first, second = model.up.bias, model.blocks[1].bias
    first.data, second.data = second.data, first.data


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
_changes("swap_two_weights", _swap)
_changes(
    "load_a_state", lambda m: m.load_state_dict({k: v * 2 for k, v in Net().state_dict().items()})
)


@ACTIONS.add
def load_and_assign_a_state(subject: Subject) -> None:
    subject.both(
        lambda m: m.load_state_dict({k: v * 2 for k, v in Net().state_dict().items()}, assign=True)
    )
    subject.same()
    subject.both(lambda m: m.up.weight.data.mul_(2))


@ACTIONS.add
def write_through_data_that_is_kept(subject: Subject) -> None:
    aliases = subject.both(lambda m: m.up.weight.data)
    subject.same()
    for _ in range(2):
        for alias in aliases:
            alias.mul_(3)
        subject.same()


@ACTIONS.add
def write_into_the_tensor_that_became_data(subject: Subject) -> None:
    values = torch.ones(48, 16), torch.ones(48, 16)
    subject.model.up.weight.data, subject.plain.up.weight.data = values
    subject.same()
    values[0].mul_(2)
    if subject.engine is None:  # under ZeRO a partition takes the value, not the tensor
        values[1].mul_(2)


@ACTIONS.add
def write_through_numpy_and_refresh(subject: Subject) -> None:
    def write(model: Any) -> None:
        model.up.weight.detach().numpy()[:] *= 2

    subject.both(write)
    subject.handle.refresh()


@ACTIONS.add
def write_between_many_calls(subject: Subject) -> None:
    for step in range(6):
        name = ("up", "down")[step % 2]
        subject.both(lambda m, name=name: getattr(m, name).weight.data.mul_(1.25))  # type: ignore[misc]
        subject.same(times=1)
