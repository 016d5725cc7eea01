"""Hypothesis strategies that draw taskgraphs: small, odd, and always well-formed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from ds_finepage.graph.taskgraph import JOIN, Buffer, BufferKind, Task, TaskGraph

MAX_TASKS = 14
MAX_NBYTES = 4096

_CHANGEABLE = (BufferKind.ACTIVATION, BufferKind.STATE, BufferKind.OUTPUT)


@dataclass
class _Draft:
    """A taskgraph in the making.

    Invariant: ``valid`` lists the buffers that may be read, ``pending`` those with touches that
    no join has closed; no buffer is in both.
    """

    draw: st.DrawFn
    sizes: list[int]
    buffers: list[Buffer] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)

    def new(self, kind: BufferKind) -> int:
        """Add a buffer; few distinct sizes, so that equal ones are common."""
        nbytes = self.draw(st.sampled_from(self.sizes))
        payload = bytes(nbytes) if kind is BufferKind.CONSTANT else None
        number = len(self.buffers)
        # Weights are named after modules of which some run tasks; others read them too.
        module = f"layer{number}." if kind is BufferKind.WEIGHT else ""
        self.buffers.append(Buffer(number, kind, nbytes, f"{module}{kind.value}{number}", payload))
        return number

    def some(self, of: list[int], least: int, most: int) -> list[int]:
        """Draw distinct buffers out of a list."""
        most = min(most, len(of))
        if most < least or most == 0:
            return []
        return self.draw(st.lists(st.sampled_from(of), min_size=least, max_size=most, unique=True))

    def changeable(self) -> list[int]:
        """Valid buffers that a task may change."""
        return [b for b in self.valid if self.buffers[b].kind in _CHANGEABLE]

    def add(
        self, op: str, reads: list[int], writes: list[int], touches: list[int] | None = None
    ) -> None:
        """Add a task."""
        self.tasks.append(
            Task(
                index=len(self.tasks),
                op=op,
                label=f"layer{len(self.tasks)}",
                reads=tuple(sorted(set(reads))),
                writes=tuple(sorted(set(writes))),
                touches=tuple(sorted(set(touches or []))),
                workspace_bytes=self.draw(st.sampled_from([0, 0, 100, 5000])),
                flops=self.draw(st.sampled_from([0, 1000, 10**6])),
                moved_bytes=self.draw(st.sampled_from([0, 4096])),
                time_ns=self.draw(st.sampled_from([None, 10, 1000])),
            )
        )

    def made(self) -> BufferKind:
        """Draw what a result is."""
        return self.draw(st.sampled_from([BufferKind.ACTIVATION] * 4 + [BufferKind.OUTPUT]))

    # One task of each sort.

    def plain(self) -> None:
        """Read some buffers, make one to three; dead results come about by themselves."""
        reads = self.some(self.valid, 0, 3)
        writes = [self.new(self.made()) for _ in range(self.draw(st.sampled_from([1, 1, 1, 2, 3])))]
        self.add("test.plain", reads, writes)
        self.valid += writes

    def in_place(self) -> None:
        """Change buffers that were read: activations, the KV cache, outputs."""
        changed = self.some(self.changeable(), 1, 2)
        self.add("test.in_place_", [*changed, *self.some(self.valid, 0, 2)], changed)

    def overwrite(self) -> None:
        """Write buffers anew, whatever they held."""
        changed = self.some(self.changeable(), 1, 1)
        reads = [b for b in self.some(self.valid, 0, 2) if b not in changed]
        self.add("test.overwrite", reads, changed)

    def touch(self, may_start: bool) -> None:
        """Write one region of one or two buffers: fresh ones, valid ones, ones touched before."""
        touched = self.some(self.pending, 0 if may_start else 1, 2)
        if may_start and (not touched or self.draw(st.booleans())):
            again = [b for b in self.changeable() if self.draw(st.integers(0, 3)) == 0]
            fresh = again[0] if again else self.new(self.made())
            touched.append(fresh)
            self.pending.append(fresh)
            self.valid = [b for b in self.valid if b != fresh]
        self.add("test.touch", self.some(self.valid, 0, 2), [], touched)

    def join(self) -> None:
        """Close the touches of the buffer that has waited longest."""
        joined = self.pending.pop(0)
        self.add(JOIN, [joined], [])
        self.valid.append(joined)


@st.composite
def taskgraphs(draw: st.DrawFn, max_tasks: int = MAX_TASKS) -> TaskGraph:
    """Draw a taskgraph of 1 to ``max_tasks`` tasks, without arguments and results.

    Every buffer that a task reads was written before or is given; every group of touches is
    closed by a join.
    """
    sizes = draw(
        st.lists(
            st.one_of(st.integers(1, MAX_NBYTES), st.sampled_from([1, 64, 65, 1024, MAX_NBYTES])),
            min_size=1,
            max_size=5,
        )
    )
    draft = _Draft(draw, sizes)
    for kind, most in (
        (BufferKind.WEIGHT, 6),
        (BufferKind.STATE, 2),
        (BufferKind.INPUT, 2),
        (BufferKind.CONSTANT, 1),
    ):
        draft.valid += [draft.new(kind) for _ in range(draw(st.integers(0, most)))]

    num_tasks = draw(st.integers(1, max_tasks))
    while len(draft.tasks) < num_tasks:
        left = num_tasks - len(draft.tasks)  # what is pending must still be joined
        sorts = ["plain", "plain", "plain"]
        if draft.changeable():
            sorts += ["in_place", "overwrite"]
        if draft.pending:
            sorts += ["join", "touch"]
        if left > len(draft.pending) + 1:
            sorts.append("start")
        match draw(st.sampled_from(sorts)) if left > len(draft.pending) else "join":
            case "plain":
                draft.plain()
            case "in_place":
                draft.in_place()
            case "overwrite":
                draft.overwrite()
            case "touch":
                draft.touch(may_start=False)
            case "start":
                draft.touch(may_start=True)
            case _:
                draft.join()
    return TaskGraph("drawn", tuple(draft.buffers), (), tuple(draft.tasks))
