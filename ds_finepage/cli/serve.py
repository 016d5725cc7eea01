"""Serve a model by an OpenAI-compatible endpoint, under a device budget.

The endpoint is transformers' own: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models
and /health. /metrics has the counters, in the text format of Prometheus. Before the weights are
read, the command says what the budget buys. It is ready when prompts of all lengths are planned.

Exit status: 0; 2 for a model or an option that cannot be used, or a budget without room.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from collections.abc import Callable
from typing import Any

from ds_finepage.cli import options, output
from ds_finepage.config import DeviceBudget, HostBudget
from ds_finepage.errors import CaptureError, ConfigError
from ds_finepage.graph.packed import PACKED_FORMS

LOCAL = "localhost"

USUAL_CLIENTS = 8
"""Clients that share a pass, if the user says no number."""

SETTINGS = ("device_budget", "host_budget", "host_compute", "draft")
"""Options that are keys of the ``finepage`` section."""

INSTALL = "pip install 'ds_finepage[serve]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_served(parser)
    parser.add_argument("--host", default=LOCAL, help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (%(default)s)")


def add_served(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model and its budget."""
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the hub")
    options.add_budget(parser)
    parser.add_argument("--host-budget", default="auto", help="as finepage.host_budget")
    parser.add_argument("--weights", choices=PACKED_FORMS, help="as finepage.weights")
    parser.add_argument("--draft", default="off", help='as finepage.draft: "stand-in", or a folder')
    parser.add_argument(
        "--host-compute", choices=("off", "auto"), default="off", help="as finepage.host_compute"
    )
    parser.add_argument(
        "--continuous-batching",
        type=int,
        nargs="?",
        const=USUAL_CLIENTS,
        default=1,
        metavar="CLIENTS",
        help="how many clients share a pass (%(const)s) and do not take turns; others wait",
    )
    parser.add_argument("--device", help="where to compute; by default the accelerator")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    with listen(arguments.host, arguments.port) as listening:
        serve(arguments, listening, lambda server: server.run(sockets=[listening]))
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Take a port, before anything is loaded; clients wait there until the endpoint is ready.

    Raises:
        ConfigError: It cannot be taken.
    """
    if not 0 <= port < 1 << 16:  # getaddrinfo() takes larger numbers too
        raise ConfigError(f"serve: --port {port} is no port. Name one from 0 to {(1 << 16) - 1}.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"serve: cannot listen at {host}, port {port}: {error}. Name another one with --port."
        ) from None
    if not ipaddress.ip_address(found.getsockname()[0]).is_loopback:
        options.note(f"the endpoint listens at {host}, so other machines can reach it")
    return found


def url_of(listening: socket.socket) -> str:
    """Return the address of the endpoint."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(
    arguments: argparse.Namespace, listening: socket.socket, go: Callable[[Any], None]
) -> None:
    """Load a model, say what its budget buys, plan, and answer requests.

    Args:
        arguments: The options.
        listening: Has the address.
        go: Runs the server.

    Raises:
        FinepageError: A package is missing, or the model or its budget cannot be used.
    """
    budget = DeviceBudget.parse(arguments.device_budget, name="--device-budget")
    HostBudget.parse(arguments.host_budget, name="--host-budget")
    clients = arguments.continuous_batching
    if clients < 1 or (clients > 1 and arguments.draft != "off"):
        raise ConfigError("serve: --continuous-batching takes a number from 1, and no --draft.")
    try:
        from ds_finepage.serving import endpoint, generations, worth
    except ImportError as error:
        raise ConfigError(f"serve: {error.name} is missing. Install it: {INSTALL}") from None
    from transformers.utils import logging

    from ds_finepage.execution.device import default_device, require_device

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    name = arguments.device
    device = default_device() if name is None else require_device(name, option="--device")
    profile = _measured(device, arguments)
    given: dict[str, Any] = {"weights": arguments.weights} if arguments.weights else {}
    room: worth.Room | None = None
    try:
        figures, room = worth.worth_of(arguments.model, budget, profile, clients=clients, **given)
        output.show_figures(f"{arguments.model} on {device}, predicted", figures.items())
        if figures["weights_bytes"] > figures["budget_bytes"] and arguments.draft == "off":
            given["kv_cache"] = "host"  # so all requests share their plans, short and long ones
    except CaptureError as error:
        if clients > 1:
            raise ConfigError(f"serve: --continuous-batching needs a prediction: {error}") from None
        options.note(f"nothing is predicted: {error}")
    given |= {name: vars(arguments)[name] for name in SETTINGS}
    served = endpoint.AttachedModel(arguments.model, device=device, profile=profile, **given)
    room = room or worth.Room(worth.context_of(served.model.config))
    turns = generations.Generations(room.longest)
    batches = generations.Batches(room) if clients > 1 else None
    way = batches or turns
    server = endpoint.Server(endpoint.app_of(served, turns, batches), way.end)
    try:
        for length in way.warm_up(served.model, served.processor):
            print(f"planned: prompts of up to {length} tokens", flush=True)
        print(f"ready: {url_of(listening)}/v1", flush=True)
        go(server)
    finally:
        way.end()
    served.handle.detach()


def _measured(device: Any, arguments: argparse.Namespace) -> Any:
    """Measure the device, and the host where it is to compute and has kernels."""
    from ds_finepage.api import PROBE_SCRATCH_BYTES, why_no_kernels
    from ds_finepage.execution.probe import probe, with_measured_host

    profile = probe(device, scratch_bytes=PROBE_SCRATCH_BYTES)
    if arguments.host_compute == "off" or why_no_kernels(bool(arguments.weights)) is not None:
        return profile
    return with_measured_host(profile, device, scratch_bytes=PROBE_SCRATCH_BYTES)
