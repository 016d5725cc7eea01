"""Makes the fake tensors that stand for the arguments of a call while it is recorded.

Some arguments are views of one block of memory: the keys and the values of all layers of a paged
KV cache. Such a block is one buffer, so its bytes count once. The plan holds for calls whose
arguments lie in the block in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.lengths import SymbolicSizes, size_of
from ds_finepage.capture.recorder import Recorder, require_plain
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import BufferKind, GraphInput


def make_fakes(
    graph: DynamoGraph, args: Sequence[Any], recorder: Recorder, sizes: SymbolicSizes
) -> tuple[list[Any], tuple[GraphInput, ...]]:
    """Make the fake arguments of a call, and register their buffers.

    Returns:
        The arguments, and the inputs of the taskgraph.

    Raises:
        CaptureError: An argument is no plain strided tensor.
    """
    fakes: list[Any] = []
    inputs = []
    blocks = _fake_blocks(graph, args, recorder)
    for position, arg in enumerate(args):
        example = graph.placeholders[position].meta.get("example_value")
        if not isinstance(arg, torch.Tensor):
            fakes.append(sizes.of(example) if sizes and isinstance(example, torch.SymInt) else arg)
            continue
        if arg.layout is not torch.strided:
            raise CaptureError(f"{graph.name}: argument {position} is {arg.layout}")
        require_plain(arg)
        if position in blocks:
            block = blocks[position]
            whole = block.numel() // arg.element_size() * arg.element_size()
            flat = block[:whole].view(arg.dtype)
            fake = flat.as_strided(arg.shape, arg.stride(), arg.storage_offset())
        else:
            fake = _fake_of(graph, position, arg, recorder, sizes)
        inputs.append(GraphInput(position, recorder.tensor_id(fake)))
        fakes.append(fake)
    return fakes, tuple(inputs)


def _fake_of(
    graph: DynamoGraph, position: int, arg: torch.Tensor, recorder: Recorder, sizes: SymbolicSizes
) -> torch.Tensor:
    """Make the fake tensor of an argument with a buffer of its own."""
    example = graph.placeholders[position].meta.get("example_value")
    shape, stride = tuple(arg.shape), arg.stride()
    varies = False
    if sizes and isinstance(example, torch.Tensor):
        shape, stride = sizes.all(example.shape), sizes.all(example.stride())
        varies = any(isinstance(n, torch.SymInt) for n in (*shape, *stride))
    fake = torch.empty_strided(shape, stride, dtype=arg.dtype, device=arg.device)
    nbytes = fake.untyped_storage().nbytes()
    if position in graph.weights and not varies:
        kind, name = BufferKind.WEIGHT, graph.weights[position][1]
        # A product with a weight that asks for gradients is folded to two dimensions, and
        # its last bits are others than those of a batch of products.
        fake.requires_grad_(arg.requires_grad)
    else:
        kind, name = BufferKind.INPUT, graph.placeholders[position].name
        if not varies:
            nbytes = arg.untyped_storage().nbytes()
    buffer = recorder.add_buffer(fake, kind, size_of(nbytes), name)
    is_parameter = isinstance(arg, torch.nn.Parameter)
    recorder.buffers[buffer].is_module_buffer = kind is BufferKind.WEIGHT and not is_parameter
    return fake


def _fake_blocks(
    graph: DynamoGraph, args: Sequence[Any], recorder: Recorder
) -> dict[int, torch.Tensor]:
    """Make the bytes of each block that arguments share; return them by position."""
    found: dict[int, torch.Tensor] = {}
    for positions in graph.blocks_of(args):
        storage = args[positions[0]].untyped_storage()
        block = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
        name = graph.placeholders[positions[0]].name
        recorder.add_buffer(block, BufferKind.INPUT, storage.nbytes(), name)
        found |= dict.fromkeys(positions, block)
    return found
