"""`python -m twinkle_server.data.process DESCRIPTOR`: the processes in which data resources live.

The first process imports the packages of data sets and templates, and forks; its children hold resources.
"""

import socket
import sys

from twinkle_server.workers.framing import PlainFrames
from twinkle_server.workers.process import Calls, run_first


def main(arguments: list[str]) -> None:
    """Serve until the service closes the socket."""
    if len(arguments) != 2 or not arguments[0].isdigit():
        sys.exit("usage: python -m twinkle_server.data.process DESCRIPTOR RULES; the service starts it")

    def calls() -> Calls:
        from twinkle_server.data.calls import DataCalls, import_all  # datasets, torch, transformers
        from twinkle_server.data.rules import Rules

        rules = Rules.parse(arguments[1])
        import_all(rules)
        return DataCalls(rules)

    run_first(socket.socket(fileno=int(arguments[0])), PlainFrames(), calls)


if __name__ == "__main__":
    main(sys.argv[1:])
