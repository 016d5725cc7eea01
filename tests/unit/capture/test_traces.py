"""What is taken of a trace of Dynamo, and what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from ds_finepage._compat.traces import CAN_KEEP_TRACES

if not CAN_KEEP_TRACES:
    pytest.skip("traces are kept in other releases of torch", allow_module_level=True)

from ds_finepage._compat.traces import SerializedCode
from ds_finepage.capture import traces
from ds_finepage.capture.identities import NotKeptError
from ds_finepage.capture.traces import Trace, TraceTaker, locals_of, with_names


def forward(x: int) -> int:
    return x


def other(x: int) -> int:
    return -x


Says = Callable[[TraceTaker], None]


def nothing(taker: TraceTaker) -> None:
    pass


def graph(taker: TraceTaker) -> None:
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    run = taker.wrap_backend(lambda module, args: (module, args))
    assert run(module, [1]) == (module, [1])


def backend(taker: TraceTaker) -> None:
    taker.add_backend_id("__compiled_fn_1", None)


def taken(*says: Says, code: CodeType = forward.__code__) -> list[Trace]:
    """Return the traces that are taken where Dynamo says this of a frame."""
    found: list[Trace] = []
    taker = TraceTaker(forward, found.append)
    with taker.code_context(code):
        for say in says:
            say(taker)
        taker.add_guarded_code(b"guards", other.__code__)
        taker.add_inlined_source([forward.__code__, other.__code__])
    return found


def test_a_trace_is_taken_whole() -> None:
    (trace,) = taken(graph, backend)
    assert trace.guards == b"guards" and trace.backend == "__compiled_fn_1" and trace.graph
    assert SerializedCode.to_code_object(trace.code).co_code == other.__code__.co_code
    assert list(trace.files) == [__file__] and trace.is_of_these_files()
    assert trace.named == {}


@pytest.mark.parametrize(
    "says",
    [
        (),
        (graph,),
        (backend,),
        (graph, graph, backend),
        (graph, backend, lambda taker: taker.bypass_current_entry()),
        (graph, backend, lambda taker: taker.add_resume_function(None, "", "")),
    ],
)
def test_a_trace_in_parts_is_refused(
    says: tuple[Says, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="ds_finepage"):
        assert taken(*says) == []
    assert "a trace of forward is not kept" in caplog.text


def test_other_frames_are_left_alone() -> None:
    assert taken(graph, backend, code=other.__code__) == []


def test_an_error_ends_the_draft() -> None:
    found: list[Trace] = []
    taker = TraceTaker(forward, found.append)
    theirs = traces.CheckFunctionManager.serialize_guards
    with pytest.raises(ValueError, match="Dynamo"), taker.code_context(forward.__code__):
        assert traces.CheckFunctionManager.serialize_guards != theirs
        raise ValueError("Dynamo fails")
    assert traces.CheckFunctionManager.serialize_guards is theirs
    graph(taker)  # outside any frame
    assert found == []


def test_guards_that_cannot_be_kept_refuse_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bytes:
        raise TypeError("cannot pickle it")

    monkeypatch.setattr(traces, "dump_guards", fails)
    assert taken(graph, backend, lambda taker: taker._dump_guards(None, [], None)) == []  # type: ignore[func-returns-value, arg-type, list-item]


def test_local_variables_are_those_of_the_code() -> None:
    cell = 3

    def function(a: int, *more: int, b: int = 2, **rest: int) -> int:
        return a + b + cell

    function.__signature__ = "of another"  # type: ignore[attr-defined]
    found = locals_of(function, (1, 5), {"c": 4})
    assert found == {"a": 1, "more": (5,), "b": 2, "rest": {"c": 4}, "cell": 3}
    with pytest.raises(TypeError):
        locals_of(function, (), {})


def test_bytecode_takes_other_globals() -> None:
    names: dict[str, Any] = {"one": 1, "two": 2}
    exec("def f(): return one\ndef g(): return (lambda: one)()", names)
    for name in ("f", "g"):
        names[name].__code__ = with_names(names[name].__code__, {"one": "two"})
        assert names[name]() == 2


def test_names_of_dynamo_are_told_from_others() -> None:
    address = "___module_math_140001112223334_c0"
    names: dict[str, Any] = {
        address: math,
        "__import_torch": torch,
        "__builtins_dict___0": {},
        "__compiled_fn_1_ab": print,
        "__name__": "here",
        "plain": object(),
    }
    text = f"def f(): return ({address}, __import_torch, __builtins_dict___0, __compiled_fn_1_ab, "
    exec(text + "__name__, plain, __other)", names)
    found = traces._names_in(names["f"].__code__, names)
    assert found == {address: ("module", "math"), "__import_torch": ("module", "torch")}
    names["__import_torch"] = object()
    with pytest.raises(NotKeptError):
        traces._names_in(names["f"].__code__, names)


def test_files_that_are_gone_or_changed_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("x = 1")
    files = {str(path): traces._digest_of_file(str(path))}
    trace = Trace(b"", None, {}, "", b"", files)
    assert trace.is_of_these_files()
    path.write_text("x = 2")
    assert not trace.is_of_these_files()
    path.unlink()
    assert not trace.is_of_these_files()
    assert traces._belongs_to_release(torch.nn.functional.__file__ or "")
    assert traces._belongs_to_release("<string>")
    assert not traces._belongs_to_release("<ipython-input-1>")
    assert not traces._belongs_to_release(__file__)


def test_the_names_that_guards_have_of_python_are_made_once() -> None:
    class State:
        name_of_builtins_dict_key_in_fglobals: str | None = None

    state, globals_ = State(), {"__builtins__": {"len": len}}
    assert traces._install_builtins(state, globals_) and list(globals_) == ["__builtins__"]
    number = int(traces.unique_id("").rpartition("_")[2])
    state.name_of_builtins_dict_key_in_fglobals = f"__builtins_dict___{number + 3}"
    assert traces._install_builtins(state, globals_)
    assert globals_[f"__builtins_dict___{number + 3}"] == {"len": len}
    assert int(traces.unique_id("").rpartition("_")[2]) == number + 4
    assert traces._install_builtins(state, globals_)
    globals_[f"__builtins_dict___{number + 3}"] = {}
    assert not traces._install_builtins(state, globals_)
    state.name_of_builtins_dict_key_in_fglobals = "another"
    assert not traces._install_builtins(state, globals_)


def test_a_name_that_is_taken_is_left_alone() -> None:
    trace = Trace(b"", None, {"__import_torch": ("module", "torch")}, "", b"", {})
    assert traces._install_named(trace, {"__import_torch": torch})
    assert not traces._install_named(trace, {"__import_torch": math})
    globals_: dict[str, Any] = {}
    assert traces._install_named(trace, globals_) and globals_ == {"__import_torch": torch}


def test_a_global_has_to_be_where_it_says() -> None:
    assert traces._name(torch) == ("module", "torch")
    assert traces._name(torch.nn.Linear) == ("object", "torch.nn.modules.linear", "Linear")
    assert traces._resolve(traces._name(Path.glob)) is Path.glob
    with pytest.raises(NotKeptError, match="is not found in"):
        traces._name(lambda: None)
