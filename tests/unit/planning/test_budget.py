"""What a budget pays for beside the arena, to the byte."""

from __future__ import annotations

from dataclasses import replace

from ds_finepage.graph.taskgraph import (
    TO_HOST,
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    Task,
    TaskGraph,
    TensorView,
)
from ds_finepage.planning.budget import (
    HOST_PROGRAM_SLACK_BYTES,
    SELECTED_PARTS,
    non_arena_bytes,
    selected_bytes,
)

UNIT = 512


def graph_of(
    *given: tuple[BufferKind, int, str, tuple[int, ...]],
    given_in: tuple[int, ...] = (),
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
        inputs=tuple(GraphInput(i, t) for i, t in enumerate(given_in)),
        outputs=tuple(GraphOutput(tensor=t) for t in returned),
    )


def beside(*given: tuple[BufferKind, int, str, tuple[int, ...]], **others: tuple[int, ...]) -> int:
    return non_arena_bytes(graph_of(*given, **others), UNIT) - HOST_PROGRAM_SLACK_BYTES


def test_what_is_not_paged_counts_in_whole_units() -> None:
    for kind in (BufferKind.INPUT, BufferKind.OUTPUT, BufferKind.STATE, BufferKind.CONSTANT):
        assert beside((kind, 513, "float32", (128,))) == 1024


def test_what_lies_in_the_arena_or_in_host_memory_does_not_count() -> None:
    for kind in (BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.HOST):
        assert beside((kind, 5000, "float32", (1250,))) == 0


def test_the_largest_workspace_counts_once() -> None:
    assert beside(workspaces=(100, 700, 300)) == 700


def test_the_workspace_of_a_copy_to_host_memory_counts_beside_the_largest_other() -> None:
    graph = graph_of(workspaces=(100, 700, 300, 50))
    tasks = (*graph.tasks[:2], *(replace(task, op=TO_HOST) for task in graph.tasks[2:]))
    found = non_arena_bytes(replace(graph, tasks=tasks), UNIT)
    assert found == HOST_PROGRAM_SLACK_BYTES + 700 + 300


def test_token_ids_and_masks_count_four_times_more() -> None:
    for dtype in ("int64", "int32", "bool"):
        assert beside((BufferKind.INPUT, 512, dtype, (64,))) == 512 + 4 * 512
    assert beside((BufferKind.STATE, 512, "int64", (64,))) == 512


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


# Beam search.

ROWS = (1, 2, 8, 8)


def test_rows_with_room_get_another_order_in_parts() -> None:
    """Only beam search asks for it: no other pass needs a part of its rows twice."""
    given = [(BufferKind.STATE, 513, "float32", ROWS), (BufferKind.STATE, 1026, "float32", ROWS)]
    assert selected_bytes(graph_of(*given, given_in=(0,))) == -(-513 // SELECTED_PARTS)
    assert selected_bytes(graph_of(*given, given_in=(0, 1))) == -(-1026 // SELECTED_PARTS)
    assert beside(*given, given_in=(0, 1)) == 1024 + 1536


def test_rows_without_room_get_another_order_at_once() -> None:
    given = [
        (BufferKind.INPUT, 512, "float32", ROWS),  # of an encoder's output, say
        (BufferKind.INPUT, 256, "float32", ROWS),
        (BufferKind.INPUT, 9999, "int64", (3, 4)),
        (BufferKind.OUTPUT, 800, "float32", ROWS),
        (BufferKind.OUTPUT, 9999, "float32", (1, 8, 16)),
    ]
    assert selected_bytes(graph_of(*given, given_in=(0, 1, 2))) == 512
    assert selected_bytes(graph_of(*given, returned=(3, 4))) == 800
    # Those that a window replaces are gone before.
    assert selected_bytes(graph_of(*given, given_in=(0, 2), returned=(3, 4))) == 288
    assert selected_bytes(graph_of(*given, given_in=(0, 1, 2), returned=(3, 4))) == 32
    assert selected_bytes(graph_of(*given, given_in=(2,), returned=(4,))) == 0
