"""What has a copy in host memory, where not all weights have room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_finepage.checker.checker import violations
from ds_finepage.graph.memgraph import Lane, MemGraph, NodeKind
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.host_share import host_share, reloads_of, with_files
from ds_finepage.planning.simulator import predicted_ns, simulate
from tests.unit.planning.sketches import chain, plan

NUM, UNIT = 24, 1 << 20
PROFILE = replace(
    load_profile("v100-16gb"),
    h2d_bytes_per_s=8e9,
    disk_bytes_per_s=2e9,
    transfer_latency_ns=0,
    host_copy_ns=0,
    launch_ns=1000,
)


@pytest.fixture(scope="module")
def streaming() -> MemGraph:
    """A plan that reloads every weight, and has room for three."""
    return plan(chain(NUM, UNIT), arena_bytes=3 * UNIT + 64, policy="horizon")


def names_of(memgraph: MemGraph) -> set[str]:
    return {b.name for b in memgraph.graph.buffers if b.name.startswith("w")}


def sizes_of(memgraph: MemGraph) -> dict[str, int]:
    return {k: b.nbytes for k, b in reloads_of(memgraph, names_of(memgraph)).items()}


@pytest.mark.parametrize("room", [0, 1, 5, 12, 23, 24, 99])
def test_what_has_room_has_a_copy_and_no_more(streaming: MemGraph, room: int) -> None:
    sizes = sizes_of(streaming)
    held = host_share(sizes, (), room * UNIT + UNIT // 2)
    assert len(held) == min(room, NUM)
    planned = with_files(streaming, names_of(streaming), held)
    assert violations(planned) == []
    read = [n for n in planned.nodes if planned.lane_of(n) is Lane.DISK]
    assert planned.file_bytes == len(read) * UNIT == (NUM - len(held)) * UNIT
    assert planned.reloaded_bytes == streaming.reloaded_bytes


def test_the_reads_are_spread_over_the_pass(streaming: MemGraph) -> None:
    sizes, names = sizes_of(streaming), names_of(streaming)
    held = host_share(sizes, (), NUM // 2 * UNIT)
    places = [i for i, key in enumerate(sizes) if key not in held]
    assert all(b - a <= 3 for a, b in zip([-1, *places], [*places, NUM], strict=True))
    spread = predicted_ns(with_files(streaming, names, held), PROFILE)
    last = [*sizes][NUM // 2 :]
    first = predicted_ns(with_files(streaming, names, last), PROFILE)
    disk_ns = NUM // 2 * UNIT / PROFILE.disk_bytes_per_s * 1e9
    assert disk_ns <= spread <= 1.05 * disk_ns < 1.2 * disk_ns < first


def test_room_that_is_left_is_filled_by_smaller_weights() -> None:
    sizes = {"d": 2, "a": 4, "b": 4, "c": 4}
    assert host_share(sizes, (), 7) == {"b", "d"}


def test_a_copy_that_is_there_stays(streaming: MemGraph) -> None:
    sizes = sizes_of(streaming)
    held = set([*sizes][:2])
    chosen = host_share(sizes, {*held, "of another plan"}, 4 * UNIT)
    assert held < chosen and len(chosen) == 4 and chosen <= sizes.keys()


def test_the_first_pass_reads_residents_from_files_too(streaming: MemGraph) -> None:
    resident = plan(streaming.graph, arena_bytes=NUM // 2 * UNIT, policy="finepage")
    planned = with_files(resident, names_of(resident), ())
    missing = [r.buffer for r in planned.entry]
    assert missing
    spans = simulate(planned, PROFILE, entry_missing=missing).spans
    lanes = {s.lane for s in spans if planned.nodes[s.node].kind is NodeKind.RESIDENT}
    assert lanes == {Lane.DISK}


def test_a_disk_whose_rate_is_not_known_is_as_fast_as_the_link(streaming: MemGraph) -> None:
    planned = with_files(streaming, names_of(streaming), ())
    unknown, faster = (replace(PROFILE, disk_bytes_per_s=rate) for rate in (0.0, 1e12))
    assert predicted_ns(planned, PROFILE) > predicted_ns(streaming, PROFILE)
    assert predicted_ns(planned, faster) == predicted_ns(planned, unknown)
    assert predicted_ns(planned, unknown) >= NUM * UNIT / PROFILE.h2d_bytes_per_s * 1e9


def test_a_read_goes_over_the_link_too(streaming: MemGraph) -> None:
    """A few reads beside many copies take the time of all bytes on the link, and not less."""
    planned = with_files(streaming, names_of(streaming), [*sizes_of(streaming)][4:])
    link_ns = NUM * UNIT / PROFILE.h2d_bytes_per_s * 1e9
    assert link_ns <= predicted_ns(planned, PROFILE)
    as_fast = replace(PROFILE, disk_bytes_per_s=PROFILE.h2d_bytes_per_s)
    half = with_files(streaming, names_of(streaming), [*sizes_of(streaming)][::2])
    assert predicted_ns(half, as_fast) >= 0.95 * link_ns  # all but the end of the last read


def test_experts_in_parts_and_rows_of_a_table_are_read_from_no_file(streaming: MemGraph) -> None:
    graph = streaming.graph
    rows = replace(graph.buffers[0], gather=0)
    buffers = (rows, *graph.buffers[1:])
    tables = replace(streaming, graph=replace(graph, buffers=buffers))
    assert len(reloads_of(tables, names_of(tables))) == NUM - 1
    assert 0 not in with_files(tables, names_of(tables), ()).filed
