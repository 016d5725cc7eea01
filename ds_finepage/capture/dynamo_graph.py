"""One graph that Dynamo handed over.

Dynamo brings guards, graph breaks and symbolic shapes. Its graphs are torch-level, with parameters,
tensors and integers as arguments. Each combination of integers that the tensors depend on becomes a
taskgraph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ds_finepage._compat.torch import free_symbols
from ds_finepage.capture.collectives import put_in_collectives

SHARES_MEMORY = "_ds_finepage_shares_memory"
"""An attribute of the tensors that are views of one block of memory: a paged KV cache."""


class BufferChangedError(Exception):
    """A graph changes a large buffer, or hands it out, so that it cannot be a weight.

    Attributes:
        name: Of the buffer. torch adds to the arguments of errors that pass its interpreter.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class DynamoGraph:
    """A torch-level graph, its weights by position, and the integers that its shape depends on.

    Attributes:
        weights: Call position -> (parameter, name).
        placeholders: The nodes of the arguments, by call position.
        key_positions: Call positions of the integers that tensors depend on. Dynamo passes every
            symbol of a shape as an argument of its own, so calls with the same integers there have
            the same taskgraph. An integer that only counts (transformers' sliding-window cache
            hands its length through) is left out, else every token would need its own capture.
        fixed_positions: Those of them that no symbol stands for.
        num_host_outputs: How many Python numbers are returned.
    """

    def __init__(
        self,
        module: GraphModule,
        example_args: Sequence[Any],
        weight_names: dict[int, str],
        name: str,
    ) -> None:
        """Look at a graph once, before any call.

        Parameters enter as the objects themselves, so they are recognised by identity and never by
        address.
        """
        put_in_collectives(module)
        self.module = module
        self.name = name
        self.weights: dict[int, tuple[torch.Tensor, str]] = {
            position: (arg, weight_names[id(arg)])
            for position, arg in enumerate(example_args)
            if isinstance(arg, torch.Tensor) and id(arg) in weight_names
        }
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._shared_positions = tuple(
            position for position, arg in enumerate(example_args) if hasattr(arg, SHARES_MEMORY)
        )
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        returned = output.args[0]
        self._outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        self.key_positions = tuple(
            position
            for position, arg in enumerate(example_args)
            if not isinstance(arg, torch.Tensor) and self._shapes_depend_on(position)
        )
        examples = [node.meta.get("example_value") for node in self.placeholders]
        self.fixed_positions = tuple(
            i for i in self.key_positions if not isinstance(examples[i], torch.SymInt)
        )
        self._host_module = self._slice_host_outputs()

    def blocks_of(self, args: Sequence[Any]) -> list[list[int]]:
        """Return the positions of the arguments that share a block of memory, block by block."""
        found: dict[int, list[int]] = {}
        for position in self._shared_positions:
            found.setdefault(args[position].untyped_storage()._cdata, []).append(position)
        return list(found.values())

    def sharing_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Describe how the arguments of a call lie in the blocks that they share.

        Calls with different descriptions need different taskgraphs.
        """
        if not self._shared_positions:
            return ()

        def described(position: int) -> tuple[Any, ...]:
            arg = args[position]
            return position, arg.storage_offset(), arg.shape, arg.stride()

        return tuple(
            (args[positions[0]].untyped_storage().nbytes(), *map(described, positions))
            for positions in self.blocks_of(args)
        )

    def host_outputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Compute the returned Python numbers of a call."""
        if self._host_module is None:
            return ()
        found = self._host_module(*args)
        assert isinstance(found, tuple)
        return found

    def release_buffers(self, names: Sequence[str]) -> None:
        """Say that some weights may be changed by the graph.

        Raises:
            BufferChangedError: One of them is a buffer.
        """
        for weight, name in self.weights.values():
            if name in names and not isinstance(weight, torch.nn.Parameter):
                raise BufferChangedError(name)

    def _shapes_depend_on(self, position: int) -> bool:
        """Tell whether any tensor depends on an integer argument, through shape or value."""
        placeholder = self.placeholders[position]
        symbols = free_symbols(placeholder.meta.get("example_value", 0))
        for other in self.placeholders:
            value = other.meta.get("example_value")
            if isinstance(value, torch.Tensor) and symbols & free_symbols(value):
                return True
        reached = {placeholder}
        for node in self.module.graph.nodes:
            if reached.isdisjoint(node.all_input_nodes) or node.op == "output":
                continue
            if not _is_number(node):
                return True
            reached.add(node)
        return False

    def _slice_host_outputs(self) -> GraphModule | None:
        """Cut out the part of the graph that computes the returned Python numbers."""
        returned = [
            n for n in self._outputs if n is not None and (not isinstance(n, Node) or _is_number(n))
        ]
        self.num_host_outputs = len(returned)
        if not returned:
            return None
        graph = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        graph.graph_copy(self.module.graph, copies)
        graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in returned))
        # Ops that change tensors go too: a number depends on none of them.
        graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
        return GraphModule(self.module, graph)


def _is_number(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
