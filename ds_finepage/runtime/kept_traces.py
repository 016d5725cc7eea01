"""Keeps Dynamo's traces of a module's calls in the cache folder, and serves calls by kept ones.

A file holds one trace. It is a pickle, so it is read only where no other user can write it. A file
that cannot be used costs a trace and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from ds_finepage._compat.torch import dynamo_config
from ds_finepage._compat.traces import CAN_KEEP_TRACES
from ds_finepage.capture.unguarded import has_global_hooks
from ds_finepage.errors import ConfigError
from ds_finepage.execution.disk_cache import open_folder, read_own_file, write_own_file
from ds_finepage.execution.fallback import RunningCall
from ds_finepage.planning.pipeline import collector_off
from ds_finepage.runtime.kept_taskgraphs import keep_taskgraphs

if CAN_KEEP_TRACES:
    from ds_finepage._compat.traces import (
        SerializedCode,
        _load_precompile_entry,
        _reset_precompile_entries,
        compiled,
    )
    from ds_finepage.capture.identities import digest_of, forget_classes
    from ds_finepage.capture.kept_graph import DIGEST, load_graph
    from ds_finepage.capture.traces import Trace, TraceTaker, locals_of, rebuild, with_names

logger = logging.getLogger(__name__)

MAX_TRACES = 8
"""Traces of one module that are kept; beyond, the oldest go."""

MAX_TRIES = 4
"""Calls that a kept trace may fail to serve before it is left alone."""

MAX_CALLS = 256
"""Calls after which kept traces are left alone. Each look costs a call about 0.1 ms."""

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class RunsCalls(Protocol):
    """Runs the calls of an attached module."""

    running: RunningCall


def traced_function(captured: Callable[..., Any], module: torch.nn.Module) -> Any:
    """Return the function, or the method, whose frame Dynamo traces first.

    Args:
        captured: What Dynamo compiles. It skips the call of a module itself.
        module: The module.
    """
    return module.forward if captured == module._call_impl else captured


def open_traces(
    captured: Callable[..., Any], module: torch.nn.Module, calls: RunsCalls, device: torch.device
) -> KeptTraces | None:
    """Open the kept traces of a module.

    Args:
        captured: What Dynamo compiles.
        module: The module.
        calls: Runs the calls.
        device: Where the model computes.

    Returns:
        None where traces are not kept: in other releases of torch, without a cache folder, where
        the user has Dynamo keep its own or do nothing, where several ranks run, because a graph
        may name their groups, and where hooks are called around all modules, which no guard tells.
    """
    is_off = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    if not CAN_KEEP_TRACES or dynamo_config.caching_precompile or is_off or _has_ranks():
        return None
    if has_global_hooks():
        return None
    forget_classes()
    method, folder = traced_function(captured, module), open_folder(device)
    function = getattr(method, "__func__", method)
    if not isinstance(function, FunctionType) or folder is None:
        return None
    owner = (method.__self__,) if method is not function else ()
    return KeptTraces(captured, function, owner, calls, folder / "traces" / _key(function, module))


def _has_ranks() -> bool:
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def _key(function: FunctionType, module: torch.nn.Module) -> str:
    named = (*module.named_parameters(), *module.named_buffers())
    weights = [(name, tuple(t.shape), str(t.dtype), str(t.device)) for name, t in named]
    found = (function.__module__, function.__qualname__, digest_of(function.__code__), weights)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


@dataclass
class _Waiting:
    """A trace that has served no call yet."""

    trace: Trace
    num_tries: int = 0


@dataclass(frozen=True, eq=False)
class _Served:
    """A trace in the function's code, where Dynamo finds it.

    Attributes:
        bytecode: Calls the graph.
        guards: Tell for which calls.
        backend: The global by which the bytecode calls the graph.
    """

    bytecode: CodeType
    guards: Any
    backend: str

    def install(self, code: CodeType) -> None:
        _load_precompile_entry(code, self.guards, self.bytecode)


_numbers = count()

_installed: dict[CodeType, list[_Served]] = {}
"""The traces in the code of functions. Models of one class share a function."""


@dataclass(eq=False)
class KeptTraces:
    """The kept traces of one module's calls.

    Attributes:
        captured: What Dynamo compiles.
        function: The function whose frame it traces first.
        owner: Its first argument if it is a method.
        calls: Runs the calls.
        folder: Holds the files.
    """

    captured: Callable[..., Any]
    function: FunctionType
    owner: tuple[Any, ...]
    calls: RunsCalls
    folder: Path
    _backend: Backend | None = None
    _waiting: list[_Waiting] = field(default_factory=list)
    _serving: list[_Served] = field(default_factory=list)
    _num_calls: int = 0

    def __post_init__(self) -> None:
        """Read the files."""
        self._waiting = [_Waiting(trace) for trace in map(_read, _files_in(self.folder)) if trace]

    def compile(self, backend: Backend, wrap: Callable[[Backend], Backend]) -> Callable[..., Any]:
        """Return what Dynamo compiles, so that new traces are kept.

        Args:
            backend: Runs graphs; those of kept traces too.
            wrap: Wraps the backend of new traces.
        """
        self._backend = _keeping_taskgraphs(backend, self.folder)
        taker = TraceTaker(self.function, partial(_keep, self.folder))
        return compiled(self.captured, wrap(taker.wrap_backend(self._backend)), taker)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled call that looks for a kept trace first."""

        def prepared(*args: Any, **kwargs: Any) -> Any:
            locals_ = self._unserved(args, kwargs) if self._waiting else None
            if locals_ is None:
                return call(*args, **kwargs)
            with collector_off():
                self._prepare(locals_)
                return call(*args, **kwargs)

        return prepared

    def _unserved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the local variables with which a call begins; None if a kept trace serves it."""
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            self._waiting.clear()
            return None
        try:
            found = locals_of(self.function, (*self.owner, *args), kwargs)
        except TypeError:
            return None  # the call raises the same
        return None if any(s.guards.check(found) for s in self._serving) else found

    def _prepare(self, locals_: dict[str, Any]) -> None:
        """Let the kept trace of a call serve it, if there is one."""
        for waiting in list(self._waiting):
            waiting.num_tries += 1
            is_served = self._try(waiting.trace, locals_)
            if is_served or waiting.num_tries >= MAX_TRIES:
                self._waiting.remove(waiting)
            if is_served:
                return

    def _try(self, trace: Trace, locals_: dict[str, Any]) -> bool:
        """Serve a call by a trace; tell whether that is possible."""
        try:
            guards = rebuild(trace, self.function, locals_)
            if guards is not None:
                self._serve(trace, guards)
        # Whatever Dynamo's own structures raise that were written in another process.
        except Exception as error:
            logger.debug("a kept trace cannot be used: %s", error)
            return False
        return guards is not None

    def _serve(self, trace: Trace, guards: Any) -> None:
        assert self._backend is not None, "traces serve what is compiled"
        module = load_graph(trace.graph)
        calls = weakref.ref(self.calls)
        guards.root.add_lambda_guard(partial(_is_running, calls), ["a call of ds_finepage"], None)
        # Two models of one class may be served by one trace, each by graphs of its own.
        backend = f"{trace.backend}_{next(_numbers)}"
        run = torch.compiler.disable(_KeptGraph(self._backend, module).run)
        self.function.__globals__[backend] = run
        code = SerializedCode.to_code_object(trace.code)
        served = _Served(with_names(code, {trace.backend: backend}), guards, backend)
        served.install(self.function.__code__)
        self._serving.append(served)
        _installed.setdefault(self.function.__code__, []).append(served)
        # A model may be forgotten while it is attached.
        weakref.finalize(self.calls, _take_out, self.function, served).atexit = False

    def remove(self) -> None:
        """Take the traces out of the function's code."""
        for served in self._serving:
            _take_out(self.function, served)
        self._serving = []


def _keeping_taskgraphs(backend: Backend, folder: Path) -> Backend:
    """Return a backend whose graphs have their taskgraphs in a folder; Dynamo keeps it for long."""

    def keeping(module: GraphModule, example_args: Sequence[Any]) -> Callable[..., Any]:
        if DIGEST in module.meta:
            keep_taskgraphs(module, folder, module.meta[DIGEST])
        return backend(module, example_args)

    return keeping


def _take_out(function: FunctionType, served: _Served) -> None:
    """Take a trace out of a function's code, if it is there, and leave the others in."""
    code = function.__code__
    others = _installed.get(code, [])
    if served not in others:
        return
    others.remove(served)
    _reset_precompile_entries(code)
    for other in others:
        other.install(code)
    if not others:
        del _installed[code]
    function.__globals__.pop(served.backend, None)


class _KeptGraph:
    """Runs a graph that was read from a file."""

    def __init__(self, backend: Backend, module: GraphModule) -> None:
        self._backend, self._module = backend, module
        self._run: Callable[..., Any] | None = None

    def run(self, *args: Any) -> Any:
        """Run it; the first arguments tell which of them are weights."""
        if self._run is None:
            self._run = self._backend(self._module, args)
        return self._run(*args)


def _is_running(calls: weakref.ref[RunsCalls], _: object) -> bool:
    """Tell whether a call of the attached model runs in this thread; else nothing may be served."""
    found = calls()
    return found is not None and found.running.thread == get_ident()


def _files_in(folder: Path) -> list[Path]:
    """List the kept traces, the newest first."""
    return sorted(folder.glob("*.pickle"), key=_age)


def _keep(folder: Path, trace: Trace) -> None:
    """Write a new trace; the oldest one may go."""
    path = folder / f"{hashlib.sha256(trace.guards).hexdigest()[:16]}.pickle"
    try:
        write_own_file(path, pickle.dumps(trace))
        for old in _files_in(folder)[MAX_TRACES:]:
            old.unlink(missing_ok=True)
    except (ConfigError, OSError) as error:
        logger.warning("a trace cannot be kept: %s", error)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def _read(path: Path) -> Trace | None:
    """Read a trace; None where the file is not one, or may be another user's."""
    try:
        content = read_own_file(path)
        if content is None:
            return None
        trace = pickle.loads(content)
    # A pickle that is damaged, or of other code, raises anything.
    except Exception as error:
        logger.warning("%s cannot be used: %s", path, error)
        return None
    return trace if isinstance(trace, Trace) and trace.is_of_these_files() else None
