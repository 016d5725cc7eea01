"""Which module runs what: from labels, and as captured."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig

from ds_finepage.capture.from_config import capture_config
from ds_finepage.graph.taskgraph import ModuleCall, Task, TaskGraph, layer_of
from ds_finepage.planning.baselines.modules import module_calls


def labelled(*labels: str) -> TaskGraph:
    return TaskGraph("labels", (), (), tuple(Task(i, "x", label) for i, label in enumerate(labels)))


def told(graph: TaskGraph) -> list[tuple[str, int, int, int]]:
    return [(c.name, c.depth, c.begin, c.end) for c in module_calls(graph)]


def test_labels_tell_the_modules_around_them() -> None:
    assert told(labelled("m.embed", "m.layers.0.fc", "m.layers.0", "m.layers.1.fc", "head")) == [
        ("", 0, 0, 5),
        ("m", 1, 0, 4),
        ("m.embed", 2, 0, 1),
        ("m.layers.0", 2, 1, 3),
        ("m.layers.0.fc", 3, 1, 2),
        ("m.layers.1", 2, 3, 4),
        ("m.layers.1.fc", 3, 3, 4),
        ("head", 1, 4, 5),
    ]


def test_a_module_that_is_left_and_comes_again_is_called_twice() -> None:
    assert told(labelled("a", "b", "a")) == [
        ("", 0, 0, 3),
        ("a", 1, 0, 1),
        ("b", 1, 1, 2),
        ("a", 1, 2, 3),
    ]


def test_tasks_without_label_are_the_models_own() -> None:
    assert told(labelled("", "")) == [("", 0, 0, 2)]


def test_what_was_captured_goes_first() -> None:
    calls = (ModuleCall("told", "Linear", 0, 0, 1),)
    assert module_calls(dataclasses.replace(labelled("other"), calls=calls)) == calls


def test_labels_tell_as_much_as_was_captured_where_every_module_runs_a_task() -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    )
    graph = capture_config(config, phase="decode", batch=1, seq=8)
    assert len(graph.calls) > 20
    assert told(dataclasses.replace(graph, calls=())) == told(graph)


@pytest.mark.parametrize(
    ("label", "layer"),
    [
        ("model.layers.12.mlp.experts.3", "model.layers.12"),
        ("h.0", "h.0"),
        ("lm_head", None),
        ("layer3", None),
        ("", None),
    ],
)
def test_a_layer_is_the_path_up_to_its_number(label: str, layer: str | None) -> None:
    assert layer_of(label) == layer
