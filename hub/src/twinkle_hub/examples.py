"""What the contract kit calls the hubs with; nothing of it needs a network, and without one all of it holds."""

from pathlib import Path

_ROWS = ("dataset_rows", "unknown_keyword", "options_left_alone")
_NETWORK = "it needs a network; the tests of the package hold it on a hub of their own"

HF = {"scheme": "hf", "skip": dict.fromkeys((*_ROWS, "model_files"), _NETWORK)}
MS = {"scheme": "ms", "skip": dict.fromkeys((*_ROWS, "model_files"), _NETWORK)}
FILE = {
    "scheme": "file",
    "model": f"file://{Path(__file__).parent}",
    "skip": dict.fromkeys(_ROWS, "it needs a folder of rows; the tests of the package have one"),
}
