"""Data sets that are streams: their length is unknown, so a run over one says itself how long it is."""

from typing import Any

from twinkle._registry import registry
from twinkle.dataset.protocol import StreamLike
from twinkle.errors import ConfigError
from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.config.rows import DataConfig, parse_slice


def is_stream(data: DataConfig) -> bool:
    """Return whether the configured class reads rows one after the other; it is imported, nothing is loaded."""
    found: Any = registry().resolve(data.type, "dataset")
    return issubclass(found, StreamLike) if isinstance(found, type) else isinstance(found, StreamLike)


def check_stream(config: RunConfig) -> None:
    """Refuse what has no meaning for a stream, and what has one for streams alone; and rows that the recipe cannot use.

    Raises:
        ConfigError: with all problems at once.
    """
    data = config.data
    if not is_stream(data):
        if data.shuffle_buffer is not None:
            raise ConfigError(f"data.shuffle_buffer is for streams, and data.type {data.type} is none; leave it out")
        if hasattr(registry().resolve(data.type, "dataset"), "pack_dataset") and not config.takes_packs:
            raise ConfigError(
                f"data.type {data.type} puts several rows into one, and the recipe {config.recipe} needs each by "
                "itself; use Dataset (data.padding_free true spares the padding)"
            )
        return
    if not config.takes_streams:
        raise ConfigError(
            f"data.type {data.type} is a stream, and the recipe {config.recipe} needs rows with numbers; use Dataset"
        )
    problems = []
    if config.max_steps is None:
        problems.append("max_steps: give the number of optimizer steps; the stream begins again where it ends before")
    if getattr(config, "epochs", 1) != 1:
        problems.append("epochs: leave it out; max_steps says how long the run is")
    if data.eval_fraction and not data.separate_eval:
        problems.append(
            "data.eval_fraction: no part of a stream can be held out; give evaluation rows of their own by "
            "data.eval_id or data.eval_split, or data.eval_fraction 0"
        )
    if data.shuffle_buffer is not None and not data.shuffle:
        problems.append("data.shuffle_buffer: it has no meaning without data.shuffle")
    chosen = parse_slice(data.slice)
    if any(part is not None and part < 0 for part in (chosen.start, chosen.stop, chosen.step)):
        problems.append(f"data.slice {data.slice!r}: a stream goes forwards and has no known end; count from its start")
    if problems:
        raise ConfigError(
            "\n  ".join([f"data.type {data.type} is a stream, whose length nobody knows before its end:", *problems])
        )
