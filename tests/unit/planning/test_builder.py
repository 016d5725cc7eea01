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


def test_a_reader_waits_for_the_task_that_wrote() -> None:
    script = Script(sketch("a:64", "-> a", "a ->")).alloc("a", 0).compute(0, 1)
    assert script.edges(EdgeKind.DATA) == ["compute 0 > compute 1"]


def test_a_reader_waits_for_the_latest_writer_only() -> None:
    script = Script(sketch("a:64", "-> a", "a -> a", "a ->")).alloc("a", 0).compute(0, 1, 2)
    assert script.edges(EdgeKind.DATA) == ["compute 0 > compute 1", "compute 1 > compute 2"]


def test_a_reader_waits_for_the_reload() -> None:
    script = Script(sketch("w:64", "w ->")).alloc("w", 0).reload("w").compute(0)
    assert script.edges(EdgeKind.DATA) == ["reload w > compute 0"]


def test_a_reader_waits_for_a_weight_that_is_resident() -> None:
    script = Script(sketch("w:64", "w ->"), w=0).compute(0)
    assert script.edges(EdgeKind.DATA) == ["resident w > compute 0"]


def test_readers_do_not_wait_for_each_other() -> None:
    script = Script(sketch("w:64", "w ->", "w ->"), w=0).compute(0, 1)
    assert edges(script.finish()) == ["resident w > compute 0", "resident w > compute 1"]


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


def test_the_reload_waits_for_the_alloc_and_readers_for_the_reload_alone() -> None:
    script = Script(sketch("w:64", "w ->")).alloc("w", 0).reload("w").compute(0)
    assert script.edges(EdgeKind.ALLOC) == ["alloc w > reload w"]


def test_every_touch_waits_for_the_alloc() -> None:
    script = Script(sketch("a:64", "~ a", "~ a", "join a ->")).alloc("a", 0).compute(0, 1, 2)
    assert script.edges(EdgeKind.ALLOC) == ["alloc a > compute 0", "alloc a > compute 1"]


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


def test_an_alloc_of_fresh_bytes_waits_for_nobody() -> None:
    script = Script(sketch("a:64", "-> a")).alloc("a", 0)
    assert edges(script.finish()) == []


def test_an_offload_is_a_vacator_too() -> None:
    script = Script(sketch("a1:64 a2:64", "-> a1", "-> a2")).alloc("a1", 0).compute(0)
    script.alloc("a2", 0, script.evict("a1"))
    assert script.edges(EdgeKind.MEMORY) == ["offload a1 > alloc a2"]


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


def test_a_drop_does_not_wait_for_users_of_an_earlier_residence() -> None:
    script = Script(sketch("w:64", "w ->", "w ->"), w=0).compute(0)
    script.alloc("w", 1, script.drop("w")).reload("w").compute(1)
    script.drop("w")
    last = [e for e in script.edges(EdgeKind.READ_DROP) if e.endswith("drop w 2")]
    assert last == ["alloc w > drop w 2", "reload w > drop w 2", "compute 1 > drop w 2"]


def test_the_drop_of_a_reload_that_nobody_used_waits_for_it() -> None:
    script = Script(sketch("w:64", "w ->")).alloc("w", 0).reload("w")
    script.drop("w")
    assert "reload w > drop w" in script.edges(EdgeKind.READ_DROP)


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


def test_a_second_offload_waits_for_users_since_the_reload() -> None:
    script = Script(sketch("a:64", "-> a", "a -> a")).alloc("a", 0).compute(0)
    script.alloc("a", 1, script.evict("a")).reload("a").compute(1)
    script.evict("a")
    last = [e for e in script.edges(EdgeKind.USE_OFFLOAD) if e.endswith("offload a 2")]
    assert last == ["alloc a 2 > offload a 2", "compute 1 > offload a 2"]


# --- host copies before reloads --------------------------------------------------------------


def test_a_reload_of_a_weight_waits_for_no_copy() -> None:
    """Its master is in host memory when the pass begins."""
    script = Script(sketch("w:64", "w ->")).alloc("w", 0).reload("w")
    assert edges(script.finish()) == ["alloc w > reload w"]


def test_a_reload_waits_for_the_offload() -> None:
    script = Script(sketch("a:64", "-> a", "a ->")).alloc("a", 0).compute(0)
    script.alloc("a", 1, script.evict("a")).reload("a").compute(1)
    assert script.edges(EdgeKind.STORE_RELOAD) == ["offload a > reload a"]


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


def test_touches_are_free_to_run_in_any_order() -> None:
    script = Script(sketch("a:64", "~ a", "~ a", "join a ->")).alloc("a", 0).compute(0, 1, 2)
    assert "compute 0 > compute 1" not in edges(script.finish())


def test_a_second_round_of_touches_does_not_join_the_first_again() -> None:
    graph = sketch("a:64", "~ a", "join a ->", "~ a", "join a ->")
    script = Script(graph).alloc("a", 0).compute(0, 1, 2, 3)
    assert script.edges(EdgeKind.JOIN) == ["compute 0 > compute 1", "compute 2 > compute 3"]


def test_a_join_of_a_buffer_that_nobody_touched_is_a_reader() -> None:
    script = Script(sketch("w:64", "join w ->"), w=0).compute(0)
    assert script.edges(EdgeKind.DATA) == ["resident w > compute 0"]
    assert script.edges(EdgeKind.JOIN) == []


# --- order -----------------------------------------------------------------------------------


def test_a_change_in_place_waits_for_readers_of_the_old_contents() -> None:
    graph = sketch("a:64", "-> a", "a ->", "a ->", "a -> a")
    script = Script(graph).alloc("a", 0).compute(0, 1, 2, 3)
    assert script.edges(EdgeKind.ORDER) == ["compute 1 > compute 3", "compute 2 > compute 3"]


def test_an_overwrite_waits_for_the_writer_before_it() -> None:
    script = Script(sketch("a:64", "-> a", "-> a")).alloc("a", 0).compute(0, 1)
    assert script.edges(EdgeKind.ORDER) == ["compute 0 > compute 1"]


def test_a_touch_waits_for_readers_and_writer_of_the_old_contents() -> None:
    graph = sketch("a:64", "-> a", "a ->", "~ a", "join a ->")
    script = Script(graph).alloc("a", 0).compute(0, 1, 2, 3)
    assert script.edges(EdgeKind.ORDER) == ["compute 0 > compute 2", "compute 1 > compute 2"]


def test_readers_of_new_contents_are_not_waited_for_twice() -> None:
    graph = sketch("a:64", "-> a", "a ->", "a -> a", "a ->", "a -> a")
    script = Script(graph).alloc("a", 0).compute(0, 1, 2, 3, 4)
    assert script.edges(EdgeKind.ORDER) == ["compute 1 > compute 2", "compute 3 > compute 4"]


# --- clean, dirty, unwritten -----------------------------------------------------------------


def test_a_weight_is_always_clean() -> None:
    script = Script(sketch("w:64", "w ->"), w=0).compute(0)
    script.evict("w")
    assert names(script.finish())[-1] == "drop w"


def test_a_dirty_activation_is_offloaded() -> None:
    script = Script(sketch("a:64", "-> a")).alloc("a", 0).compute(0)
    script.evict("a")
    assert names(script.finish())[-1] == "offload a"


def test_a_reloaded_activation_is_clean_until_it_changes() -> None:
    script = Script(sketch("a:64", "-> a", "a ->", "a -> a")).alloc("a", 0).compute(0)
    script.alloc("a", 0, script.evict("a")).reload("a").compute(1)
    script.alloc("a", 0, script.evict("a")).reload("a").compute(2)
    script.evict("a")
    vacators = [n for n in names(script.finish()) if n.startswith(("drop", "offload"))]
    assert vacators == ["offload a", "drop a", "offload a 2"]


def test_what_nobody_has_written_is_dropped() -> None:
    script = Script(sketch("a:64", "-> a")).alloc("a", 0)
    script.evict("a")
    assert names(script.finish()) == ["alloc a", "drop a"]
    assert script.edges(EdgeKind.READ_DROP) == ["alloc a > drop a"]


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


def test_edges_are_sorted_and_one_a_pair() -> None:
    """A pair of nodes that has two reasons to wait has one edge, of the first kind."""
    memgraph = Script(sketch("a:64", "-> a", "a -> a")).alloc("a", 0).compute(0, 1).finish()
    pairs = [(e.before, e.after) for e in memgraph.edges]
    assert pairs == sorted(set(pairs))
    assert edges(memgraph, EdgeKind.DATA) == ["compute 0 > compute 1"]


def test_a_memgraph_by_hand_passes_the_checker() -> None:
    graph = sketch("w1:64 w2:64 a:64", "w1 -> a", "w2 a -> a", "a w1 ->")
    script = Script(graph, w1=0).alloc("a", 1).compute(0)
    script.alloc("w2", 0, script.evict("w1")).reload("w2").compute(1)
    script.alloc("w1", 0, script.evict("w2")).reload("w1").compute(2)
    script.drop("a")
    check(script.finish())
