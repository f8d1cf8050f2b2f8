"""A second checkpoint with the same files, which lives and ends on its own."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle_server.engine.files import Published, publish, verify


def copy_checkpoint(source: Path, target: Path, facts: Mapping[str, Any] | None = None) -> Published:
    """Publish a checkpoint's files a second time, without a second place on the disk where links can be made.

    Args:
        source: a published folder; its files are compared with their hashes.
        target: where the copy goes; not there yet.
        facts: said in the copy's manifest; None takes the source's.

    Raises:
        Damaged: the source is not what was published.
        OSError: the disk took no more.
    """
    manifest = verify(source)

    def write(folder: Path) -> None:
        for name in manifest.files:
            _place(source / name, folder / name)

    return publish(target, write, manifest.facts if facts is None else facts)


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target, follow_symlinks=False)
