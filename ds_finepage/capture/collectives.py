"""Puts the collectives of ``execution/collectives.py`` into a graph that Dynamo captured.

Dynamo turns a call of ``torch.distributed`` into a functional collective, a wait, and a copy into
the tensor of the caller. The first returns before its result is there, so the three become one op,
which works in the tensor of the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ds_finepage._compat.torch import group_named
from ds_finepage.graph.collectives import REDUCE_OPS

REDUCE, GATHER, WAIT = (
    f"_c10d_functional.{name}" for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor")
)

NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "autotp", "c10d", "deepspeed"}
)
"""Of ops that may wait for other ranks and that no task stands for."""


def put_in_collectives(module: GraphModule) -> None:
    """Replace the functional collectives that plans know; others stay as they are.

    Args:
        module: What Dynamo handed over. It is changed, with the graphs inside it (those of autograd
            functions, where gradients are on), and computes the same.
    """
    for part in (m for m in module.modules() if isinstance(m, GraphModule)):
        found = [n for n in part.graph.nodes if _is_known(n)]
        for node in found:
            _replace(node.graph, node)
        if found:
            part.graph.lint()
            part.recompile()


def _name(node: Node) -> str:
    return str(node.target).removesuffix(".default") if node.op == "call_function" else ""


def _is_known(node: Node) -> bool:
    if _name(node) == REDUCE and node.args[1] not in REDUCE_OPS:
        return False
    return _name(node) in (REDUCE, GATHER) and all(_name(user) == WAIT for user in node.users)


def _replace(graph: Graph, node: Node) -> None:
    """Replace one collective, its waits, and the copy of its result."""
    given, group = node.args[0], str(node.args[-1])
    assert isinstance(given, Node)
    num_ranks = group_named(group).size()
    copy = _copy_of(node)
    with graph.inserting_before(node):
        if copy is not None:
            into: Any = copy.args[0]
        elif _name(node) == REDUCE:
            into = graph.call_method("clone", (given,), {"memory_format": torch.contiguous_format})
        else:
            into = graph.call_function(_room_for_all, (given, num_ranks))
        if _name(node) == REDUCE:
            op, args = torch.ops.finepage.all_reduce_.default, (into, node.args[1])
        else:
            given = graph.call_method("contiguous", (given,))
            op, args = torch.ops.finepage.all_gather_into_.default, (into, given)
        made = graph.call_function(op, (*args, group, num_ranks))
    if "nn_module_stack" in node.meta:
        made.meta["nn_module_stack"] = node.meta["nn_module_stack"]
    for old in ([] if copy is None else [copy]) + list(node.users):
        old.replace_all_uses_with(into)
        graph.erase_node(old)
    graph.erase_node(node)


def _copy_of(node: Node) -> Node | None:
    """Return the copy of a result into a tensor that the collective itself can write.

    Nothing stands between the three, so nothing else reads or changes that tensor meanwhile.
    """
    wait, copy = node.next, node.next.next
    if list(node.users) != [wait] or list(wait.users) != [copy] or copy.target != "copy_":
        return None
    into, given = copy.args[0], node.args[0]
    if not isinstance(into, Node) or copy.args[1:] != (wait,) or copy.kwargs:
        return None
    if _name(node) == REDUCE and into is not given:
        return None
    tensor, result = (n.meta.get("example_value") for n in (into, wait))
    if not isinstance(tensor, torch.Tensor) or not isinstance(result, torch.Tensor):
        return None
    same = str(tensor.shape) == str(result.shape) and tensor.dtype == result.dtype
    return copy if same and tensor.is_contiguous() else None


def _room_for_all(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return an unfilled tensor for those of all ranks, one after the other."""
    return tensor.new_empty((num_ranks * tensor.shape[0], *tensor.shape[1:]))
