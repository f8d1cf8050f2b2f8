"""A model's state on the disk: tensors as safetensors, everything else as JSON; never a pickle."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from twinkle_server.engine.backend import UserError
from twinkle_server.payloads import Create

TENSORS: Final = "state.safetensors"
STATE: Final = "state.json"
FORMAT: Final = 1
_BROKEN: Final = "the files of this checkpoint are damaged or incomplete; save it again"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A copy of a model's state, which later operations do not change.

    Attributes:
        create: how the model was made.
        tensors: by name, on the host.
        state: what JSON can hold.
    """

    create: Create
    tensors: Mapping[str, Any]
    state: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write it into a folder that is there; any thread may."""
        save_file(dict(self.tensors), folder / TENSORS)
        said = {"format": FORMAT, "create": asdict(self.create), "state": dict(self.state)}
        (folder / STATE).write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))

    @property
    def snapshot(self) -> dict[str, Any]:
        """What the pool takes it back as."""
        return {"tensors": self.tensors, "state": self.state}

    @classmethod
    def read(cls, folder: Path) -> "SavedState":
        """Read what `write` wrote.

        Raises:
            UserError: something is missing, damaged, or of a later version.
        """
        try:
            said = orjson.loads((folder / STATE).read_bytes())
            version = said["format"]
            create, state = Create(**said["create"]), dict(said["state"])
            tensors = load_file(folder / TENSORS)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(_BROKEN) from error
        if version != FORMAT:
            raise UserError(f"this checkpoint has the format {version!r}, and this service reads {FORMAT}")
        return cls(create, tensors, state)


def is_state(folder: Path) -> bool:
    """Say whether a folder holds a state, and not an adapter's weights alone."""
    return (folder / STATE).is_file()
