"""The command `twinkle`, and `CLI.from_args()` for scripts.

Commands are imported when they run, so `twinkle --help` is fast.
"""

from typing import TYPE_CHECKING, Any

from twinkle_cli.group import main

__all__ = ["CLI", "Args", "main"]


def __getattr__(name: str) -> Any:
    if name in ("CLI", "Args"):
        from twinkle_cli import arguments

        return getattr(arguments, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return list(__all__)


if TYPE_CHECKING:
    from twinkle_cli.arguments import CLI as CLI
    from twinkle_cli.arguments import Args as Args
