"""Examples for the contract kit's checks of hubs; they need no network."""

from pathlib import Path

_ROWS = ("dataset_rows", "unknown_keyword", "options_left_alone")
_NETWORK = "it needs a network; the tests of this package check it against a local fake hub"

HF = {"scheme": "hf", "skip": dict.fromkeys((*_ROWS, "model_files"), _NETWORK)}
MS = {"scheme": "ms", "skip": dict.fromkeys((*_ROWS, "model_files"), _NETWORK)}
FILE = {
    "scheme": "file",
    "model": f"file://{Path(__file__).parent}",
    "skip": dict.fromkeys(_ROWS, "it needs a folder with rows; the tests of this package check it"),
}
