"""Loads rows of a data set with the `datasets` library, from the Hugging Face hub or from a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinkle.errors import DataError, HubError, RequirementMissing
from twinkle_hub.fetching import without_bars


def load(source: str | Path, place: str, subset_name: str, split: str, **options: Any) -> Any:
    """Return a `datasets.Dataset`, or an `IterableDataset` with `streaming=True`; the data set's own code is never run.

    Args:
        source: a folder, or `owner/name` on the Hugging Face hub.
        place: name of the source, for messages.
        subset_name: its configuration; `default` uses the data set's default.
        split: `train`, `test`, or a slice such as `train[:100]`.
        **options: for `datasets.load_dataset`.

    Raises:
        DataError: it has no such configuration or split, or its files cannot be read.
        RequirementMissing: the library is not installed.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as error:
        raise RequirementMissing(
            f"{place}: loading a data set requires the datasets library; run: pip install datasets"
        ) from error
    name = None if subset_name == "default" else subset_name
    options = {key: value for key, value in options.items() if value is not None}
    try:
        with without_bars("datasets.utils"):
            return datasets.load_dataset(str(source), name, split=split, **options)
    except (DatasetNotFoundError, HubError):
        raise
    except (
        ValueError,
        FileNotFoundError,
        datasets.exceptions.DatasetsError,
        datasets.exceptions.DatasetBuildError,
    ) as error:
        raise DataError(f"data set {place}: {_reason(error)}{_ways(error)}") from error


@contextmanager
def library_offline() -> Iterator[None]:
    """Restrict the library to its cache; it reads the environment variable for this only at import."""
    import datasets

    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _reason(error: BaseException) -> str:
    if isinstance(error.__cause__, Exception) and "generating the dataset" in str(error):
        error = error.__cause__
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:600]


def _ways(error: BaseException) -> str:
    text = str(error)
    if "Config name is missing" in text or "BuilderConfig" in text:
        return "; pass one as subset_name"
    if "split" in text.lower():
        return "; pass one of them as split"
    return ""
