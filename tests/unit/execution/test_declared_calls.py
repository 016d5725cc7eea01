"""Each call of torch.cuda and torch.accelerator, against torch's own declarations; no card needed.

Only torch's builds for CUDA have them all.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_finepage

PACKAGE = Path(ds_finepage.__file__).parent
DEVICES = PACKAGE / "execution" / "device.py"

# The device module is torch.cuda in device.py, whatever a class calls it.
MODULES = {
    "torch.accelerator": torch.accelerator,
    "torch.cuda": torch.cuda,
    "self._module": torch.cuda,
}

WHERE = torch.device("cuda", 0)

LATER: dict[str, tuple[Any, ...]] = {
    "get_memory_info": (WHERE,),
    "mem_get_info": (WHERE,),
    "get_device_name": (WHERE,),
    "set_per_process_memory_fraction": (0.5, 0),
    "default_stream": (WHERE,),
    "host_memory_stats": (),
    "_sleep": (1,),
    "CUDAGraph": (),
    "cudart": (),
}
"""Names that device.py first looks up and calls later, with the arguments that it passes."""

ONLY_OTHERS = {"can_read_pinned_memory"}
"""Names that torch.cuda does not have and is not asked for: devices of other programs set them."""

NEWER = {"get_memory_info": "mem_get_info"}
"""Names that older versions of torch lack, and what device.py calls there."""

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is not built with CUDA"
)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of an expression, empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.get_device_module":
        return "torch.cuda"
    return ""


def reached(path: Path) -> Iterator[tuple[str, str, ast.Call | None]]:
    """Yield each name of a file that it reaches in a module, and the call of it."""
    tree = ast.parse(path.read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) in MODULES:
            yield dotted(node.value), node.attr, called.get(id(node))
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in ("getattr", "hasattr")
            and dotted(node.args[0]) in MODULES
        ):
            assert isinstance(node.args[1], ast.Constant)
            yield dotted(node.args[0]), str(node.args[1].value), None


EVERYWHERE = [
    (path.relative_to(PACKAGE).as_posix(), *found)
    for path in sorted(PACKAGE.rglob("*.py"))
    for found in reached(path)
    if path == DEVICES or found[0] != "self._module"
]


def test_the_names_are_found() -> None:
    in_devices = {name for file, _, name, _ in EVERYWHERE if file == "execution/device.py"}
    assert set(LATER) <= in_devices and len(in_devices) > 15


@pytest.mark.parametrize(
    ("file", "module", "name", "call"),
    EVERYWHERE,
    ids=[f"{file}:{name}" for file, _, name, _ in EVERYWHERE],
)
def test_torch_has_the_name_and_takes_the_arguments(
    file: str, module: str, name: str, call: ast.Call | None
) -> None:
    if name in ONLY_OTHERS:
        assert not hasattr(MODULES[module], name)
        return
    if name in NEWER and not hasattr(MODULES[module], name):
        assert hasattr(torch.cuda, NEWER[name])
        return
    function = getattr(MODULES[module], name)
    if call is not None:
        words = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(function).bind(*call.args, **words)
    if call is None or name in LATER:
        assert name in LATER, f"{file}: write the arguments of {name} into LATER"
        inspect.signature(function).bind(*LATER[name])


def test_a_graph_takes_the_mode_of_its_capture() -> None:
    graph = torch.cuda.CUDAGraph
    inspect.signature(graph.capture_begin).bind(None, capture_error_mode="thread_local")
    inspect.signature(graph.capture_end).bind(None)
    inspect.signature(graph.replay).bind(None)


def test_host_memory_is_registered_by_address_size_and_flags() -> None:
    runtime: Any = torch._C._cudart  # torch.cuda.cudart() returns it where there is a driver
    assert "arg2" in runtime.cudaHostRegister.__doc__
    assert "arg3" not in runtime.cudaHostRegister.__doc__
    assert int(runtime.cudaError.success) == 0


def test_pinned_bytes_have_the_name_that_is_read() -> None:
    assert '"allocated_bytes.' in str(torch.cuda.host_memory_stats.__doc__)


def test_streams_and_events_have_their_methods() -> None:
    torch.Event(WHERE, enable_timing=True)
    for name in ("record", "synchronize", "elapsed_time", "query", "wait"):
        assert callable(getattr(torch.Event, name))
    for name in ("wait_event", "wait_stream", "synchronize", "record_event", "__enter__"):
        assert callable(getattr(torch.Stream, name))
    assert issubclass(torch.cuda.Stream, torch.Stream)
