"""What a budget pays for beside the arena, to the byte."""

from __future__ import annotations

from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphOutput,
    Task,
    TaskGraph,
    TensorView,
)
from ds_finepage.planning.budget import HOST_PROGRAM_SLACK_BYTES, SELECTED_PARTS, non_arena_bytes

UNIT = 512


def graph_of(
    *given: tuple[BufferKind, int, str, tuple[int, ...]],
    returned: tuple[int, ...] = (),
    workspaces: tuple[int, ...] = (0,),
) -> TaskGraph:
    """Build a taskgraph; each buffer is of a kind, with bytes, and has one tensor on it."""
    buffers = tuple(Buffer(i, kind, nbytes) for i, (kind, nbytes, _, _) in enumerate(given))
    tensors = tuple(
        TensorView(i, i, dtype, shape, (1,) * len(shape))
        for i, (_, _, dtype, shape) in enumerate(given)
    )
    return TaskGraph(
        "budget",
        buffers,
        tensors,
        tuple(Task(i, "op", workspace_bytes=n) for i, n in enumerate(workspaces)),
        outputs=tuple(GraphOutput(tensor=t) for t in returned),
    )


def beside(*given: tuple[BufferKind, int, str, tuple[int, ...]], **others: tuple[int, ...]) -> int:
    return non_arena_bytes(graph_of(*given, **others), UNIT) - HOST_PROGRAM_SLACK_BYTES


def test_what_is_not_paged_counts_in_whole_units() -> None:
    for kind in (BufferKind.INPUT, BufferKind.OUTPUT, BufferKind.CONSTANT):
        assert beside((kind, 513, "float32", (128,))) == 1024
    assert beside((BufferKind.STATE, 513, "float32", (128,))) == 1024 + 513 // SELECTED_PARTS


def test_one_part_of_the_rows_of_a_kv_cache_counts_twice() -> None:
    """Beam search puts them into another order, part by part."""
    rows, larger = (1, 2, 8, 8), (1, 2, 16, 8)
    given = [(BufferKind.STATE, 512, "float32", rows), (BufferKind.STATE, 1024, "float32", larger)]
    assert beside(*given) == 512 + 1024 + 1024 // SELECTED_PARTS
    first = (BufferKind.OUTPUT, 512, "float32", rows)
    logits_row = 3 * 4 * 16
    assert beside(first) == 512
    assert beside(first, returned=(0,)) == 512 + 512 // SELECTED_PARTS + logits_row
    assert (
        beside((BufferKind.OUTPUT, 512, "float32", (1, 8, 16)), returned=(0,)) == 512 + logits_row
    )


def test_what_lies_in_the_arena_or_in_host_memory_does_not_count() -> None:
    for kind in (BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.HOST):
        assert beside((kind, 5000, "float32", (1250,))) == 0


def test_the_largest_workspace_counts_once() -> None:
    assert beside(workspaces=(100, 700, 300)) == 700


def test_token_ids_and_masks_count_four_times_more() -> None:
    for dtype in ("int64", "int32", "bool"):
        assert beside((BufferKind.INPUT, 512, dtype, (64,))) == 512 + 4 * 512
    assert beside((BufferKind.STATE, 512, "int64", (64,))) == 512 + 512 // SELECTED_PARTS


def test_one_row_of_logits_counts_in_float32_with_two_copies() -> None:
    logits = (BufferKind.OUTPUT, 2 * 7 * 512 * 2, "bfloat16", (2, 7, 512))
    assert beside(logits) == 2 * 7 * 512 * 2
    assert beside(logits, returned=(0,)) == 2 * 7 * 512 * 2 + 3 * (2 * 512 * 4)


def test_the_largest_row_of_all_that_is_returned_counts() -> None:
    logits = (BufferKind.OUTPUT, 512 * 4, "float32", (1, 1, 512))
    states = (BufferKind.OUTPUT, 64 * 4, "float32", (1, 1, 64))
    around = beside(states, logits, returned=(0, 1))
    assert around == 512 + 2048 + 3 * 2048
    assert beside(logits, states, returned=(0, 1)) == around


def test_rows_that_are_returned_in_host_memory_are_no_logits() -> None:
    assert beside((BufferKind.HOST, 2048, "float32", (4, 1, 2, 64)), returned=(0,)) == 0


def test_what_has_no_rows_has_no_logits() -> None:
    assert beside((BufferKind.OUTPUT, 512, "float32", (128,)), returned=(0,)) == 512
    assert beside((BufferKind.OUTPUT, 0, "float32", (1, 0, 64)), returned=(0,)) == 0
