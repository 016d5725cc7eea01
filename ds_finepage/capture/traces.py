"""Takes what Dynamo traces out of a process, and makes another process use it.

Dynamo turns a function into a graph, bytecode that calls the graph, and guards that say for which
calls. All of it follows from the model, so a second process could do without: tracing is most of a
first call. torch has a package for that (``torch._dynamo.package``). It leaves out guards on
functions and modules, because it knows them by their addresses, and it writes down the model's
values for the others.

[Note: guards are made again]
Here a trace keeps, for each guard, where its value is found and its identity. A process that
has such a call looks at its own values first. If each has that identity, Dynamo makes its guards
of them as after tracing, with the addresses of this process. So no guard is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

from ds_finepage._compat.torch import tree_map
from ds_finepage._compat.traces import (
    CheckFunctionManager,
    GuardsSet,
    GuardsState,
    OrderedSet,
    OutputGraphCommon,
    SerializedCode,
    convert_int_to_concrete_values,
    get_builtins_dict,
    unique_id,
)
from ds_finepage.capture.identities import (
    OF_THE_STATE,
    NotKeptError,
    identity_for,
    identity_of,
)
from ds_finepage.capture.kept_graph import dump_graph

logger = logging.getLogger(__name__)

_TORCH = Path(torch.__file__).parent
_MADE = re.compile(r"__\w*(?<!__)")
_BACKEND = re.compile("__compiled_fn_.*")
_BUILTINS = re.compile(r"__builtins_dict___(\d+)")
_ADDRESS = re.compile(r"_\d{6,}_c\d+")
_OWN_PREFIX = "__ds_finepage_"

Named = tuple[str, ...]
"""A global that Dynamo made: ``("module", name)``, or ``("object", module, qualified name)``."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """All that Dynamo made of one function for some calls.

    Attributes:
        guards: What :func:`rebuild` makes the guards of.
        code: The bytecode, in a form that can be pickled.
        named: The globals that the bytecode needs, by name.
        backend: The global that the bytecode calls: what runs the graph.
        graph: The graph.
        files: The source files that were traced, and their hashes.
    """

    guards: bytes
    code: Any
    named: Mapping[str, Named]
    backend: str
    graph: bytes
    files: Mapping[str, str]

    def is_of_these_files(self) -> bool:
        """Tell whether the traced source files are as they were."""
        try:
            return all(_digest_of_file(path) == digest for path, digest in self.files.items())
        except OSError:
            return False


@dataclasses.dataclass
class _Draft:
    """A trace in the making."""

    refusal: str | None = None
    graphs: list[bytes] = dataclasses.field(default_factory=list)
    backends: list[str] = dataclasses.field(default_factory=list)
    guards: bytes = b""
    code: CodeType | None = None
    traced: list[CodeType] = dataclasses.field(default_factory=list)


class TraceTaker:
    """Takes the traces of one function from Dynamo, in the place of torch's ``CompilePackage``.

    A function whose trace has a graph break is not kept.
    """

    def __init__(self, function: FunctionType, take: Callable[[Trace], None]) -> None:
        """Start.

        Args:
            function: The function whose frame Dynamo traces first.
            take: Receives each trace.
        """
        self._function, self._take = function, take
        self._draft: _Draft | None = None

    def wrap_backend(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backend whose graphs are kept too."""

        def keeping(module: GraphModule, example_args: Sequence[Any]) -> Any:
            with self._refusing() as draft:
                if draft is not None:
                    draft.graphs.append(dump_graph(module))
            return backend(module, example_args)

        return keeping

    @contextmanager
    def _refusing(self) -> Iterator[_Draft | None]:
        """Yield the draft, unless it is refused; refuse it after an error."""
        draft = self._draft
        if draft is not None and draft.refusal is not None:
            draft = None
        try:
            yield draft
        # What torch's own structures raise where they cannot be pickled is of any kind.
        except Exception as error:
            assert draft is not None, "there is nothing to do without a draft"
            draft.refusal = f"{type(error).__name__}: {error}"

    # What Dynamo calls of a package.

    @contextmanager
    def code_context(self, code: CodeType) -> Iterator[None]:
        """Hold while Dynamo traces a frame."""
        self._draft = _Draft() if code is self._function.__code__ else None
        theirs = CheckFunctionManager.serialize_guards
        # Dynamo's lock is held: no other thread traces now.
        CheckFunctionManager.serialize_guards = self._dump_guards  # type: ignore[assignment, method-assign]
        try:
            yield
            self._finish()
        finally:
            CheckFunctionManager.serialize_guards = theirs  # type: ignore[method-assign]
            self._draft = None

    def add_guarded_code(self, guards: bytes, code: CodeType) -> None:
        """Take the guards and the bytecode of a frame."""
        if self._draft is not None:
            self._draft.guards, self._draft.code = guards, code

    def add_inlined_source(self, codes: Sequence[CodeType]) -> None:
        """Take the code that was traced."""
        if self._draft is not None:
            self._draft.traced += codes

    def add_backend_id(self, name: str, _: Any = None) -> None:
        """Take the global by which the bytecode calls a graph."""
        if self._draft is not None:
            self._draft.backends.append(name)

    def add_import_source(self, alias: str, module_name: str) -> None:
        """Hear of a module that the bytecode names; the bytecode says so itself."""

    def update_device_type(self, graph: Any) -> None:
        """Hear of the device of a graph."""

    def add_resume_function(self, *_: Any) -> None:
        """Refuse a trace with a graph break."""
        self.bypass_current_entry()

    def bypass_current_entry(self) -> None:
        """Refuse the trace."""
        if self._draft is not None:
            self._draft.refusal = "Dynamo does not keep it"

    def _dump_guards(self, builder: Any, guards: Sequence[Any], graph: Any) -> bytes:
        with self._refusing() as draft:
            if draft is not None:
                return dump_guards(builder, guards, graph)
        return b""

    def _finish(self) -> None:
        with self._refusing() as draft:
            if draft is not None and draft.code is not None:
                self._take(self._trace_of(draft, draft.code))
        if self._draft is not None and self._draft.refusal is not None:
            name = self._function.__qualname__
            logger.debug("a trace of %s is not kept: %s", name, self._draft.refusal)

    def _trace_of(self, draft: _Draft, code: CodeType) -> Trace:
        if len(draft.graphs) != 1 or len(draft.backends) != 1:
            raise NotKeptError(f"it has {len(draft.graphs)} graphs")
        made = _names_in(code, self._function.__globals__)
        renamed = {name: _own_name(named) for name, named in made.items() if _ADDRESS.search(name)}
        kept = {renamed.get(name, name): named for name, named in made.items()}
        files = sorted({c.co_filename for c in draft.traced})
        return Trace(
            guards=draft.guards,
            code=SerializedCode.from_code_object(with_names(code, renamed)),
            named=kept,
            backend=draft.backends[0],
            graph=draft.graphs[0],
            files={path: _digest_of_file(path) for path in files if not _belongs_to_release(path)},
        )


def dump_guards(builder: Any, guards: Sequence[Any], graph: Any) -> bytes:
    """Write down guards as [Note: guards are made again] says.

    Args:
        builder: Has made them.
        guards: Of Dynamo.
        graph: Of Dynamo; holds the values of this process.

    Raises:
        NotKeptError: A guard or its value says nothing in another process.
    """
    seen = list(_identities(guards, graph.local_scope, graph.global_scope))
    kept = [
        dataclasses.replace(
            guard,
            obj_weakref=None,
            guarded_class_weakref=None,
            create_fn=_without_tensor(guard),
            stack=None,
            user_stack=None,
        )
        for guard in guards
    ]
    sizes = graph.input_source_to_sizes_strides
    state = dataclasses.replace(
        graph.dump_guards_state(),
        local_scope={},
        global_scope={},
        _guards=None,
        input_source_to_sizes_strides=tree_map(convert_int_to_concrete_values, sizes),
        skip_guards_check=True,
    )
    manager = builder.check_fn_manager
    return pickle.dumps((GuardsState(state, manager.shape_code_parts), kept, seen))


def _without_tensor(guard: Any) -> Any:
    """Return what makes a guard, without the tensor that it was made of."""
    made = guard.create_fn
    return made.func if guard.create_fn_name() == "TENSOR_MATCH" else made


def _identities(
    guards: Sequence[Any], locals_: Mapping[str, Any], globals_: Mapping[str, Any]
) -> Iterator[Any]:
    scope, known = {"L": locals_, "G": globals_}, dict[Any, Any]()
    for guard in guards:
        value = None
        if guard.create_fn_name() not in OF_THE_STATE:
            value = guard.originating_source.get_value(scope, {}, known)
        yield identity_for(guard, value)


def rebuild(trace: Trace, function: FunctionType, locals_: dict[str, Any]) -> Any:
    """Make the guards of a trace from the values of this process.

    Args:
        trace: The trace.
        function: The function that it is of.
        locals_: The local variables with which a call of the function begins.

    Returns:
        Dynamo's guards; None if the trace does not serve this call.
    """
    globals_ = function.__globals__
    state, guards, seen = pickle.loads(trace.guards)
    if not _install_named(trace, globals_):
        return None
    if not _install_builtins(state.output_graph, globals_):
        return None
    try:
        found = _identities(guards, locals_, globals_)
        if not all(now == before for now, before in zip(found, seen, strict=True)):
            return None
    # Whatever a source raises that leads nowhere here.
    except Exception as error:
        logger.debug("a kept trace is of other values: %s", error)
        return None
    graph = dataclasses.replace(
        state.output_graph,
        local_scope=locals_,
        global_scope=globals_,
        _guards=GuardsSet(OrderedSet(guards)),
    )
    manager = CheckFunctionManager(
        function.__code__,
        OutputGraphCommon(graph),
        shape_code_parts=state.shape_code_parts,
        runtime_global_scope=globals_,
    ).guard_manager
    return manager if manager.check(locals_) else None


def _install_named(trace: Trace, globals_: dict[str, Any]) -> bool:
    """Make the globals that a trace needs; False if one is something else here."""
    values = {name: _resolve(named) for name, named in trace.named.items()}
    if any(globals_.get(name, value) is not value for name, value in values.items()):
        return False
    globals_.update(values)
    return True


def _install_builtins(state: Any, globals_: dict[str, Any]) -> bool:
    """Make the global by which guards reach Python's own names; Dynamo takes no such name twice."""
    name = state.name_of_builtins_dict_key_in_fglobals
    if name is None:
        return True
    number = _BUILTINS.fullmatch(name)
    if number is None:
        return False
    builtins = get_builtins_dict(globals_)
    if name not in globals_:
        while int(unique_id("").rpartition("_")[2]) < int(number[1]):
            pass
    return globals_.setdefault(name, builtins) is builtins


def locals_of(
    function: FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the local variables with which a call begins, those of its closure included.

    Raises:
        TypeError: The function does not take these arguments.
    """
    code, cells = function.__code__, function.__closure__
    # A decorated function may claim to have the signature of another one.
    bare = FunctionType(code, {}, function.__name__, function.__defaults__, cells)
    bare.__kwdefaults__ = function.__kwdefaults__
    bound = inspect.signature(bare).bind(*args, **kwargs)
    bound.apply_defaults()
    closure = zip(code.co_freevars, cells or (), strict=True)
    return {**bound.arguments, **{name: cell.cell_contents for name, cell in closure}}


# Names.


def _names_in(code: CodeType, globals_: Mapping[str, Any]) -> dict[str, Named]:
    """Return the globals that Dynamo made for some bytecode, all but the graphs.

    Raises:
        NotKeptError: One of them cannot be named.
    """
    names = {n for each in _codes_in(code) for n in each.co_names if _MADE.fullmatch(n)}
    made = {n for n in names if n in globals_ and not _BACKEND.fullmatch(n)}
    return {n: _name(globals_[n]) for n in sorted(made) if not _BUILTINS.fullmatch(n)}


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes_in(value)


def _name(value: Any) -> Named:
    """Say how to get a module, a class or a function.

    Raises:
        NotKeptError: It is something else, or is not found where it says.
    """
    if isinstance(value, ModuleType):
        return "module", value.__name__
    identity_of(value)
    named = ("object", str(value.__module__), str(getattr(value, "__qualname__", "")))
    try:
        is_there = _resolve(named) is value
    except (AttributeError, ImportError):
        is_there = False
    if not is_there:
        raise NotKeptError(f"{named[2]} is not found in {named[1]}")
    return named


def _resolve(named: Named) -> Any:
    found: Any = importlib.import_module(named[1])
    for part in named[2].split(".") if len(named) > 2 else ():
        found = getattr(found, part)
    return found


def _own_name(named: Named) -> str:
    """Return a global of ours: Dynamo's have an address in them, and it takes none twice."""
    return _OWN_PREFIX + hashlib.sha256(repr(named).encode()).hexdigest()[:16]


def with_names(code: CodeType, renamed: Mapping[str, str]) -> CodeType:
    """Return bytecode that takes other globals."""
    consts = (with_names(c, renamed) if isinstance(c, CodeType) else c for c in code.co_consts)
    names = tuple(renamed.get(name, name) for name in code.co_names)
    return code.replace(co_names=names, co_consts=tuple(consts))


# Source files.


def _belongs_to_release(path: str) -> bool:
    """Tell whether a file is of torch, or code that Python makes: for a dataclass, say."""
    return path == "<string>" or path.startswith("<frozen ") or _TORCH in Path(path).parents


def _digest_of_file(path: str) -> str:
    """Return a hash of a file.

    Raises:
        OSError: It cannot be read.
    """
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
