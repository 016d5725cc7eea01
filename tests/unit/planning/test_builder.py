"""The books behind the edges: each kind arises where the published rules say, and nowhere else."""

from __future__ import annotations

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import EdgeKind, Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.builder import MemGraphBuilder
from tests.unit.planning.sketches import edges, names, sketch


class Script:
    """A memgraph written step by step, with buffers by name and extents in units of 64 bytes."""

    def __init__(self, graph: TaskGraph, **resident: int) -> None:
        self.builder = MemGraphBuilder(graph, "by hand", 64 * 16, 64)
        self.graph = graph
        self.ids = {b.name: b.id for b in graph.buffers}
        self.builder.begin(
            tuple(Residency(self.ids[n], self._extent(n, at)) for n, at in resident.items())
        )

    def _extent(self, name: str, at: int) -> Extent:
        nbytes = self.graph.buffers[self.ids[name]].nbytes
        return Extent(at * 64, -(-nbytes // 64) * 64)

    def alloc(self, name: str, at: int, *vacators: int) -> Script:
        self.builder.alloc(self.ids[name], self._extent(name, at), list(vacators))
        return self

    def reload(self, name: str) -> Script:
        self.builder.reload(self.ids[name])
        return self

    def compute(self, *tasks: int) -> Script:
        for task in tasks:
            self.builder.compute(self.graph.tasks[task])
        return self

    def evict(self, name: str, *, is_needed: bool = True) -> int:
        return self.builder.evict(self.ids[name], is_needed=is_needed)

    def drop(self, name: str) -> int:
        return self.builder.drop(self.ids[name])

    def finish(self) -> MemGraph:
        return self.builder.finish()

    def edges(self, kind: EdgeKind) -> list[str]:
        return edges(self.finish(), kind)


# --- data ------------------------------------------------------------------------------------


def test_a_reader_waits_for_the_latest_writer_only() -> None:
    script = Script(sketch("a:64", "-> a", "a -> a", "a ->")).alloc("a", 0).compute(0, 1, 2)
    assert script.edges(EdgeKind.DATA) == ["compute 0 > compute 1", "compute 1 > compute 2"]


def test_state_needs_no_reload() -> None:
    """What lives outside the arena is in place: only its order matters."""
    script = Script(sketch("s:64", "s ->", "s -> s", "s ->")).compute(0, 1, 2)
    assert names(script.finish()) == ["compute 0", "compute 1", "compute 2"]
    assert script.edges(EdgeKind.ORDER) == ["compute 0 > compute 1"]
    assert script.edges(EdgeKind.DATA) == ["compute 1 > compute 2"]


# --- alloc -----------------------------------------------------------------------------------


def test_the_first_writer_waits_for_the_alloc() -> None:
    script = Script(sketch("a:64", "-> a", "a -> a")).alloc("a", 0).compute(0, 1)
    assert script.edges(EdgeKind.ALLOC) == ["alloc a > compute 0"]


def test_a_buffer_that_lives_in_the_arena_already_is_not_given_another_extent() -> None:
    with pytest.raises(AssertionError):
        Script(sketch("a:64", "-> a")).alloc("a", 0).alloc("a", 1)


# --- memory ----------------------------------------------------------------------------------


def test_an_alloc_waits_for_all_who_vacated_its_bytes() -> None:
    script = Script(sketch("w1:64 w2:64 w3:64 a:128", "w1 w2 w3 ->", "-> a"), w1=0, w2=1, w3=2)
    script.compute(0)
    first, second = script.drop("w1"), script.drop("w2")
    script.drop("w3")
    script.alloc("a", 0, first, second)
    assert script.edges(EdgeKind.MEMORY) == ["drop w1 > alloc a", "drop w2 > alloc a"]


# --- readers before the drop -----------------------------------------------------------------


def test_a_drop_waits_for_every_user_and_for_the_holder() -> None:
    script = Script(sketch("a:64", "-> a", "a ->", "a ->")).alloc("a", 0).compute(0, 1, 2)
    script.drop("a")
    assert script.edges(EdgeKind.READ_DROP) == [
        "alloc a > drop a",
        "compute 0 > drop a",
        "compute 1 > drop a",
        "compute 2 > drop a",
    ]


# --- users before the offload ----------------------------------------------------------------


def test_an_offload_waits_for_every_user_not_for_the_holder_alone() -> None:
    script = Script(sketch("a:64", "-> a", "a ->", "a ->")).alloc("a", 0).compute(0, 1, 2)
    script.evict("a")
    assert script.edges(EdgeKind.USE_OFFLOAD) == [
        "alloc a > offload a",
        "compute 0 > offload a",
        "compute 1 > offload a",
        "compute 2 > offload a",
    ]


# --- host copies before reloads --------------------------------------------------------------


def test_an_offload_waits_for_those_who_read_the_slot_before() -> None:
    """A buffer has one host slot: the copy in it must have been read, and written, before."""
    script = Script(sketch("a:64", "-> a", "a ->", "a -> a")).alloc("a", 0).compute(0)
    script.alloc("a", 1, script.evict("a")).reload("a").compute(1)
    script.alloc("a", 2, script.evict("a")).reload("a").compute(2)  # dropped: it was clean
    script.evict("a")
    last = [e for e in script.edges(EdgeKind.STORE_RELOAD) if e.endswith("offload a 2")]
    assert last == ["offload a > offload a 2", "reload a > offload a 2", "reload a 2 > offload a 2"]


def test_a_reload_without_a_host_copy_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Script(sketch("a:64", "-> a")).alloc("a", 0).reload("a")


# --- joins -----------------------------------------------------------------------------------


def test_a_join_waits_for_every_touch_and_stands_before_every_use() -> None:
    graph = sketch("a:64", "~ a", "~ a", "join a ->", "a ->")
    script = Script(graph).alloc("a", 0).compute(0, 1, 2, 3)
    assert script.edges(EdgeKind.JOIN) == ["compute 0 > compute 2", "compute 1 > compute 2"]
    assert script.edges(EdgeKind.DATA) == ["compute 2 > compute 3"]


# --- order -----------------------------------------------------------------------------------


def test_a_touch_waits_for_readers_and_writer_of_the_old_contents() -> None:
    graph = sketch("a:64", "-> a", "a ->", "~ a", "join a ->")
    script = Script(graph).alloc("a", 0).compute(0, 1, 2, 3)
    assert script.edges(EdgeKind.ORDER) == ["compute 0 > compute 2", "compute 1 > compute 2"]


# --- clean, dirty, unwritten -----------------------------------------------------------------


def test_a_reloaded_activation_is_clean_until_it_changes() -> None:
    script = Script(sketch("a:64", "-> a", "a ->", "a -> a")).alloc("a", 0).compute(0)
    script.alloc("a", 0, script.evict("a")).reload("a").compute(1)
    script.alloc("a", 0, script.evict("a")).reload("a").compute(2)
    script.evict("a")
    vacators = [n for n in names(script.finish()) if n.startswith(("drop", "offload"))]
    assert vacators == ["offload a", "drop a", "offload a 2"]


def test_what_will_be_overwritten_is_dropped() -> None:
    script = Script(sketch("a:64", "-> a", "-> a")).alloc("a", 0).compute(0)
    script.evict("a", is_needed=False)
    assert names(script.finish())[-1] == "drop a"
    assert script.finish().host_bytes == 0


def test_a_partly_touched_buffer_is_offloaded_with_the_touches_so_far() -> None:
    graph = sketch("a:64", "~ a", "~ a", "join a ->")
    script = Script(graph).alloc("a", 0).compute(0)
    script.alloc("a", 1, script.evict("a")).reload("a").compute(1, 2)
    assert script.edges(EdgeKind.USE_OFFLOAD) == ["alloc a > offload a", "compute 0 > offload a"]
    # Of the touches only the second is still open; the reload brought the first.
    assert script.edges(EdgeKind.JOIN) == ["compute 1 > compute 2"]
    assert script.edges(EdgeKind.DATA) == ["reload a > compute 2"]
    assert "reload a > compute 1" in script.edges(EdgeKind.ORDER)
    script.drop("a")
    check(script.finish())


def test_a_touch_makes_a_clean_buffer_dirty() -> None:
    graph = sketch("a:64", "-> a", "~ a", "join a ->")
    script = Script(graph).alloc("a", 0).compute(0)
    script.alloc("a", 0, script.evict("a")).reload("a").compute(1)
    script.evict("a")
    assert names(script.finish())[-1] == "offload a 2"


# --- host slots ------------------------------------------------------------------------------


def test_host_slots_lie_side_by_side_in_whole_units() -> None:
    graph = sketch("a1:100 a2:1 a3:64", "-> a1 a2 a3")
    script = Script(graph).alloc("a1", 0).alloc("a2", 2).alloc("a3", 3).compute(0)
    for name in ("a3", "a1", "a2"):
        script.evict(name)
    memgraph = script.finish()
    assert memgraph.host_slots == ((0, 64), (1, 192), (2, 0))
    assert memgraph.host_bytes == 256


def test_a_buffer_keeps_its_host_slot() -> None:
    script = Script(sketch("a:64", "-> a", "a -> a")).alloc("a", 0).compute(0)
    script.alloc("a", 0, script.evict("a")).reload("a").compute(1)
    script.evict("a")
    assert script.finish().host_slots == ((0, 0),)
    assert script.finish().host_bytes == 64


# --- begin and end ---------------------------------------------------------------------------


def test_a_plan_begins_with_the_resident_weights() -> None:
    script = Script(sketch("w1:64 w2:64 a:64 s:64", "w1 w2 s -> a"), w2=3)
    memgraph = script.finish()
    assert names(memgraph) == ["resident w2"]
    assert memgraph.entry == (Residency(1, Extent(192, 64)),)


def test_what_is_resident_at_the_end_is_the_exit() -> None:
    script = Script(sketch("w1:64 w2:64", "w1 ->"), w1=0, w2=1).compute(0)
    script.drop("w2")
    assert script.finish().exit == (Residency(0, Extent(0, 64)),)
