"""One recording for a range of sizes: when it holds, and for which sizes its calls are planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._C._functorch import get_dynamic_layer_stack_depth

from ds_finepage.capture import recording
from ds_finepage.capture.recorder import Recorder
from ds_finepage.capture.recording import (
    Recordings,
    SymbolicSizes,
    qualified_name,
    record,
    upper_end,
)
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import TaskGraph
from tests.unit.capture.replay import by_dynamo, traced


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].model.layers.0.mlp", "model.layers.0.mlp"),
        ("L['self']._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        ("L['self'][0].linear", "0.linear"),
        ("L['args'][0]", ""),
        ("L['args'][0].model.layers.0.mlp", "model.layers.0.mlp"),
        ("L['args'][0].__dict__['model'].__dict__['norm']", "model.norm"),
    ],
)
def test_a_module_has_its_qualified_name(path: str, name: str) -> None:
    assert qualified_name(path) == name


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({}, {}),
        ({"a": 1}, {"a": 1}),
        ({"a": 5}, {"a": 16}),
        ({"a": 64}, {"a": 64}),
        ({"a": 65}, {"a": 128}),
        ({"cache": 70, "mask": 71}, {"cache": 127, "mask": 128}),
        ({"cache": 70, "mask": 72}, {"cache": 126, "mask": 128}),
        ({"cache": 70, "mask": 73}, {"cache": 128, "mask": 128}),
        ({"batch": 8, "cache": 70}, {"batch": 8, "cache": 128}),
        ({"batch": 9, "cache": 70}, {"batch": 16, "cache": 128}),
        ({"batch": 3, "cache": 70}, {"batch": 3, "cache": 128}),
        ({"window": 15, "cache": 70}, {"window": 16, "cache": 128}),
        ({"cache": 9, "encoder": 200}, {"cache": 16, "encoder": 256}),
    ],
)
def test_sizes_are_rounded_up_by_kind(given: dict[str, int], planned: dict[str, int]) -> None:
    assert upper_end(given) == planned
    assert all(planned[name] >= size for name, size in given.items())


def test_a_growing_cache_needs_a_plan_for_each_doubling() -> None:
    planned = {tuple(upper_end({"a": n, "b": n, "mask": n + 1}).values()) for n in range(1, 1024)}
    assert len(planned) <= 8


def test_a_recording_holds_where_all_that_it_took_for_granted_does() -> None:
    sizes = SymbolicSizes([], [])
    rows, batch = sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True)
    assert not sizes
    assert sizes.admits({"s0": 0, "s1": 0})  # nothing was
    taken = (sympy.Gt(rows, 4), sympy.Eq(rows, 2 * batch))
    sizes.env.guards[:] = [SimpleNamespace(expr=guard) for guard in taken]
    assert sizes.admits({"s0": 6, "s1": 3})
    assert not sizes.admits({"s0": 6, "s1": 4})
    assert not sizes.admits({"s0": 4, "s1": 2})
    assert sizes.admits({"s0": 6, "s1": 3})


def as_torch_says(*_: Any) -> None:
    """Know nothing of the strides of results."""


def test_calls_of_one_bucket_share_a_recording_and_its_sizes() -> None:
    given = [(torch.randn(n, 4),) for n in (30, 20, 200)]
    runs = by_dynamo(lambda x: x * 2, *given, dynamic=True)
    graph = runs[0][0]
    recordings = Recordings(graph)
    small, other, large = (recordings.bucket_of(args, as_torch_says) for _, args in runs)
    assert small is not None and other is not None and large is not None
    assert (small.is_new, other.is_new, large.is_new) == (True, False, False)
    assert small.key == other.key != large.key
    assert small.recording is other.recording is large.recording
    assert small.recording.at(small.sizes).buffers[-1].nbytes == 32 * 4 * 4
    assert large.recording.at(large.sizes).buffers[-1].nbytes == 256 * 4 * 4


def test_a_call_grows_until_it_has_no_room_or_needs_another_plan() -> None:
    given = [(torch.randn(n), torch.randn(n + 1), torch.randn(9)) for n in (20, 21)]
    (graph, args), *_ = by_dynamo(lambda *rows: [r * 2 for r in rows], *given, dynamic=True)
    bucket = Recordings(graph).bucket_of(args, as_torch_says)
    assert bucket is not None
    recording, values = bucket.recording, bucket.values

    def rows(sizes: Mapping[str, int]) -> list[int]:
        return [b.nbytes // 4 for b in recording.at(sizes).buffers[:3]]

    def has_room(found: TaskGraph) -> bool:
        asked.append(found.buffers[0].nbytes // 4)
        return asked[-1] <= 25

    asked: list[int] = []
    assert rows(bucket.sizes) == [31, 32, 16]
    assert recording.room_to_grow(values, has_room) == 5
    assert len(asked) <= 4
    longest = bucket.for_sizes(recording.grown(values, 5))
    assert rows(longest.sizes) == [25, 26, 14]  # all rows grow, as far as their plan may be
    assert longest.key != bucket.key
    assert longest.holds(recording.grown(values, 4)) and longest.holds(longest.sizes)
    assert not longest.holds(recording.grown(values, 6))
    assert recording.room_to_grow(values, lambda _: True) == 11
    assert recording.room_to_grow(values, lambda _: False) == 0


def test_a_bucket_has_room_for_a_smaller_one_that_is_alike() -> None:
    given = [(torch.randn(n), torch.randn(n + 1)) for n in (20, 21)]
    (graph, args), *_ = by_dynamo(lambda *rows: [r * 2 for r in rows], *given, dynamic=True)
    bucket = Recordings(graph).bucket_of(args, as_torch_says)
    assert bucket is not None
    twice = {name: 2 * size for name, size in bucket.sizes.items()}
    assert bucket.has_room_for(bucket) and bucket.for_sizes(twice).has_room_for(bucket)
    assert not bucket.for_sizes({n: s + 1 for n, s in twice.items()}).has_room_for(bucket)
    few = bucket.for_sizes(dict.fromkeys(bucket.sizes, 16))
    one = dict.fromkeys(bucket.sizes, 1)
    assert few.has_room_for(replace(bucket.for_sizes(one), values=one))
    assert not bucket.has_room_for(replace(bucket, values=twice))
    assert not bucket.has_room_for(replace(bucket, key=(*bucket.key[:2], ("other",))))
    assert not bucket.has_room_for(replace(bucket, recording=replace(bucket.recording)))


def test_a_graph_of_fixed_sizes_has_no_bucket() -> None:
    x = torch.randn(3)
    recordings = Recordings(traced(lambda x: x.neg(), x))
    assert recordings.bucket_of((x,), as_torch_says) is None
    assert recordings._is_of_one_size


def by_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.sin)(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


def by_numbers(x: torch.Tensor) -> torch.Tensor:
    return x * 1j


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_cond, "graph calls cond, a higher-order op, which no plan can run"),
        (by_numbers, "argument of type complex cannot be written down"),
    ],
)
def test_a_graph_without_a_plan_says_why_in_one_line(
    function: Callable[..., Any], message: str
) -> None:
    ((graph, args),) = by_dynamo(function, (torch.ones(3),))
    with pytest.raises(CaptureError) as caught:
        record(graph, args)
    assert str(caught.value) == message


def test_a_capture_that_fails_ends_its_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise CaptureError("no")

    ((graph, args),) = by_dynamo(torch.vmap(torch.sin), (torch.ones(3, 2),))
    monkeypatch.setattr(Recorder, "_encode", refuse)
    with pytest.raises(CaptureError):
        record(graph, args)
    assert get_dynamic_layer_stack_depth() == 0


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_says_nothing_about_the_graph(
    kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture error would keep the graph without a plan in all later calls."""
    x = torch.randn(3)
    graph = traced(lambda x: x.neg(), x)

    def fail(*_: Any) -> None:
        raise kind("no room")

    with monkeypatch.context() as patch:
        patch.setattr(recording._Labeller, "run", fail)
        with pytest.raises(kind, match="no room"):
            recording.record(graph, (x,))
    assert recording.record(graph, (x,)).tasks


def write(room: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    num_rows = rows.shape[0] + new.shape[0]
    if num_rows >= room.shape[0]:
        return new * 2
    room.narrow(0, rows.shape[0], new.shape[0]).copy_(new)
    return room.narrow(0, 0, num_rows) * 2


def test_a_call_that_fills_its_room_is_planned_for_what_it_has() -> None:
    """A plan is for some more new rows; behind as many as that leaves, a call has its own plan."""
    given = [
        (torch.zeros(64, 4), torch.zeros(n, 0), torch.ones(num_new, 4))
        for n, num_new in ((20, 2), (30, 3), (60, 3), (20, 2))
    ]
    runs = by_dynamo(write, *given, dynamic=True)
    recordings = Recordings(runs[0][0])
    for _, args in runs:
        bucket = recordings.bucket_of(args, as_torch_says)
        assert bucket is not None and bucket.holds(bucket.values)


def test_rows_are_planned_for_as_many_as_their_room_has() -> None:
    """Calls that write behind the rows need one plan for a room, whatever the rows so far."""
    given = [
        (torch.zeros(capacity, 4), torch.zeros(n, 0), torch.ones(1, 4))
        for n, capacity in ((20, 43), (30, 44), (41, 43), (1000, 1024))
    ]
    runs = by_dynamo(write, *given, dynamic=True)
    recordings = Recordings(runs[0][0])
    buckets = [recordings.bucket_of(args, as_torch_says) for _, args in runs]
    sizes = []
    for bucket in buckets:
        assert bucket is not None and bucket.recording.admits(bucket.sizes)
        sizes.append(sorted(bucket.sizes.values()))
    assert sizes == [[4, 63, 64], [4, 63, 64], [4, 63, 64], [4, 1023, 1024]]
