"""`python -m twinkle_server.hub_uploads.process`: uploads one checkpoint; the order is a JSON line on standard input.

It writes a JSON line for each step: `{"files": ..., "bytes": ...}`, then `{"url": ...}` or `{"error": ...}`. The token
is in no argument and in no variable of the environment, and logins of the service's own user are not read.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from twinkle_server.engine.exports import EXPORT

_CONFIG: Final = "adapter_config.json"
_OWN: Final = "manifest.json"
_MODEL: Final = "config.json"
_STATE: Final = ("state.", "native")
"""Beginnings of the names of files with the state of training."""


def main() -> None:
    """Upload as ordered."""
    order = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print

    def tell(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    with tempfile.TemporaryDirectory(prefix="twinkle-upload-") as home:
        os.environ.update(_homes(home))
        try:
            folder = collect(Path(order["folder"]), Path(home) / "adapter", order["base"])
            files = list(folder.iterdir())
            tell(files=len(files), bytes=sum(file.stat().st_size for file in files))
            tell(url=_push(folder, order))
        except Exception as error:
            tell(error=_error_fields(error, str(order["token"])))


def collect(folder: Path, target: Path, base: str | None) -> Path:
    """Return a folder with the adapter of a checkpoint in PEFT's format, or a whole model, without training state.

    Args:
        folder: of the checkpoint.
        target: the folder to create.
        base: public id of the base model for `adapter_config.json`; None if it has none.

    Raises:
        FileNotFoundError: the checkpoint no longer exists, or holds no adapter in this format.
    """
    target.mkdir()
    names = [path.name for path in folder.iterdir() if path.is_file() and path.name != _OWN]
    if _MODEL in names:
        for name in names:
            if not name.startswith(_STATE):
                shutil.copyfile(folder / name, target / name)
        return target
    exported = [name for name in names if name.startswith((EXPORT, "adapter_"))]
    for name in exported:
        shutil.copyfile(folder / name, target / name.removeprefix(EXPORT))
    config = target / _CONFIG
    fields = json.loads(config.read_text("utf-8"))
    fields["base_model_name_or_path"] = base
    config.write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")
    return target


def _push(folder: Path, order: Mapping[str, Any]) -> str:
    from twinkle.hub import open_hub

    hub: Any = open_hub(order["reference"])
    url: str = hub.push(
        order["reference"], folder, path_in_repo=order["path_in_repo"], message=order["message"],
        private=order["private"], revision=order["revision"], token=order["token"],
    )  # fmt: skip
    return url


def _error_fields(error: Exception, token: str) -> dict[str, Any]:
    from twinkle.errors import TwinkleError

    text = str(error) if isinstance(error, TwinkleError) else f"{type(error).__name__}: {error}"
    return {
        "text": text.replace(token, "[hidden]")[:2000],
        "passing": type(error).__name__ == "Unreachable",
        "own": isinstance(error, TwinkleError),
    }


def _homes(home: str) -> dict[str, str]:
    """Return variables with which client libraries find no login and no cache of the service's user."""
    names = ("HF_HOME", "MODELSCOPE_CACHE", "MODELSCOPE_HOME", "TWINKLE_CACHE_DIR")
    return {
        **{name: str(Path(home) / name.lower()) for name in names},
        "MODELSCOPE_CREDENTIALS_PATH": str(Path(home) / "credentials"),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


if __name__ == "__main__":
    main()
