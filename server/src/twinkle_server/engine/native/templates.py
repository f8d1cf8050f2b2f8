"""Templates of the served model, by name and options; they have no state, so that all models share them."""

import threading
from collections.abc import Sequence
from typing import Any, Final

import orjson

from twinkle import registry
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.native import components
from twinkle_server.engine.native.state import Named

DEFAULT: Final[Named] = ("Template", {})
_KEPT: Final = 64


class Templates:
    """Builds each template once.

    Args:
        folder: with the tokenizer of the served model; None if it has none.
        in_process: distributions beside Twinkle's whose components may run in this process.
    """

    def __init__(self, folder: str | None, in_process: Sequence[str] = ()) -> None:
        self._folder, self._in_process = folder, in_process
        self._lock = threading.Lock()
        self._built: dict[bytes, Any] = {}

    def get(self, named: Named | None) -> Any:
        """Return a template, the default one for None.

        Raises:
            UserError: there is none of this name, it refuses an option, or the model has no tokenizer.
        """
        name, options = named or DEFAULT
        key = orjson.dumps([name, options], option=orjson.OPT_SORT_KEYS)
        with self._lock:
            if key not in self._built:
                if self._folder is None:
                    raise UserError("the served model has no tokenizer; send rows with input_ids")
                spec = components.find("template", name, self._in_process)
                checked = components.check_options("template", name, options)
                self._built[key] = registry().build(spec, "template", model_id=self._folder, **checked)
                while len(self._built) > _KEPT:
                    del self._built[next(iter(self._built))]
            return self._built[key]
