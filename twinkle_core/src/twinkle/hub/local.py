"""Resolves a model id to a local folder: paths, aliases, GGUF files and `scheme://` references."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinkle.errors import (
    ArgumentError,
    ComponentNotFound,
    HubError,
    ModelLoadError,
    RequirementMissing,
    SettingsError,
)
from twinkle.hub.base import Hub

ALIASES = "TWINKLE_MODEL_ID_ALIASES"
DEFAULT_HUB = "TWINKLE_DEFAULT_HUB"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_BARE_ID = re.compile(r"[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_SHIPPED = ("hf", "ms", "file")
HUBS_OF_BARE_NAMES = ("hf",)
"""Hubs with repositories that have no owner, such as `hf://gpt2`."""


def open_hub(reference: str) -> Hub:
    """Return the hub that resolves `reference`, by its scheme.

    Args:
        reference: `scheme://...`.

    Raises:
        ComponentNotFound: `reference` has no scheme, or no installed plugin offers a hub of that name.
    """
    from twinkle._registry import registry

    scheme = scheme_of(reference)
    if scheme is None:
        raise ComponentNotFound(f"{reference!r} names no hub; write 'scheme://...', {_schemes()}")
    try:
        hub = registry().build(scheme, "hub")
    except ComponentNotFound as error:
        ways = "; run: pip install twinkle-hub" if scheme in _SHIPPED else ""
        raise ComponentNotFound(f"no hub for {reference!r}: nothing offers {scheme}://; {_schemes()}{ways}") from error
    if not isinstance(hub, Hub):
        raise ComponentNotFound(f"no hub for {reference!r}: {type(hub).__name__} is not a twinkle.hub.Hub")
    return hub


def local_model(model_id: str | Path, **kwargs: Any) -> Path:
    """Return the local Hugging Face folder of a model; download or convert it if necessary.

    Args:
        model_id: a folder with a config.json; a `.gguf` file, or a folder with exactly one (converted once to bfloat16
            safetensors and cached); a reference `scheme://...`; an id `owner/name` of the hub that
            `TWINKLE_DEFAULT_HUB` names, if there is no such path (with `hf` also `name` alone); or an id that the JSON
            map in `TWINKLE_MODEL_ID_ALIASES` translates to one of these.
        **kwargs: arguments of the hub, such as `revision`.

    Raises:
        ModelLoadError: the path does not exist or is not a model.
        HubError: the hub cannot be reached, refuses, or has no such repository.
        ComponentNotFound: no plugin offers the scheme.
        ArgumentError: the hub does not take a keyword argument, or the model is local.
        SettingsError: `TWINKLE_MODEL_ID_ALIASES` is not a JSON map of texts.
    """
    asked = str(model_id)
    if not asked:
        raise ModelLoadError("the model id is empty; give a model folder, a .gguf file or a scheme:// reference")
    place = alias_of(asked)
    path = Path(place).expanduser()
    if scheme_of(place) is None and path.exists():
        if kwargs:
            names = ", ".join(map(repr, sorted(kwargs)))
            raise ArgumentError(f"model {asked!r} is on this machine, so nothing takes {names}; leave it out")
        return _folder(path, asked)
    reference = reference_of(place, bare=True)
    if reference is None:
        raise ModelLoadError(_absent(asked, path))
    with about_missing_path(place):
        return _folder(_downloaded(reference, asked, kwargs), asked)


def local_folder(place: str | Path, **kwargs: Any) -> Path:
    """Return the local folder of a checkpoint or an adapter; a reference or an id is downloaded from its hub.

    Args:
        place: a path; `scheme://...`; or `owner/name` of the default hub, if there is no local folder `owner`.
        **kwargs: arguments of the hub, such as `token`; ignored for a path.

    Raises:
        HubError: the hub cannot be reached, refuses, or has no such repository.
    """
    text = str(place)
    path = Path(text).expanduser()
    is_path = scheme_of(text) is None and (path.exists() or Path(path.parts[0]).exists() if path.parts else True)
    reference = None if is_path else reference_of(text)
    if reference is None:
        return path
    with about_missing_path(text):
        return _downloaded(reference, text, kwargs)


def scheme_of(text: str) -> str | None:
    """Return `hf` of `hf://...`, and None for a text without scheme."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else None


def default_hub() -> str:
    """Return the hub of ids without a scheme: the value of `TWINKLE_DEFAULT_HUB`, or `ms`."""
    return os.environ.get(DEFAULT_HUB, "").strip().lower().removesuffix("://") or "ms"


def reference_of(text: str, *, bare: bool = False) -> str | None:
    """Return a text as a reference `scheme://...`; `owner/name` is of the default hub. None for a path.

    Args:
        text: an id or a path.
        bare: `name` alone is an id too, if the default hub has repositories without an owner.
    """
    if scheme_of(text):
        return text
    hub = default_hub()
    is_id = _ID.fullmatch(text) or (bare and hub in HUBS_OF_BARE_NAMES and _BARE_ID.fullmatch(text))
    return f"{hub}://{text}" if is_id else None


def alias_of(asked: str) -> str:
    """Return the alias that `TWINKLE_MODEL_ID_ALIASES` defines for an id, with or without scheme; else the id.

    Raises:
        SettingsError: the variable is not a JSON map of texts.
    """
    aliases = _aliases()
    return aliases.get(asked) or aliases.get(asked.partition("://")[2] if scheme_of(asked) else asked, asked)


@contextmanager
def about_missing_path(place: str) -> Iterator[None]:
    """Add to errors of the default hub that no local path has this name, because a path may have been meant."""
    try:
        yield
    except (HubError, ComponentNotFound, RequirementMissing) as error:
        if scheme_of(place):
            raise
        path = Path(place).expanduser()
        raise type(error)(
            f"{error}; there is no local {str(path.absolute())!r} either{_beside(path)}; for another hub, write its "
            f"scheme, such as {'ms' if default_hub() == 'hf' else 'hf'}://{place}"
        ) from error


def _beside(path: Path) -> str:
    from twinkle_registry import nearest

    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside, 1)
    return f" (nearest: {str(path.parent / close[0])!r})" if close else ""


def _downloaded(reference: str, asked: str, options: Mapping[str, Any]) -> Path:
    from twinkle_registry import check_keywords

    hub = open_hub(reference)
    check_keywords(hub.download_model, options, what=f"model {asked!r}", args=(reference,))
    return hub.download_model(reference, **options)


def _schemes() -> str:
    from twinkle._registry import registry

    names = registry().names("hub")
    return "there are: " + ", ".join(f"{name}://" for name in names) if names else "no hub is installed"


def _aliases() -> dict[str, str]:
    text = os.environ.get(ALIASES, "").strip()
    if not text:
        return {}
    try:
        aliases = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{ALIASES} is not JSON ({error}); write a map such as {{'Qwen/Qwen3': '/models/q'}}"
        ) from None
    if not isinstance(aliases, dict) or not all(isinstance(place, str) and place for place in aliases.values()):
        raise SettingsError(f"{ALIASES} must be a JSON map from model id to local path, both texts; it is {text!r}")
    return aliases


def _folder(path: Path, asked: str) -> Path:
    """Return the Hugging Face folder that `path` is or becomes."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        path = _only_gguf(path, asked)
    if path.suffix.lower() == ".gguf":
        from twinkle._registry import registry

        folder: Path = registry().export("twinkle.hub", "convert_gguf")(path)
        return folder
    raise ModelLoadError(f"model {asked!r}: {path} is a file but no .gguf; give the folder that holds config.json")


def _only_gguf(folder: Path, asked: str) -> Path:
    names = sorted(entry.name for entry in folder.iterdir())
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return folder / ggufs[0]
    if ggufs:
        raise ModelLoadError(f"model {asked!r}: {folder} holds several GGUF files; give one of {', '.join(ggufs)}")
    if "adapter_config.json" in names:
        raise ModelLoadError(
            f"model {asked!r}: {folder} is an adapter, not a model{_base_of(folder)}; load its base model and add the "
            "adapter to that (in a recipe: model.id and lora.init_from)"
        )
    held = f"it holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it is empty"
    raise ModelLoadError(
        f"model {asked!r}: {folder} has no config.json ({held}); a model folder has config.json, *.safetensors and the "
        "tokenizer's files"
    )


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" (of {base!r})" if base else ""


def _absent(asked: str, path: Path) -> str:
    from twinkle_registry import nearest

    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    siblings = sorted(entry for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf")
    models = [entry.name for entry in siblings if entry.suffix == ".gguf" or (entry / "config.json").is_file()]
    shown = nearest(path.name, [entry.name for entry in siblings]) or models[:8]
    there = f"{parent} holds {', '.join(shown)}" if shown else f"{parent} holds no model"
    ways = f"give the path of a model folder or a .gguf file, or map the id to one in {ALIASES}"
    if len(path.parts) <= 2 and not path.is_absolute() and not asked.startswith("."):
        ways += f"; a model of a hub is scheme://name, {_schemes()}"
    return f"model {asked!r} not found: there is no {path.absolute()}; {there}; {ways}"
