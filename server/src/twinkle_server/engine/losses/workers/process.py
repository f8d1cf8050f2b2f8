"""`python -m twinkle_server.engine.losses.workers.process DESCRIPTOR`: the processes that compute losses of plugins.

The first process imports torch and forks; each of its children imports one plugin and forks again, and their children
compute.
"""

import socket
import sys

from twinkle_server.workers.process import Calls, run_first


def main(arguments: list[str]) -> None:
    """Serve until the engine closes the socket."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        sys.exit("usage: python -m twinkle_server.engine.losses.workers.process DESCRIPTOR; the engine starts it")
    from twinkle_server.engine.losses.workers.frames import TensorFrames  # torch

    run_first(socket.socket(fileno=int(arguments[0])), TensorFrames(), _calls)


def _calls() -> Calls:
    from twinkle_server.engine.losses.workers.calls import Calls, import_all  # torch, numpy, the registry

    import_all()
    return Calls()


if __name__ == "__main__":
    main(sys.argv[1:])
