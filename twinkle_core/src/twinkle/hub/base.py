"""The contract of a hub: what stands behind `scheme://`."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from twinkle.errors import Unsupported


class Hub(ABC):
    """Resolves references `scheme://...`; the component's name is its scheme. A hub overrides what it offers."""

    @abstractmethod
    def download_model(self, reference: str, **kwargs: Any) -> Path:
        """Return a local folder (or a GGUF file) with the model's files, fetched if need be."""

    @abstractmethod
    def load_dataset(self, reference: str, subset_name: str = "default", split: str = "train", **kwargs: Any) -> Any:
        """Return the rows: a list of dicts, or a `datasets.Dataset`."""

    def load_component(self, reference: str, kind: str, registry: Any) -> Any:
        """Return a component from code behind `reference`; only hubs that carry code offer this."""
        raise Unsupported(f"{kind} {reference!r}: this hub carries models and data, not components")
