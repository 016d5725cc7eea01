"""Faults in recorded runs: their limits, their graphs, and the passes that replay them."""

from __future__ import annotations

from tests.mutations.mutant import mutant

REPLAY = "unit/execution/test_replay.py"
ON_DEVICE = "accelerator/test_replay.py"
CONFIG = "unit/test_config.py"

REPLAYING = (
    mutant(
        "a-run-goes-on-after-a-task-that-others-wait-for",
        "execution/replay.py",
        "is_open = can_join and not step.signals",
        "is_open = can_join",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "a-run-takes-a-task-that-waits",
        "execution/replay.py",
        "if is_open and can_join and not step.waits:",
        "if is_open and can_join:",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "a-run-takes-any-task",
        "execution/replay.py",
        "if is_open and can_join and not step.waits:",
        "if is_open and not step.waits:",
        REPLAY,
    ),
    mutant(
        "a-run-follows-a-task-that-cannot-be-recorded",
        "execution/replay.py",
        "is_open = can_join and not step.signals",
        "is_open = not step.signals",
        REPLAY,
    ),
    mutant(
        "a-run-has-the-position-of-its-first-task",
        "execution/replay.py",
        "return replace(step, position=run[-1].position, signals=run[-1].signals)",
        "return replace(step, signals=run[-1].signals)",
        REPLAY,
    ),
    mutant(
        "a-run-signals-as-its-first-task",
        "execution/replay.py",
        "return replace(step, position=run[-1].position, signals=run[-1].signals)",
        "return replace(step, position=run[-1].position)",
        REPLAY,
    ),
    mutant(
        "random-tasks-are-recorded",
        "execution/replay.py",
        "return not (waits or leaves_the_plan or is_random(task))",
        "return not (waits or leaves_the_plan)",
        REPLAY,
    ),
    mutant(
        "tasks-with-memory-of-their-own-are-recorded",
        "execution/replay.py",
        "bound.call in (run_and_copy, copy_to_host) or task.workspace_bytes > 0",
        "bound.call in (run_and_copy, copy_to_host)",
        REPLAY,
    ),
    mutant(
        "tasks-whose-results-are-copied-are-recorded",
        "execution/replay.py",
        "bound.call in (run_and_copy, copy_to_host)",
        "bound.call is copy_to_host",
        REPLAY,
    ),
    mutant(
        "tasks-that-wait-for-the-router-are-recorded",
        "execution/replay.py",
        "return not (waits or leaves_the_plan",
        "return not (leaves_the_plan",
        REPLAY,
    ),
    mutant(
        "the-recording-stream-does-not-wait",
        "execution/replay.py",
        "        self._stream.wait_stream(current)\n",
        "",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "the-caller-does-not-wait-for-the-recording-stream",
        "execution/replay.py",
        "        current.wait_stream(self._stream)\n",
        "",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "a-recording-without-memory-is-no-error",
        "execution/replay.py",
        "        except torch.OutOfMemoryError:\n            raise\n",
        "",
        REPLAY,
    ),
    mutant(
        "graphs-are-never-too-many",
        "execution/replay.py",
        "        if len(self._replays) >= MOST_GRAPHS:\n            self.clear()\n",
        "",
        REPLAY,
    ),
    mutant(
        "graphs-that-run-are-dropped",
        "execution/replay.py",
        "        if self._replays:\n            self._device.synchronize()\n",
        "",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "dropped-graphs-are-replayed",
        "execution/replay.py",
        "        self.generation += 1\n",
        "",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "a-failed-recording-stays-open",
        "execution/device.py",
        "                with suppress(RuntimeError):  # the recording is void\n"
        "                    graph.capture_end()\n",
        "",
        f"{ON_DEVICE}::test_work_that_fails_ends_its_recording",
    ),
    mutant(
        "a-hook-sees-no-task-of-a-run",
        "execution/executor.py",
        "elif self._replayed is not None and not self._hooks:",
        "elif self._replayed is not None:",
        REPLAY,
        is_named=True,
    ),
    mutant(
        "tasks-on-tensors-of-a-call-are-recorded",
        "execution/bound_plan.py",
        "            if can_be_recorded(task, bound):\n",
        "            if True:\n",
        ON_DEVICE,
    ),
    mutant(
        "graphs-outlive-the-arena",
        "runtime/device_memory.py",
        "            self._graphs.clear()\n",
        "            pass\n",
        f"{ON_DEVICE}::test_graphs_go_with_the_arena",
        is_named=True,
    ),
    mutant(
        "debug-checks-do-not-come-between-tasks",
        "runtime/settings.py",
        "has_graphs and not self.shows_ops",
        "has_graphs",
        f"{ON_DEVICE}::test_debug_checks_come_between_the_tasks",
    ),
    mutant(
        "graphs-are-recorded-unasked",
        "runtime/settings.py",
        "return self.config.device_graphs and has_graphs",
        "return has_graphs",
        "accelerator/test_passes.py",
    ),
    mutant(
        "a-device-without-graphs-is-silent",
        "api.py",
        "if config.device_graphs and not device_of(where).has_graphs:",
        "if False:",
        f"{ON_DEVICE}::test_the_cpu_has_no_graphs_and_says_so",
    ),
)
