"""Faults of the checker, and of the plain data that it reads."""

from __future__ import annotations

from tests.mutations.mutant import mutant

CHECKER = "unit/checker"
ROUTING = "unit/planning/rewrite/test_late_experts.py"

CHECKING = (
    mutant(
        "a-routed-reload-behind-its-task-is-accepted",
        "checker/walk.py",
        "if route.buffer in self.kept or route.task in self.computed:",
        "if route.buffer in self.kept:",
        ROUTING,
        is_named=True,
    ),
    mutant(
        "a-part-of-a-weight-is-kept",
        "checker/walk.py",
        "if route.buffer in self.kept or route.task in self.computed:",
        "if route.task in self.computed:",
        ROUTING,
    ),
    mutant(
        "slices-are-told-by-other-contents",
        "checker/walk.py",
        "if life is None or life.contents != self.expected[route.task][tells]:",
        "if life is None:",
        ROUTING,
    ),
    mutant(
        "vacators-are-not-waited-for",
        "checker/arena.py",
        "vacators[segment.vacator] = None",
        "pass",
        CHECKER,
    ),
    mutant(
        "live-extents-may-overlap",
        "checker/arena.py",
        "            elif segment.tenant is not None:",
        "            elif False:",
        CHECKER,
    ),
    mutant(
        "extents-may-begin-anywhere",
        "checker/arena.py",
        "if extent.offset % self._memgraph.alignment:",
        "if False:",
        CHECKER,
    ),
    mutant(
        "extents-may-end-behind-the-arena",
        "checker/arena.py",
        "or extent.end > self._memgraph.arena_bytes:",
        "or extent.end > self._memgraph.arena_bytes + 1:",
        CHECKER,
    ),
    mutant(
        "dirty-contents-may-be-dropped",
        "checker/walk.py",
        "and self.host.contents.get(buffer) != life.contents",
        "and False",
        CHECKER,
    ),
    mutant(
        "host-copies-may-be-overwritten",
        "checker/host.py",
        "self._require_users_done(node.id, buffer)",
        "pass",
        CHECKER,
    ),
    mutant(
        "stale-host-copies-may-come-back",
        "checker/host.py",
        "or self.contents[buffer] != latest:",
        "or False:",
        CHECKER,
    ),
    mutant(
        "state-may-end-with-other-contents",
        "checker/walk.py",
        "if life.contents != self.final[buffer]:",
        "if False:",
        CHECKER,
    ),
    mutant(
        "rows-of-the-last-call-may-be-resident",
        "checker/walk.py",
        "if self.graph.buffers[buffer].gather is not None:",
        "if False:",
        CHECKER,
    ),
    mutant(
        "a-node-may-wait-for-itself",
        "checker/shape.py",
        "elif edge.before >= edge.after:",
        "elif edge.before > edge.after:",
        CHECKER,
    ),
    mutant(
        "the-checker-looks-at-shape-alone",
        "checker/checker.py",
        "return shape_violations(memgraph) or Walk(memgraph).run()",
        "return shape_violations(memgraph)",
        CHECKER,
    ),
    mutant(
        "a-slice-of-experts-may-end-within-a-row",
        "checker/shape.py",
        "if buffer.offset % num or buffer.nbytes % num or end > experts.nbytes:",
        "if end > experts.nbytes:",
        "unit/planning/rewrite/test_split_experts.py",
    ),
    mutant(
        "as-many-rows-as-experts-are-routed",
        "graph/routes.py",
        "or rows >= num_slices:",
        "or rows > num_slices:",
        "unit/graph/test_routes.py",
    ),
    mutant(
        "a-weight-of-two-uses-is-routed",
        "graph/routes.py",
        "return {b: route for b, route in found.items() if len(graph.uses[b]) == 1}",
        "return found",
        "unit/graph/test_routes.py",
    ),
    mutant(
        "a-routed-reload-counts-whole",
        "graph/memgraph.py",
        "return nbytes if route is None else route.most_bytes(nbytes)",
        "return nbytes",
        ROUTING,
    ),
    mutant(
        "the-plan-of-another-model-is-read",
        "graph/codec.py",
        "if made_for[1:] != at_hand[1:]:",
        "if made_for[2:] != at_hand[2:]:",
        "unit/graph/test_codec.py",
    ),
    mutant(
        "a-half-written-file-is-left",
        "files.py",
        "temporary.unlink(missing_ok=True)",
        "pass",
        "unit/graph/test_codec_files.py",
    ),
    mutant(
        "a-row-may-lack-a-field",
        "graph/codec.py",
        "if isinstance(row, dict) and row.keys() != names:",
        "if False:",
        "unit/graph/test_codec_refusals.py",
    ),
    mutant(
        "a-taskgraph-may-name-what-is-not-there",
        "graph/codec.py",
        "map(attrgetter(column), getattr(graph, table)), num_ids)",
        "(), num_ids)",
        "unit/graph/test_codec_refusals.py",
    ),
    mutant(
        "a-file-of-another-form-is-read",
        "graph/codec.py",
        "if type(version) is not int or version != form.version:",
        "if type(version) is not int:",
        "unit/graph/test_codec_refusals.py",
    ),
)
