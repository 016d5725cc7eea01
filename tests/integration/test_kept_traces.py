"""Traces that an earlier process has kept: the same results, and Dynamo traces nothing."""

from __future__ import annotations

import gc
import importlib
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import _debug_get_precompile_entries
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.utils import counters

from ds_finepage._compat.torch import dynamo_config
from ds_finepage._compat.traces import CAN_KEEP_TRACES
from ds_finepage.api import attach
from tests.integration.families import make_model, token_ids

if not CAN_KEEP_TRACES:
    pytest.skip("traces are kept in other releases of torch", allow_module_level=True)

from ds_finepage.runtime import kept_taskgraphs, kept_traces

SERIALIZE_GUARDS = CheckFunctionManager.serialize_guards

SOURCE = """
import torch

def scale(x):
    return x * 2

class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 3
        self.weight = torch.nn.Parameter(torch.full((64, 64), 0.01))

    def forward(self, x):
        return scale(x @ self.weight) * self.factor

class Outer(torch.nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.parts = torch.nn.ModuleList(Inner() for _ in range(count))

    def forward(self, x, *, shift=0.0):
        for part in self.parts:
            x = part(x).tanh()
        return x + shift
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, which is no longer used when the test ends."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DS_FINEPAGE_CACHE", str(folder))
    torch.compiler.reset()
    yield folder
    gc.collect()
    assert kept_traces._installed == {}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that a user might have written."""
    (tmp_path / "users_model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return importlib.import_module("users_model")


def files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.pickle"))


def num_traced(run: Callable[[], object]) -> int:
    """Return how many frames Dynamo traces, as if in a process of its own."""
    torch.compiler.reset()
    counters.clear()
    run()
    return counters["frames"]["ok"]


def planned(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Callable[[], None]:
    """Return what attaches a model, calls it, and compares the result."""

    def run() -> None:
        with torch.no_grad():
            expected = model(*args, **kwargs)
            handle = attach(model, device_budget="256KiB", device="cpu")
            try:
                assert torch.equal(model(*args, **kwargs), expected)
            finally:
                handle.detach()

    return run


def test_a_second_process_traces_nothing(source: Any, cache: Path) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    (kept,) = files(cache)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert num_traced(run) == 0
    assert files(cache) == [kept]
    assert not [name for name in vars(source) if name.startswith("__compiled_fn")]
    assert not _debug_get_precompile_entries(source.Outer.forward.__code__)
    assert CheckFunctionManager.serialize_guards is SERIALIZE_GUARDS


def test_a_second_process_records_nothing(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    monkeypatch.setattr(kept_taskgraphs, "record", None)
    assert num_traced(run) == 0


def test_another_process_traces_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "users_model.py").write_text(SOURCE)
    program = (
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "from ds_finepage.api import attach\n"
        "from users_model import Outer\n"
        "model, x = Outer(), torch.ones(2, 64)\n"
        "with torch.no_grad():\n"
        "    expected = model(x)\n"
        "    attach(model, device_budget='256KiB', device='cpu')\n"
        "    assert torch.equal(model(x), expected)\n"
        "print('traced', counters['frames']['ok'])\n"
    )
    for number in (1, 0):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True
        )
        assert done.stdout.decode().split()[-2:] == ["traced", str(number)]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_growing_cache_needs_no_trace(family: str, cache: Path) -> None:
    model = make_model(family, torch.float32)
    settings = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}

    def run() -> None:
        expected = model.generate(token_ids(5), **settings)
        handle = attach(model, device_budget="80%weights", device="cpu")
        try:
            for _ in range(2):
                assert torch.equal(model.generate(token_ids(5), **settings), expected)
        finally:
            handle.detach()

    assert num_traced(run) == len(files(cache)) == 2
    assert num_traced(run) == 0


def other_constant(source: Any, model: Any) -> None:
    model.parts[2].factor = 4


def other_method(source: Any, model: Any) -> None:
    source.Inner.forward = lambda self, x: x @ self.weight


def other_function(source: Any, model: Any) -> None:
    source.scale = lambda x: x * 5


def other_class(source: Any, model: Any) -> None:
    class Odd(source.Inner):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x @ self.weight

    model.parts[1].__class__ = Odd


def method_of_one(source: Any, model: Any) -> None:
    part = model.parts[3]
    part.forward = types.MethodType(lambda self, x: x @ self.weight + 1, part)


def hook_of_one(source: Any, model: Any) -> None:
    model.parts[0].register_forward_hook(lambda module, args, output: output + 1)


def other_source(source: Any, model: Any) -> None:
    Path(source.__file__).write_text(SOURCE + "\n# Written again\n")


def without_source(source: Any, model: Any) -> None:
    Path(source.__file__).unlink()


CHANGES = (
    other_constant,
    other_method,
    other_function,
    other_class,
    method_of_one,
    hook_of_one,
    other_source,
    without_source,
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_traced_again(
    change: Callable[[Any, Any], None], source: Any, cache: Path
) -> None:
    model = source.Outer()
    run = planned(model, torch.ones(2, 64))
    assert num_traced(run) == 1
    from ds_finepage.capture import identities

    identities._methods_of.cache_clear()
    change(source, model)
    assert num_traced(run) >= 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(3, 64),), {}),
        ((torch.ones(2, 64),), {"shift": 1.0}),
        ((torch.ones(2, 64, requires_grad=True),), {}),
        ((torch.ones(64, 2).t(),), {}),
    ],
)
def test_another_call_is_traced_again(args: Any, kwargs: Any, source: Any) -> None:
    model = source.Outer()
    assert num_traced(planned(model, torch.ones(2, 64))) == 1
    assert num_traced(planned(model, *args, **kwargs)) == 1


def test_another_state_of_torch_is_traced_again(source: Any) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert num_traced(run) == 1


@pytest.mark.parametrize(("most", "number"), [(3, 1), (2, 2)])
def test_a_trace_waits_for_its_call(
    most: int, number: int, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_traces, "MAX_TRIES", most)
    model = source.Outer()
    assert num_traced(planned(model, torch.ones(2, 64))) == 1

    def two_others_first() -> None:
        handle = attach(model, device_budget="256KiB", device="cpu")
        with torch.no_grad():
            for shift in (1.0, 1.0, 0.0):
                model(torch.ones(2, 64), shift=shift)
        handle.detach()

    assert num_traced(two_others_first) == number


def test_after_many_calls_no_trace_is_looked_for(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_traces, "MAX_CALLS", 2)
    model = source.Outer()
    for shift in (0.0, 1.0):
        assert num_traced(planned(model, torch.ones(2, 64), shift=shift)) == 1

    def then(num_calls: int) -> int:
        def run() -> None:
            handle = attach(model, device_budget="256KiB", device="cpu")
            with torch.no_grad():
                for shift in (*[0.0] * num_calls, 1.0):
                    model(torch.ones(2, 64), shift=shift)
            handle.detach()

        return num_traced(run)

    assert (then(1), then(2)) == (0, 1)


def test_the_collector_is_off_while_a_trace_is_looked_for(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    rebuild, seen = kept_traces.rebuild, []

    def noting(*args: Any) -> Any:
        seen.append(gc.isenabled())
        return rebuild(*args)

    monkeypatch.setattr(kept_traces, "rebuild", noting)
    assert num_traced(run) == 0
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        assert num_traced(run) == 0
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_two_models_of_one_class_use_their_own_weights(source: Any) -> None:
    x = torch.ones(2, 64)
    assert num_traced(planned(source.Outer(), x)) == 1
    one, other = source.Outer(), source.Outer()
    torch.nn.init.constant_(other.parts[3].weight, 0.02)
    wanted = [one(x), other(x)]
    assert not torch.equal(*wanted)

    def run() -> None:
        handles = [attach(m, device_budget="256KiB", device="cpu") for m in (one, other)]
        with torch.no_grad():
            for _ in range(2):
                assert all(map(torch.equal, (one(x), other(x)), wanted))
            handles[0].detach()
            for _ in range(2):
                assert all(map(torch.equal, (one(x), other(x)), wanted))
        assert handles[0].stats.num_captures == handles[1].stats.num_captures == 1
        handles[1].detach()

    assert num_traced(run) == 0


def test_a_call_of_nobody_is_served_by_nobody(source: Any) -> None:
    x = torch.ones(2, 64)
    assert num_traced(planned(source.Outer(), x)) == 1
    torch.compiler.reset()
    counters.clear()
    plain, model = source.Outer(), source.Outer()
    handle = attach(model, device_budget="256KiB", device="cpu")
    with torch.no_grad():
        model(x)
        assert counters["frames"]["ok"] == 0
        compiled = torch.compile(plain, backend="eager")
        assert torch.equal(compiled(x), plain(x))
    assert counters["frames"]["ok"] == 1
    handle.detach()


def test_a_forgotten_model_leaves_nothing(source: Any) -> None:
    x = torch.ones(2, 64)
    assert num_traced(planned(source.Outer(), x)) == 1
    torch.compiler.reset()
    model = source.Outer()
    attach(model, device_budget="256KiB", device="cpu")
    with torch.no_grad():
        model(x)
    assert sum(map(len, kept_traces._installed.values())) == 1
    del model  # the fixture looks


def breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


def test_graphs_in_parts_are_not_kept(source: Any, cache: Path) -> None:
    source.scale = breaks
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == num_traced(run) >= 1
    assert not files(cache)


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04N."])
def test_a_damaged_file_costs_a_trace(
    content: bytes, source: Any, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    (kept,) = files(cache)
    kept.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert num_traced(run) == 1
    assert (str(kept) in caplog.text) == (content != b"\x80\x04N.")  # that is a pickle of None


def test_a_file_that_others_can_write_is_not_read(
    source: Any, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1
    files(cache)[0].chmod(0o620)
    with caplog.at_level(logging.WARNING):
        assert num_traced(run) == 1
    assert "is not read: others can write it" in caplog.text


@pytest.mark.parametrize("name", ["rebuild", "load_graph"])
@pytest.mark.parametrize("most", [1, 4])
def test_a_trace_that_cannot_be_used_costs_a_trace(
    name: str, most: int, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))
    assert num_traced(run) == 1

    def fails(*_: Any) -> None:
        raise RuntimeError("torch has changed")

    monkeypatch.setattr(kept_traces, name, fails)
    monkeypatch.setattr(kept_traces, "MAX_TRIES", most)
    assert num_traced(run) == 1


def test_a_trace_for_other_sizes_stays_out_of_the_code(source: Any) -> None:
    model = source.Outer()
    assert num_traced(planned(model, torch.ones(2, 64))) == 1
    handle = attach(model, device_budget="256KiB", device="cpu")
    with torch.no_grad():
        model(torch.ones(3, 64))
        assert not any(kept_traces._installed.values())
        model(torch.ones(2, 64))
        assert sum(map(len, kept_traces._installed.values())) == 1
    handle.detach()


def test_only_the_newest_traces_are_kept(
    source: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_traces, "MAX_TRACES", 2)
    model = source.Outer()
    for shift in (0.0, 1.0, 2.0):
        assert num_traced(planned(model, torch.ones(2, 64), shift=shift)) == 1
    assert len(files(cache)) == 2
    assert num_traced(planned(model, torch.ones(2, 64), shift=2.0)) == 0


def test_a_folder_that_cannot_be_written_costs_a_trace(
    source: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(kept_traces, "write_own_file", fails)
    run = planned(source.Outer(), torch.ones(2, 64))
    with caplog.at_level(logging.WARNING):
        assert num_traced(run) == num_traced(run) == 1
    assert "a trace cannot be kept: no space left" in caplog.text


def test_where_traces_are_not_kept(
    source: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(source.Outer(), torch.ones(2, 64))

    def is_kept() -> bool:
        num_traced(run)
        return bool(files(cache))

    with monkeypatch.context() as patch:
        patch.setenv("DS_FINEPAGE_CACHE", "0")
        assert not is_kept()
    with monkeypatch.context() as patch:
        patch.setattr(kept_traces, "_has_ranks", lambda: True)
        assert not is_kept()
    with monkeypatch.context() as patch:
        patch.setattr(kept_traces, "CAN_KEEP_TRACES", False)
        assert not is_kept()
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        assert kept_traces.open_traces(*[None] * 4) is None  # type: ignore[arg-type]
    with dynamo_config.patch(caching_precompile=True):
        assert kept_traces.open_traces(*[None] * 4) is None  # type: ignore[arg-type]
    assert is_kept()


def test_another_weight_has_other_traces(source: Any, cache: Path) -> None:
    assert num_traced(planned(source.Outer(3), torch.ones(2, 64))) == 1
    assert num_traced(planned(source.Outer(4), torch.ones(2, 64))) == 1
    assert len({path.parent for path in files(cache)}) == 2


def test_names_of_dynamo_do_not_get_into_the_way(source: Any, cache: Path) -> None:
    """A new trace beside a kept one makes names of its own."""
    model = source.Outer()
    assert num_traced(planned(model, torch.ones(2, 64))) == 1
    torch.compiler.reset()
    counters.clear()
    handle = attach(model, device_budget="256KiB", device="cpu")
    with torch.no_grad():
        model(torch.ones(2, 64))
        assert counters["frames"]["ok"] == 0
        model(torch.ones(2, 64), shift=1.0)
        assert counters["frames"]["ok"] == 1
    handle.detach()
    assert handle.stats.unplanned_reasons == ()
