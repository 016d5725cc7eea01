"""Chat with a model in the terminal, under a device budget.

The chat is transformers' own, with an endpoint as 'ds-finepage serve' has it.

Exit status: 0; 2 for a model or an option that cannot be used, or a budget without room.
"""

from __future__ import annotations

import argparse
import threading
from typing import Any

from ds_finepage.cli import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    serve.add_served(parser)


def run(arguments: argparse.Namespace) -> int:
    """Chat until the user leaves."""

    def talk(server: Any) -> None:
        from transformers.cli.chat import Chat

        answering = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        answering.start()
        try:
            Chat(arguments.model, serve.url_of(listening))
        except EOFError:
            pass  # the user has left
        finally:
            server.should_exit = True
            answering.join()

    with serve.listen(serve.LOCAL, port=0) as listening:
        serve.serve(arguments, listening, talk)
    return 0
