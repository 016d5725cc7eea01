"""Faults of reports and traces."""

from __future__ import annotations

from tests.mutations.mutant import mutant

COMMAND = "integration/cli/test_report.py"
DRAWING = "unit/reporting/test_drawing.py"
FINDINGS = "unit/compare/test_findings.py"
MEMORY = "unit/reporting/test_memory.py"
PAGE = "unit/reporting/test_page.py"
WRITER = "unit/runtime/test_report_writer.py"

REPORTING = (
    mutant(
        "a-system-above-the-budget-stands-beside-ours",
        "compare/findings.py",
        "run.arm in ARMS and holds_budget(run)",
        "run.arm in ARMS and run.reason is None",
        FINDINGS,
    ),
    mutant(
        "a-report-is-written-only-at-exit",
        "runtime/handle.py",
        "                self._report.write()\n",
        "                pass\n",
        WRITER,
    ),
    mutant(
        "a-report-without-detach-is-lost",
        "runtime/report_writer.py",
        "            atexit.register(self.write)\n",
        "            pass\n",
        WRITER,
    ),
    mutant(
        "a-failed-report-fails-the-run",
        "runtime/report_writer.py",
        "        except Exception as error:\n            # A report",
        "        except KeyError as error:\n            # A report",
        WRITER,
    ),
    mutant(
        "a-comparison-is-replaced-by-a-run",
        "runtime/report_writer.py",
        "        if not is_ours:\n",
        "        if False:\n",
        WRITER,
    ),
    mutant(
        "the-bytes-of-first-runs-are-left-out",
        "runtime/report_writer.py",
        "copied[span.lane] += found.memgraph.bytes_at(nodes[span.node])",
        "copied[span.lane] += 1",
        WRITER,
    ),
    mutant(
        "a-page-is-not-escaped",
        "reporting/page.py",
        "autoescape=True",
        "autoescape=False",
        PAGE,
    ),
    mutant(
        "workspace-is-no-memory",
        "reporting/memory.py",
        "rows.append({**now, MemoryKind.WORKSPACE: workspace_bytes})",
        "rows.append(dict(now))",
        MEMORY,
    ),
    mutant(
        "a-weight-leaves-as-soon-as-it-may",
        "reporting/memory.py",
        "complete[node_id] = max(complete[node_id], end)",
        "pass",
        MEMORY,
    ),
    mutant(
        "lanes-are-drawn-to-different-scales",
        "reporting/drawing.py",
        "width = width_ns or max([1, *(timeline.total_ns for _, timeline, _ in rows)])",
        "width = width_ns or max(1, rows[0][1].total_ns)",
        DRAWING,
    ),
    mutant(
        "an-arm-above-the-budget-stands-out",
        "reporting/drawing.py",
        "FAINT if remark else VERMILION if ns == best_ns else SKY for _, _, ns, remark in arms",
        "VERMILION if ns == best_ns else SKY for _, _, ns, remark in arms",
        DRAWING,
    ),
    mutant(
        "ops-are-as-fast-on-every-machine",
        "compare/findings.py",
        "replace(task, time_ns=None)",
        "task",
        FINDINGS,
    ),
    mutant(
        "a-trace-forgets-the-measured-times",
        "cli/trace.py",
        "            if each.measured is not None:\n",
        "            if False:\n",
        COMMAND,
    ),
)
