"""Passes on an accelerator: waits of the host, errors, memory that runs out, and other streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ds_finepage.config import DebugConfig
from ds_finepage.execution.bound_plan import BoundPlan
from ds_finepage.execution.probe import probe
from ds_finepage.execution.reload_sources import ReloadSources
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.profiles import require_usable
from ds_finepage.integrations.transformers.host_cache import HostLayer
from ds_finepage.runtime.device_memory import DeviceState
from tests.accelerator.subjects import AMPLE, Subject, subject
from tests.integration.families import CACHE, logits, token_ids

NUM_STEPS = 4


@pytest.fixture(scope="module")
def llama(device: torch.device) -> Iterator[Subject]:
    found = subject(device, "llama", num_hidden_layers=1)
    yield found
    found.detach()


# --- waits -----------------------------------------------------------------------------------


class Steps:
    """Decode steps of one generation, the last of which run the same plan."""

    def __init__(self, found: Subject, length: int) -> None:
        self._model = found.model
        self._ids = token_ids(1).to(found.device)
        with torch.no_grad():
            out = self._model(token_ids(length).to(found.device), use_cache=True)
        self._cache = out[CACHE]
        for _ in range(NUM_STEPS):
            self.run()

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            out = self._model(self._ids, **{CACHE: self._cache}, use_cache=True)
        found: torch.Tensor = out.logits
        return found


KNOWN = {
    "gather_rows": ReloadSources.gather_rows.__code__,
    "routed": BoundPlan._values.__code__,
    "settle": HostLayer.settle.__code__,
}


def waits_of(card: Any, run: Callable[[], object]) -> Counter[str]:
    """Return the functions in which the host waited for the device, and how often."""
    with card.syncs_recorded() as found:
        run()
    waits: Counter[str] = Counter()
    for reason, stack in found:
        names = [
            name
            for name, code in KNOWN.items()
            if f'"{code.co_filename}"' in stack and f", in {code.co_name}\n" in stack
        ]
        waits[names[0] if names else f"{reason}: {stack}"] += 1
    return waits


@pytest.mark.parametrize("share", (0, 1))
def test_a_decode_step_waits_for_its_tokens_alone(llama: Subject, card: Any, share: int) -> None:
    """The rows of an embedding are chosen in host memory: once a pass, before it begins."""
    llama.at(AMPLE)
    Steps(llama, 17)
    llama.at(llama.budgets[share])
    steps = Steps(llama, 17)
    assert waits_of(card, steps.run) == {"gather_rows": 1}


def test_a_decode_step_with_all_weights_on_the_device_never_waits(
    llama: Subject, card: Any
) -> None:
    llama.at(AMPLE)
    assert waits_of(card, Steps(llama, 17).run) == {}
    assert llama.handle._memory.state is DeviceState.RESIDENT


def test_a_decode_step_waits_for_the_router_of_each_layer_of_experts(
    device: torch.device, card: Any
) -> None:
    """Two layers, of two weights each."""
    found = subject(device, "mixtral", length=1, num_local_experts=8)
    found.at(found.budgets[0])
    steps = Steps(found, 1)
    step = max((m for m, _ in found.handle.plans()), key=lambda m: len(m.routed_reloads))
    assert len(step.routed_reloads) == 4
    assert waits_of(card, steps.run) == {"gather_rows": 1, "routed": 2}
    found.detach()


# --- spans -----------------------------------------------------------------------------------


def test_a_recorded_pass_never_waits_and_has_spans_of_every_step(llama: Subject, card: Any) -> None:
    llama.at(AMPLE)
    Steps(llama, 17)
    llama.at(llama.budgets[0])
    llama.handle.record()
    steps = Steps(llama, 17)
    card.set_delay("h2d", 2_000_000)
    assert waits_of(card, steps.run) == {"gather_rows": 1}
    found = {p.name: p for p in llama.handle.observed()}
    assert list(found) == ["prefill", "decode"]
    for each in found.values():
        assert each.measured is not None
        for timeline in (each.predicted, each.measured):
            assert {s.lane for s in timeline.spans} >= {Lane.COMPUTE, Lane.H2D}
        assert [(s.node, s.lane) for s in each.measured.spans] == [
            (s.node, s.lane) for s in each.predicted.spans
        ]
        for lane in Lane:
            times = [
                t for s in each.measured.spans if s.lane is lane for t in (s.start_ns, s.end_ns)
            ]
            assert times == sorted(times)
    decode = found["decode"].measured
    assert decode is not None
    slow = [s for s in decode.spans if s.lane is Lane.H2D]
    assert all(s.end_ns - s.start_ns >= 2_000_000 for s in slow)
    llama.handle.record(False)


def test_a_probe_measures_every_rate(device: torch.device) -> None:
    assert require_usable(probe(device, scratch_bytes=4 << 20)).host_copy_ns > 0


# --- errors ----------------------------------------------------------------------------------


def assert_idle(device: torch.device) -> None:
    """Check that no stream of the test device has work."""
    for number in range(33):
        stream = torch.Stream(stream_id=number, device_index=0, device_type=20)
        assert stream.query(), f"stream {number} still has work"


@pytest.mark.parametrize(
    ("error", "at"), [(ValueError, 0), (KeyboardInterrupt, 7), (ValueError, 20)]
)
def test_an_error_between_two_tasks_leaves_nothing_under_way(
    llama: Subject, card: Any, error: type[BaseException], at: int
) -> None:
    """Copies and ops that are enqueued take a while; the error waits for them."""
    llama.at(llama.budgets[0])
    card.set_delay("h2d", 2_000_000)
    tasks = iter(range(1000))

    def stop(task: Any, operands: Any) -> None:
        if next(tasks) == at:
            raise error("stop")

    remove = llama.handle.register_op_hook(before=stop)
    with pytest.raises(error, match="stop"):
        logits(llama.model, llama.ids)
    assert_idle(llama.device)
    remove()
    llama.check()


@pytest.mark.parametrize(
    ("kind", "later"), [("h2d", False), ("kernel", False), ("d2h", False), ("h2d", True)]
)
def test_an_operation_that_fails_is_an_error_and_the_next_call_is_right(
    llama: Subject, card: Any, kind: str, later: bool
) -> None:
    llama.at(llama.budgets[0])
    for share in (0, 100):
        llama.check()
        card.reset_counters()
        logits(llama.model, llama.ids)
        count = card.counters()[kind]
        assert count
        llama.check()  # the pass that fails comes after the same pass as the one that was counted
        card.fail_nth(kind, max(1, count * share // 100), later=later)
        with pytest.raises(RuntimeError, match="injected failure"):
            logits(llama.model, llama.ids).cpu()
        assert_idle(llama.device)
        card.fail_nth(kind, 0)
        llama.check()


# --- streams ---------------------------------------------------------------------------------


def test_a_hook_sees_the_tensors_of_the_device(llama: Subject) -> None:
    llama.at(llama.budgets[0])
    seen: list[float] = []

    def note(task: Any, results: tuple[torch.Tensor, ...]) -> None:
        seen.extend(float(r.float().sum()) for r in results if r.is_floating_point())

    remove = llama.handle.register_op_hook(after=note)
    assert torch.equal(logits(llama.model, llama.ids).cpu(), llama.logits)
    first, seen = seen, []
    assert torch.equal(logits(llama.model, llama.ids).cpu(), llama.logits)
    remove()
    assert first and len(first) > 20
    assert llama.handle._memory._graphs is None  # nobody asked for them


def test_delays_on_the_device_change_nothing(llama: Subject, card: Any) -> None:
    for seed in range(2):
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=seed, max_lane_delay_us=2000)
        llama.handle.replan(budget_bytes=llama.budgets[seed % 2], debug=debug)
        llama.check()
