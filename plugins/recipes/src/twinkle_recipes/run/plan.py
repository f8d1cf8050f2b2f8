"""The plan of a run: plugin, version and location of each component in the configuration."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle._registry import registry
from twinkle.dataset import DatasetMeta
from twinkle.errors import ConfigError
from twinkle.hub import local_model, open_hub
from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle.hub.local import alias_of, reference_of, scheme_of
from twinkle.paths import write_text
from twinkle.run import fingerprints_of, parts_of
from twinkle_recipes.config import RunConfig
from twinkle_recipes.data import check_stream
from twinkle_recipes.display import Display
from twinkle_recipes.run.checkpoints import find_checkpoint
from twinkle_registry import ComponentSpec, check_keywords
from twinkle_registry.resolving import parse_reference

PACKAGES = ("twinkle-core", "twinkle-registry", "torch", "transformers", "peft", "datasets", "safetensors")


def check_early(config: RunConfig) -> None:
    """Run the checks that take little time, before libraries are imported and models are loaded.

    Raises:
        TwinkleError: no plugin offers a name, a local model or data set does not exist, or the configuration is invalid
            for a stream.
    """
    for kind, reference in components(config):
        if parse_reference(reference, kind).form == "name":
            registry().find(reference, kind)
    check_stream(config)
    for place in {config.data.id, config.data.eval_id or config.data.id}:
        if "://" not in place and not Path(place).expanduser().exists():
            config.build("dataset", config.data.type, DatasetMeta(place))  # its error lists the existing data sets
    for model in map(alias_of, config.models()):
        if scheme_of(model):
            open_hub(model).check_model(model)
        elif not Path(model).expanduser().exists():
            local_model(model)  # raises, or downloads it from the default hub


def components(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the (kind, reference) of every component that the configuration names, in the order of use."""
    yield from ((part.kind, part.name) for part in config.parts())


def make_plan(config: RunConfig) -> dict[str, Any]:
    """Resolve every component, without instantiating it, and return the plan; implicit components come last.

    Returns:
        `parts`: Kind, configured name, plugin, version and location of the code of each component.
        `packages`: Versions of Python and of the libraries that determine the numbers.

    Raises:
        TwinkleError: A name cannot be resolved, or a component does not take the configured arguments; so a
            misspelt one is reported early. Or a file of a resumed run was changed.
    """
    for kind, name, arguments in config.parts():
        component = config.component(kind, name)
        if isinstance(component, type) and arguments is not None:
            check_keywords(component, arguments, what=f"{kind} {name!r}", partial=True)
    _check_loss_inputs(config)
    references = dict.fromkeys([*components(config), *_unnamed(config)])
    parts = [*(_part(config, kind, name) for kind, name in references), *_started_from(config)]
    _check_files(config, parts)
    return {"parts": parts, "packages": _versions()}


def _started_from(config: RunConfig) -> Iterator[dict[str, str]]:
    """Yield the initial adapter of the run and a digest of its weights, which determine the reference model."""
    place = config.lora.init_from if config.lora is not None else None
    weights = Path(place or "", "adapter_model.safetensors")
    if place is not None and weights.is_file():
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        yield {"kind": "adapter", "asked": place, "plugin": "", "version": "", "ref": digest}


def base_models(config: RunConfig) -> list[dict[str, str]]:
    """Return the initial models of the run: `id`, `fingerprint` and, if from a hub, `commit` of each.

    Raises:
        ConfigError: the files of a model have changed since the run began.
        TwinkleError: a model does not exist, or cannot be downloaded.
    """
    folders = {name: local_model(name) for name in dict.fromkeys(config.models())}
    models = [{"id": n, "fingerprint": fingerprint(path), "commit": commit_of(path)} for n, path in folders.items()]
    earlier = {} if config.run_folder is None else fingerprints_of(config.run_folder)
    for model in models:
        before, now = earlier.get(model["id"], model["fingerprint"]), model["fingerprint"]
        if before != now:
            raise ConfigError(
                f"cannot continue the run in {config.run_folder}: its base model {model['id']} "
                f"was changed since: its fingerprint was {before}, and is {now} now; restore the model's files, or, to "
                "train the adapter on the changed model anyway, start a new run with --lora.init_from "
                f"{find_checkpoint(str(config.run_folder))}"
            )
    return models


def _check_files(config: RunConfig, parts: list[dict[str, str]]) -> None:
    """Refuse to continue a run if the user's component files have changed; the run folder has their digests."""
    if config.run_folder is None:
        return
    earlier = {(part["kind"], part["asked"]): part["ref"] for part in parts_of(config.run_folder)}
    for part in parts:
        kind, reference = part["kind"], part["asked"]
        is_own = kind == "adapter" or parse_reference(reference, kind).form == "file"
        if is_own and earlier.get((kind, reference), part["ref"]) != part["ref"]:
            raise ConfigError(
                f"cannot continue the run in {config.run_folder}: the file of the {kind} {reference} "
                "has been changed since; restore it, or start a new run from the checkpoint: --resume_from "
                f"{find_checkpoint(str(config.run_folder))}"
            )


def _check_loss_inputs(config: RunConfig) -> None:
    """Refuse a loss that does not accept the arguments of the training loop."""
    loss = config.component("loss", config.loss.name)
    inputs = dict.fromkeys(config.loss_inputs)
    text = f"the recipe {config.recipe} passes {', '.join(inputs)} to its loss, but {config.loss.name!r}"
    check_keywords(loss.__call__ if isinstance(loss, type) else loss, inputs, what=text, partial=True)


def measured_paths(*components: Any) -> list[dict[str, Any]]:
    """Return the measurements of the fast paths of models and samplers, for the plan."""
    return [measured.as_dict() for part in components if hasattr(part, "evidence") for measured in part.evidence()]


def show_paths(show: Display, paths: Sequence[Mapping[str, Any]]) -> None:
    """Show which fast paths are enabled, and why others are not; `plugins.json` has the measurements."""
    on = [path["path"] for path in paths if path["exact"]]
    off = [path["summary"] for path in paths if not path["exact"]]
    if paths:
        show.say("; ".join([f"fast paths on: {', '.join(on) or 'none'}", *off]))


def write_plan(plan: dict[str, Any], folder: Path) -> None:
    """Write the plan to `folder/plugins.json`."""
    write_text(folder / "plugins.json", json.dumps(plan, indent=2, ensure_ascii=False) + "\n")


def _unnamed(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the implicit components: the model's own metrics, and hubs."""
    model = config.component("model", config.model.type)
    yield from (("metric", name) for name in getattr(model, "default_metrics", ()))
    for place in (*map(alias_of, config.models()), config.data.id, config.data.eval_id or config.data.id):
        is_path = scheme_of(place) is None and Path(place).expanduser().exists()
        scheme = None if is_path else scheme_of(reference_of(place, bare=True) or "")
        if scheme is not None:
            yield "hub", scheme


def _part(config: RunConfig, kind: str, name: str) -> dict[str, str]:
    component, spec = config.component(kind, name), _spec(kind, name)
    if spec is not None:
        return {"kind": kind, "asked": name, "plugin": spec.dist, "version": spec.version, "ref": spec.ref}
    qualified = getattr(component, "__qualname__", type(component).__name__)
    place = f"{getattr(component, '__module__', '')}:{qualified}"
    return {"kind": kind, "asked": name, "plugin": "", "version": "", "ref": place}


def _spec(kind: str, reference: str) -> ComponentSpec | None:
    """Return the manifest entry of a name; None for a reference into a module, file or hub."""
    return registry().find(reference, kind) if parse_reference(reference, kind).form == "name" else None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
