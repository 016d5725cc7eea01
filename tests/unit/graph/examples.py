"""One small object of each kind that the codec writes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import (
    Edge,
    EdgeKind,
    Extent,
    Lane,
    MemGraph,
    Node,
    NodeKind,
    Residency,
)
from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    ModuleCall,
    Ref,
    Symbol,
    Task,
    TaskGraph,
    TensorView,
)
from ds_finepage.graph.timeline import Span, Timeline

VERSIONS = (("torch", "2.13.0"), ("transformers", "5.23.0"))


def make_graph() -> TaskGraph:
    return TaskGraph(
        name="tiny",
        buffers=(
            Buffer(0, BufferKind.WEIGHT, 64, "layers.0.größe.weight"),
            Buffer(1, BufferKind.INPUT, 16),
            Buffer(2, BufferKind.ACTIVATION, 32),
            Buffer(3, BufferKind.CONSTANT, 4, payload=b"\x00\xff\n\x80"),
            Buffer(4, BufferKind.OUTPUT, 0, payload=b""),
        ),
        tensors=(
            TensorView(0, 0, "float32", (4, 4), (4, 1)),
            TensorView(1, 1, "int64", (2,), (1,)),
            TensorView(2, 2, "bfloat16", (2, 8), (1, 2), 3),
            TensorView(3, 4, "bool", (), ()),
        ),
        tasks=(
            Task(
                0,
                "aten.mm.default",
                "layers.0",
                args=(Ref(0), None, True, 1, 1.0, -0.0, 1e-5, 'a"b\nü', 2**70, (), ((Ref(1),), 2)),
                kwargs=(
                    ("dtype", Symbol("dtype", "float32")),
                    ("value", -math.inf),
                    ("other", (math.inf, b"\x00\x01")),
                ),
                results=(2, None),
                reads=(0, 1),
                writes=(2,),
                workspace_bytes=512,
                flops=1000,
                moved_bytes=99,
                time_ns=17,
            ),
            Task(1, "aten.copy_.default", results=(), reads=(2,), touches=(4,)),
        ),
        inputs=(GraphInput(0, 1),),
        outputs=(
            GraphOutput(tensor=3),
            GraphOutput(position=0),
            GraphOutput(host=1),
            GraphOutput(),
        ),
        versions=VERSIONS,
        calls=(
            ModuleCall("", "Model", 0, 0, 2),
            ModuleCall("layers.0", "Linear", 1, 0, 1),
            ModuleCall("drop", "Dropout", 1, 2, 2),
        ),
    )


def make_memgraph(graph: TaskGraph) -> MemGraph:
    return MemGraph(
        graph=graph,
        policy="finepage",
        arena_bytes=1024,
        alignment=64,
        nodes=(
            Node(0, NodeKind.RESIDENT, buffer=0, extent=Extent(64, 64)),
            Node(1, NodeKind.ALLOC, buffer=2, extent=Extent(0, 64)),
            Node(2, NodeKind.COMPUTE, task=0),
            Node(3, NodeKind.COMPUTE, task=1),
            Node(4, NodeKind.DROP, buffer=2, extent=Extent(0, 64)),
        ),
        edges=(
            Edge(0, 2, EdgeKind.DATA),
            Edge(1, 2, EdgeKind.ALLOC),
            Edge(2, 3, EdgeKind.DATA),
            Edge(3, 4, EdgeKind.READ_DROP),
        ),
        entry=(Residency(0, Extent(64, 64)),),
        exit=(Residency(0, Extent(64, 64)),),
        host_slots=((2, 128),),
        host_bytes=192,
    )


def make_timeline() -> Timeline:
    spans = (Span(3, Lane.COMPUTE, 5, 9, "mm"), Span(2, Lane.H2D, 0, 5), Span(5, Lane.D2H, 9, 9))
    return Timeline(spans, 9, 4, 5, 5, 128)


def make_profile() -> HardwareProfile:
    return HardwareProfile(
        name="box",
        source="measured",
        capacity_bytes=2**34,
        h2d_bytes_per_s=1.5e9,
        d2h_bytes_per_s=2e9,
        memory_bytes_per_s=1e11,
        flops_per_s={"float32": 1e12, "default": 5e11},
        launch_ns=10,
        transfer_latency_ns=20,
    )


def make_large_graph() -> TaskGraph:
    """About as large as a captured 65B model."""
    num_tasks, num_tensors, num_buffers = 8_000, 20_000, 9_000
    return TaskGraph(
        name="large",
        buffers=tuple(
            Buffer(i, BufferKind.ACTIVATION, 2**20, f"layers.{i}.mlp") for i in range(num_buffers)
        ),
        tensors=tuple(
            TensorView(i, i % num_buffers, "bfloat16", (1, 2048, 64, 128), (8192, 128, 128, 1))
            for i in range(num_tensors)
        ),
        tasks=tuple(
            Task(
                i,
                "aten.mm.default",
                f"model.layers.{i // 100}.mlp.up_proj",
                args=(Ref(i), Ref(i + 1), (1, -1, None), 1e-5, Symbol("dtype", "bfloat16")),
                kwargs=(("alpha", 1.0),),
                results=(i + 2,),
                reads=(i, i + 1),
                writes=(i + 2 if i + 2 < num_buffers else 0,),
                flops=10**12,
                moved_bytes=10**9,
            )
            for i in range(num_tasks)
        ),
    )


GRAPH = make_graph()
STANDALONE = [GRAPH, make_timeline(), make_profile()]


def with_task(graph: TaskGraph, **changes: Any) -> TaskGraph:
    """Change the first task of a graph."""
    first = dataclasses.replace(graph.tasks[0], **changes)
    return dataclasses.replace(graph, tasks=(first, *graph.tasks[1:]))
