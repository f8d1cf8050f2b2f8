"""Twinkle's logger: writes to stderr, only warnings on ranks other than 0; the root logger is not changed."""

import logging
import os
import sys

from twinkle.errors import SettingsError

LEVEL_VARIABLE = "TWINKLE_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StderrHandler(logging.Handler):
    """Writes to the present `sys.stderr`, unless the application has configured handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        # Records propagate to the root logger; if that has handlers, writing here would print every line twice.
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):
            self.handleError(record)


def get_logger(name: str = "twinkle") -> logging.Logger:
    """Return the logger `name`; the first call for its top-level name sets level and handler.

    The level is `$TWINKLE_LOG_LEVEL` if set; otherwise INFO on rank 0 and WARNING on the others. If an application
    configures Python's root logger, the records go only there.

    Raises:
        SettingsError: `TWINKLE_LOG_LEVEL` is not a level.
    """
    _configure(logging.getLogger(name.partition(".")[0]))
    return logging.getLogger(name)


def _configure(logger: logging.Logger) -> None:
    if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        return
    from twinkle.platform import Platform

    rank = f" [rank {Platform.get_rank()}]" if Platform.get_world_size() > 1 else ""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s{rank}: %(message)s"))
    logger.setLevel(_level(default="INFO" if Platform.is_master() else "WARNING"))
    logger.addHandler(handler)


def _level(default: str) -> str:
    asked = os.environ.get(LEVEL_VARIABLE, "").strip().upper() or default
    if asked not in _LEVELS:
        raise SettingsError(f"{LEVEL_VARIABLE} is {asked!r}; use one of {', '.join(_LEVELS)}")
    return asked
