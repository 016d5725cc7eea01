"""The bytes that a forward of ZeRO-Inference gathers, as the counters of DeepSpeed would show."""

from __future__ import annotations

from itertools import accumulate

from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.zero import ZeroSettings, script_of
from ds_finepage.planning.script import Act


def gathered(graph: TaskGraph, settings: ZeroSettings) -> tuple[int, int]:
    """Return the gathered bytes, and the largest sum of parameters that are there or on the way."""
    script = script_of(graph, settings)
    signs = {Act.RELOAD: 1, Act.DROP: -1}
    changes = [
        signs[step.act] * graph.buffers[step.subject].nbytes
        for step in script.steps
        if step.act in signs
    ]
    at_first = sum(graph.buffers[b].nbytes for b in script.entry)
    return sum(x for x in changes if x > 0), max(accumulate(changes, initial=at_first))
