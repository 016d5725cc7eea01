"""Show speed against budget: tokens a second and time to the first token, and where the knees are.

The price list of a model on a machine. Budgets go from the smallest that can run to the one under
which all weights stay resident, even if the device has less memory. Under small budgets the KV
cache is in host memory, as in a run. Several forms of the weights are planned under the same
budgets, and shown side by side.

Exit status: 0; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_finepage.capture.shipped import require_model
from ds_finepage.cli import options, output
from ds_finepage.cli.grid_rows import is_modelled_packing, packing_note
from ds_finepage.cli.progress import Progress
from ds_finepage.errors import ConfigError
from ds_finepage.files import write_file
from ds_finepage.graph.profiles import load_profile
from ds_finepage.reporting.curve import (
    Curve,
    CurvePoint,
    Need,
    at_least_as_good,
    price_table,
    round_speeds,
)
from ds_finepage.reporting.drawing import require_packages
from ds_finepage.reporting.figures import NS_PER_S
from ds_finepage.units import GIB

if TYPE_CHECKING:
    from ds_finepage.modeller import Modeller

PICTURES = ("png", "svg", "pdf")

MOST_SPEEDS = 4
"""Speeds to find budgets for, if the user names none."""

MARGIN = 0.15
"""Of the way to the next point: a budget for a speed is that much larger than it would have to be
if the time of a pass fell evenly."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_model(parser)
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    parser.add_argument("--points", type=int, default=8, help="budgets to plan (8)")
    parser.add_argument(
        "--tokens-per-s",
        metavar="LIST",
        help="speeds to find budgets for, with commas in between; by default round numbers",
    )
    options.add_host_memory(parser)
    output.add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: a .png, .svg or .pdf")
    options.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan under many budgets, print the list, draw it."""
    require_model(arguments.model)
    options.require_counts(arguments, "batch", "seq", "ranks")
    options.require_policies([arguments.policy])
    forms = options.weights_of(arguments)
    if arguments.points < 2:
        raise ConfigError(f"--points: {arguments.points} is not a curve. Write 2 or more.")
    profile = load_profile(arguments.hardware)
    options.note_link(arguments.ranks, profile)
    speeds = speeds_of(arguments.tokens_per_s)
    host_memory_bytes = options.host_memory_of(arguments.host_memory)
    if arguments.plot is not None:
        require_packages("--plot", "matplotlib")
        picture_kind(arguments.plot)
        options.require_writable(arguments.plot, force=arguments.force)

    curves = make_curves(arguments, forms, speeds, host_memory_bytes)
    if arguments.plot is not None:
        draw(curves, arguments.plot)
    if arguments.json:
        found = [curve.to_dict() for curve in curves]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return 0
    output.show(price_table(curves) if len(curves) > 1 else curves[0].to_table())
    for curve in curves:
        form = f"{curve.weights}: " if len(curves) > 1 else ""
        for sentence in curve.in_words():
            print(f"{form}{sentence}")
        if is_modelled_packing(arguments.policy, curve.weights):
            print(packing_note(str(curve.weights)))
    if arguments.plot is not None:
        print(f"picture: {arguments.plot}")
    return 0


def make_curves(
    arguments: argparse.Namespace,
    forms: Sequence[str | None],
    speeds: list[float] | None,
    host_memory_bytes: int | None,
) -> list[Curve]:
    """Plan the model in each form of its weights; several forms side by side, in processes.

    Args:
        arguments: The options.
        forms: The forms; one that is None stands for the model as it is.
        speeds: Tokens a second to find budgets for; None chooses round numbers.
        host_memory_bytes: Host memory of the machine; None if that is not known.

    Raises:
        ConfigError: The model, its form or a size cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    settings = [
        {
            "model": arguments.model,
            "batch": arguments.batch,
            "prompt_tokens": arguments.seq,
            "hardware": arguments.hardware,
            "split": not arguments.no_split,
            "host_memory_bytes": host_memory_bytes,
            "weights": form,
            "weights_group": arguments.weights_group,
            "num_ranks": arguments.ranks,
        }
        for form in forms
    ]
    num_speeds = MOST_SPEEDS if speeds is None else len(speeds)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(len(forms) * (1 + arguments.points + num_speeds)))
        make = Here if len(forms) == 1 else Apart
        workers = [stack.enter_context(closing(make(arguments.policy, each))) for each in settings]
        ends = [progress.after(worker.ends) for worker in workers]
        if len(forms) == 1:
            found = [bisected(workers[0], ends[0], arguments.points, progress)]
        else:
            budgets = common_budgets(ends, arguments.points)
            enough = [[b for b in budgets if b >= least] for least, _ in ends]
            found = ask_all(workers, "point", enough, progress)
        points = [at_least_as_good(each) for each in found]
        wanted = [
            speeds or round_speeds(each[0].tokens_per_s, each[-1].tokens_per_s, MOST_SPEEDS)
            for each in points
        ]
        asked = [[(w, each) for w in some] for some, each in zip(wanted, points, strict=True)]
        needs = ask_all(workers, "need", asked, progress)
        curves = [worker.ask("curve")() for worker in workers]
    return [
        replace(curve, points=each, needs=tuple(need for need in some if need is not None))
        for curve, each, some in zip(curves, points, needs, strict=True)
    ]


def ask_all(
    workers: Sequence[Here | Apart], name: str, asked: Sequence[Sequence[Any]], progress: Progress
) -> list[list[Any]]:
    """Ask each worker for several things; return its answers.

    Args:
        workers: The workers.
        name: A method of :class:`Planner`.
        asked: Its argument each time, for each worker.
        progress: Counts the answers.
    """
    answers = [[w.ask(name, a) for a in some] for w, some in zip(workers, asked, strict=True)]
    return [[progress.after(answer) for answer in some] for some in answers]


def bisected(
    worker: Here | Apart, ends: tuple[int, int], num_points: int, progress: Progress
) -> list[CurvePoint]:
    """Plan from the smallest budget to the one that pages nothing.

    Two thirds of the budgets are spread evenly. The others go where the speed jumps most.

    Args:
        worker: Plans.
        ends: Both budgets.
        num_points: Budgets to plan.
        progress: Counts them.
    """
    (points,) = ask_all(
        [worker], "point", [spread(*ends, max(1, num_points * 2 // 3 - 1))], progress
    )
    while len(points) < num_points:
        jumps = [b.tokens_per_s - a.tokens_per_s for a, b in pairwise(points)]
        at = jumps.index(max(jumps))
        budget = (points[at].budget_bytes + points[at + 1].budget_bytes) // 2
        if budget == points[at].budget_bytes:
            break  # nothing lies between them
        points.insert(at + 1, progress.after(worker.ask("point", budget)))
    return points


class Planner:
    """Plans both passes of a model under many budgets, and none twice."""

    def __init__(self, policy: str, modeller: Modeller) -> None:
        """Take a model.

        Args:
            policy: A key of ``POLICIES``.
            modeller: Plans its passes.
        """
        self.ends = modeller.ends(policy)
        self._modeller = modeller
        self._policy = policy
        self._points: dict[int, CurvePoint] = {}

    def point(self, budget_bytes: int) -> CurvePoint:
        """Plan both passes; budgets with room for everything have one plan."""
        enough = min(budget_bytes, self.ends[1])
        if enough not in self._points:
            self._points[enough] = self._planned(enough)
        fits = budget_bytes <= self._modeller.profile.capacity_bytes
        return replace(self._points[enough], budget_bytes=budget_bytes, fits=fits)

    def _planned(self, budget_bytes: int) -> CurvePoint:
        planned = self._modeller.at(budget_bytes).planned(self._policy)
        prefill, decode = (each.figures for each in planned)
        return CurvePoint(
            budget_bytes=budget_bytes,
            fits=True,
            kv_on_host=decode.kv_on_host,
            tokens_per_s=decode.tokens_per_s,
            tokens_per_s_bound=decode.batch * NS_PER_S / max(1, decode.lower_bound_ns),
            first_token_ns=prefill.predicted_ns,
            first_token_bound_ns=prefill.lower_bound_ns,
            decode_reloaded_bytes=decode.reloaded_bytes,
            prefill_reloaded_bytes=prefill.reloaded_bytes,
        )

    def need(self, asked: tuple[float, Sequence[CurvePoint]]) -> Need | None:
        """Find a budget that gives a speed; return None if no budget does.

        Between two points the time of a pass falls nearly evenly with the budget. The returned
        budget has been planned: the one that follows from that, with a margin, or the next point.

        Args:
            asked: The speed, and the points.
        """
        speed, points = asked
        above = next((i for i, p in enumerate(points) if p.tokens_per_s >= speed), None)
        if above is None:
            return None
        high = points[above]
        if above == 0:
            return Need(tokens_per_s=speed, budget_bytes=high.budget_bytes)
        low = points[above - 1]
        slow, fast = 1 / low.tokens_per_s, 1 / high.tokens_per_s
        share = (slow - 1 / speed) / (slow - fast)
        share += MARGIN * (1 - share)
        budget = low.budget_bytes + int(share * (high.budget_bytes - low.budget_bytes))
        step = self._modeller.at(budget).step(self._policy)
        if step.figures.tokens_per_s < speed:
            budget = high.budget_bytes
        return Need(tokens_per_s=speed, budget_bytes=budget)

    def curve(self) -> Curve:
        """Return the curve without its points."""
        decode, profile = self._modeller.decode, self._modeller.profile
        return Curve(
            model=decode.model,
            batch=decode.batch,
            seq=decode.seq,
            policy=self._policy,
            hardware=profile.name,
            weight_bytes=decode.graph.weight_bytes,
            capacity_bytes=profile.capacity_bytes,
            points=(),
            weights=self._modeller.weights,
            num_ranks=decode.num_ranks,
        )


class Here:
    """A planner in this process, which works when an answer is asked for."""

    def __init__(self, policy: str, settings: Mapping[str, Any]) -> None:
        """Take the settings of a :class:`Modeller`."""
        self._make = partial(planner_of, policy, settings)

    def ends(self) -> tuple[int, int]:
        """Capture the model; return the smallest budget, and the one that pages nothing."""
        self._planner = self._make()
        return self._planner.ends

    def ask(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Return what answers a question, the call of a method."""
        return partial(getattr(self._planner, name), *arguments)

    def close(self) -> None:
        """End."""


class Apart:
    """A planner in a process of its own, which works at once."""

    def __init__(self, policy: str, settings: Mapping[str, Any]) -> None:
        """Start the process, and let it capture the model."""
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.ends = self._pool.submit(_begin, policy, settings).result

    def ask(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Ask the process; return what waits for its answer."""
        return self._pool.submit(_answer, name, *arguments).result

    def close(self) -> None:
        """End the process once it has done what it does now."""
        self._pool.shutdown(cancel_futures=True)


_planner: Planner
"""Of a process that :class:`Apart` has started."""


def _begin(policy: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    global _planner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears of it, and ends this process
    _planner = planner_of(policy, settings)
    return _planner.ends


def _answer(name: str, *arguments: Any) -> Any:
    return getattr(_planner, name)(*arguments)


def planner_of(policy: str, settings: Mapping[str, Any]) -> Planner:
    """Capture both passes of a model."""
    from ds_finepage.modeller import Modeller  # imports torch: check the options first

    return Planner(policy, Modeller(**settings))


def spread(least: int, most: int, steps: int) -> list[int]:
    """Return budgets from one to another, in even steps."""
    return [least + (most - least) * i // steps for i in range(steps + 1)]


def common_budgets(ends: Sequence[tuple[int, int]], num_points: int) -> list[int]:
    """Return budgets for all forms: evenly spread over what each one can use."""
    steps = max(1, (num_points + 1) // len(ends) - 1)
    return sorted({budget for each in ends for budget in spread(*each, steps)})


def speeds_of(text: str | None) -> list[float] | None:
    """Read a list of speeds.

    Raises:
        ConfigError: An element is not a positive number.
    """
    if text is None:
        return None
    speeds = []
    for part in options.names_of(text, "--tokens-per-s"):
        try:
            speed = float(part)
        except ValueError:
            speed = 0.0
        if not 0 < speed < float("inf"):
            raise ConfigError(f"--tokens-per-s: {part!r} is not a number above 0.")
        speeds.append(speed)
    return speeds


def picture_kind(path: Path) -> str:
    """Read the kind of a picture from its name.

    Raises:
        ConfigError: Matplotlib cannot draw it.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in PICTURES:
        raise ConfigError(f"--plot: {path} must end in one of: {', '.join(PICTURES)}")
    return kind


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw speed above time to the first token, with bounds, knees and the device's size."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    speed, first = figure.subplots(2, sharex=True)
    for curve in curves:
        budgets = [p.budget_bytes / GIB for p in curve.points]
        label = " in ".join(filter(None, (curve.policy, curve.weights)))
        speed.plot(budgets, [p.tokens_per_s for p in curve.points], marker="o", label=label)
        bounds = [p.tokens_per_s_bound for p in curve.points]
        speed.plot(budgets, bounds, linestyle="--", color="gray")
        for step in curve.steps[1:]:
            speed.axvline(step.from_bytes / GIB, color="tab:orange", alpha=0.5)
        first.plot(budgets, [p.first_token_ns / NS_PER_S for p in curve.points], marker="o")
        bounds = [p.first_token_bound_ns / NS_PER_S for p in curve.points]
        first.plot(budgets, bounds, linestyle="--", color="gray")
    speed.plot([], [], linestyle="--", color="gray", label="bound, one batch at a time")
    speed.set_ylabel("tokens a second")
    first.set_ylabel("seconds to the first token")
    first.set_xlabel("device budget in GiB")
    capacity_bytes = curves[0].capacity_bytes
    largest_bytes = max(curve.points[-1].budget_bytes for curve in curves)
    for axes in (speed, first):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if capacity_bytes <= largest_bytes:
            axes.axvline(capacity_bytes / GIB, color="tab:red", label="the device's memory")
    speed.legend()
    shown = curves[0] if len(curves) == 1 else replace(curves[0], weights=None)
    figure.suptitle(shown.title)
    picture = io.BytesIO()
    figure.savefig(picture, format=picture_kind(path))
    write_file(path, picture.getvalue())
