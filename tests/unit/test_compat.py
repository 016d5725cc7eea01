"""Private names of torch, transformers and DeepSpeed: all in one package, and all of them exist."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer, StaticLayer

from ds_finepage import _compat
from ds_finepage._compat.transformers import (
    cache_name,
    given_cache,
    is_initialized,
    takes_cache,
)

ROOT = Path(_compat.__file__).parents[1]
FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent.name != "_compat")
THEIRS = ("torch", "transformers", "deepspeed", "accelerate")
INTERNAL = ("deepspeed.runtime.", "torch.fx.experimental.", "torch.multiprocessing.reductions")

ATTRIBUTES = {
    "_apply_gate": "transformers.models.mixtral.modeling_mixtral.MixtralExperts",
    "_buffers": "torch.nn.Module",
    "_call_impl": "torch.nn.Module",
    "_cdata": "torch.UntypedStorage",
    "_compiled_call_impl": "torch.nn.Module",
    "_convert_to_deepspeed_param": "deepspeed.runtime.zero.partition_parameters.Init",
    "_convert_to_zero_parameters": "deepspeed.runtime.zero.partition_parameters.Init",
    "_config": "deepspeed.runtime.engine.DeepSpeedEngine",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_keep_in_fp32_modules": "transformers.PreTrainedModel",
    "_make_wrapper_subclass": "torch.Tensor",
    "_modules": "torch.nn.Module",
    "_no_gather_coalesced": "deepspeed.runtime.zero.partition_parameters",
    "_param_dict": "deepspeed.runtime.config.DeepSpeedConfig",
    "_parameters": "torch.nn.Module",
    "_remove_module_hooks": "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload",
    "_schema": "torch._ops.OpOverload",
    "_sleep": "torch.cuda",
    "_to_copy": "torch.ops.aten",
    "_version": "torch.Tensor",
}
"""Private attribute that the product reads or replaces -> its owner."""

REGISTER_HOOKS = ("_register_deepspeed_module", "_register_hooks_recursively")
"""The names of one method of ``DeepSpeedZeRoOffload``; a version has one of them."""


def is_private(module: str, name: str = "") -> bool:
    """Return whether an import from one of their packages is of a private or internal name."""
    if module.split(".")[0] not in THEIRS:
        return False
    parts = [*module.split("."), name]
    return any(p.startswith("_") for p in parts) or f"{module}.".startswith(INTERNAL)


def imported_private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [a.name for a in node.names if is_private(node.module, a.name)]
            yield from (f"{node.module}.{name}" for name in found)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))


def private_attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            yield node.attr


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a file defines or assigns to."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_only_compat_imports_private_names() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in FILES
        if (names := list(imported_private_names(ast.parse(path.read_text()))))
    }
    assert found == {}


def test_every_private_attribute_is_listed() -> None:
    trees = [ast.parse(path.read_text()) for path in FILES]
    ours = {name for tree in trees for name in own_names(tree)}
    used = {name for tree in trees for name in private_attributes(tree)}
    listed = {*ATTRIBUTES, *REGISTER_HOOKS}
    assert sorted(used - ours - listed) == []
    by_text = {"_compiled_call_impl", "_modules", "_parameters"}
    overridden = {"_remove_module_hooks", *REGISTER_HOOKS}
    assert overridden <= ours
    assert sorted(listed - used - by_text - overridden) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from torch._dynamo import config", ["torch._dynamo.config"]),
        ("from torch.utils.x import _y, z", ["torch.utils.x._y"]),
        ("import deepspeed.runtime.engine", ["deepspeed.runtime.engine"]),
        ("from torch.fx.experimental.proxy_tensor import make_fx, Proxy", 2),
        ("from torch.fx import Node\nfrom ds_finepage._compat.torch import _x", []),
    ],
)
def test_the_rule_itself(code: str, expected: list[str] | int) -> None:
    found = list(imported_private_names(ast.parse(code)))
    assert found == expected or len(found) == expected
    assert list(private_attributes(ast.parse("a._b.c.__d__"))) == ["_b"]


@pytest.mark.parametrize("name", ("torch", "deepspeed"))
def test_every_imported_name_exists(name: str) -> None:
    pytest.importorskip(name)
    part: Any = import_module(f"ds_finepage._compat.{name}")
    tree = ast.parse(Path(part.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.asname or alias.name for node in imports for alias in node.names]
    assert names and [n for n in names if getattr(part, n, None) is None] == []


def exists(owner: str, name: str) -> bool:
    """Return whether a class or module has a name, or the code of a class assigns to it."""
    found = pkgutil.resolve_name(owner)
    return hasattr(found, name) or f"self.{name} = " in inspect.getsource(found)


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_every_attribute_exists(name: str) -> None:
    owner = ATTRIBUTES[name]
    pytest.importorskip(owner.split(".")[0])
    if owner == "torch.nn.Module":
        assert hasattr(pkgutil.resolve_name(owner)(), name)
    else:
        assert exists(owner, name)


def test_one_of_the_names_of_registering_hooks_exists() -> None:
    pytest.importorskip("deepspeed")
    from ds_finepage._compat.deepspeed import DeepSpeedZeRoOffload

    assert len([n for n in REGISTER_HOOKS if hasattr(DeepSpeedZeRoOffload, n)]) == 1


def test_an_attribute_that_does_not_exist_is_noticed() -> None:
    assert not exists("torch.nn.Module", "_no_such_name")


def test_the_seams_find_the_names_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")

    module = import_module("deepspeed.runtime.engine")
    engine = getattr(module, _compat.ENGINE)
    assert vars(engine).keys() >= {
        _compat.ENGINE_CONFIGURE,
        _compat.ENGINE_SANITY_CHECK,
        _compat.ENGINE_TAKE_MODEL,
    }
    assert hasattr(module, _compat.ENGINE_OFFLOAD)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (SimpleNamespace(is_initialized=True, keys=None), True),
        (SimpleNamespace(is_initialized=False, keys=1), False),
        (LinearAttentionLayer(), False),
    ],
)
def test_a_cache_layer_says_whether_it_has_its_tensors(layer: Any, expected: bool) -> None:
    assert is_initialized(layer) is expected


def forward_before_the_cache_was_renamed(input_ids: Any, past_key_values: Any = None) -> None:
    """Of transformers 5.23 and older, and of models that are not transformers' own."""


def forward_with_the_new_name(input_ids: Any, cache: Any = None) -> None:
    """Of transformers 5.24 and newer."""


def forward_with_a_cache_of_transformers(input_ids: Any, cache: Cache | None = None) -> None:
    """Of most models."""


def forward_with_a_cache_of_its_own(input_ids: Any, cache: SimpleNamespace | None = None) -> None:
    """Of xLSTM."""


# This file's annotations are text.
forward_with_a_cache_of_transformers.__annotations__["cache"] = Cache | None
forward_with_a_cache_of_its_own.__annotations__["cache"] = SimpleNamespace | None


def forward_without_a_cache(input_ids: Any) -> None:
    """Of an encoder."""


@pytest.mark.parametrize(
    ("forward", "takes", "name"),
    [
        (forward_before_the_cache_was_renamed, True, "past_key_values"),
        (forward_with_the_new_name, True, "cache"),
        (forward_with_a_cache_of_transformers, True, "cache"),
        (forward_with_a_cache_of_its_own, False, "cache"),
        (forward_without_a_cache, False, "past_key_values"),
    ],
)
def test_a_forward_says_by_which_name_it_takes_a_cache(
    forward: Any, takes: bool, name: str
) -> None:
    assert takes_cache(forward) is takes
    assert cache_name(forward) == name


def test_a_cache_is_found_by_either_name() -> None:
    cache = object()
    assert given_cache({"past_key_values": cache, "use_cache": True}) is cache
    assert given_cache({"cache": cache}) is cache
    assert given_cache({"past_key_values": None, "cache": cache}) is cache
    assert given_cache({"cache": None}) is given_cache({"use_cache": True}) is None


def test_a_cache_layer_has_a_largest_length() -> None:
    assert StaticLayer(max_cache_len=3).get_max_length() == 3
    assert DynamicLayer().get_max_length() < 1


def test_the_seams_find_the_names_of_transformers() -> None:
    module = import_module("transformers.modeling_utils")
    assert [name for name in _compat.MODEL_NEEDS if not hasattr(module, name)] == []
    model = getattr(module, _compat.MODEL)
    assert vars(model).keys() >= {*_compat.MODEL_METHODS}


def test_the_arm_finds_the_name_of_accelerate() -> None:
    assert hasattr(import_module("accelerate.hooks"), _compat.ACCELERATE_SET)
