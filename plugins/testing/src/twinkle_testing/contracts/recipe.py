"""Contract checks of recipes: a configuration that refuses unknown keys, and a run that returns a summary."""

import contextlib
import importlib
import inspect
import io
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, require
from twinkle_testing.contracts.values import as_json, shown

Values = Mapping[str, Any]


@dataclass(kw_only=True)
class RecipeCase(Case):
    """A recipe and a configuration that runs in seconds.

    Attributes:
        config: `package.module:Model` or the pydantic model; by default the manifest's `config`.
        values: values of the configuration, or a function of an empty folder that returns them.
    """

    kind = "recipe"

    config: Any = None
    values: Values | Callable[[Path], Values] = field(default_factory=dict)

    def model(self) -> Any:
        """Return the pydantic model of the configuration."""
        if not isinstance(self.config, str):
            return self.config
        module, _, name = self.config.partition(":")
        return getattr(importlib.import_module(module), name)

    def filled(self) -> Any:
        """Return the configuration with the example's values."""
        values = self.values(self.folder) if callable(self.values) else self.values
        return self.model()(**values)


def signature(case: RecipeCase) -> None:
    """It is called with the configuration and the run, by position."""
    try:
        inspect.signature(case.build()).bind(object(), object())
    except TypeError as error:
        require(False, f"it cannot be called as recipe(config, run): {error}")


def configuration(case: RecipeCase) -> None:
    """Its configuration is a pydantic model that describes each key and refuses any other key."""
    from pydantic import BaseModel, ValidationError

    model = case.model()
    require(model is not None, "the manifest names no config; write config = 'package.module:Config'")
    require(
        isinstance(model, type) and issubclass(model, BaseModel),
        f"its configuration is {shown(model)}, not a pydantic model",
    )
    silent = [name for name, key in model.model_fields.items() if not key.description and not _is_group(key.annotation)]
    require(not silent, f"these keys have no description: {', '.join(silent)}")
    try:
        model(no_such_key=1)
    except ValidationError as error:
        require("no_such_key" in str(error), f"no_such_key=1 is refused without being named: {error}")
        return
    require(False, "it accepts no_such_key=1; set model_config = ConfigDict(extra='forbid')")


def runs(case: RecipeCase) -> None:
    """With the example's values it runs to its end and returns a summary of plain values."""
    from twinkle.run import Run

    if not case.values:
        raise NotApplicable("its example gives no values= for a short run")
    config = case.filled()
    values = config.model_dump(mode="json")
    run = Run("contract", config=values, root=case.folder / "runs")
    with _inside(case.folder), contextlib.redirect_stdout(io.StringIO()), run:
        summary = case.build()(config, run)
    require(isinstance(summary, Mapping), f"it returned {shown(summary)}; return a mapping, such as the last metrics")
    as_json({name: str(value) if isinstance(value, Path) else value for name, value in summary.items()}, "its summary")
    require(run.step > 0, "it logged no step; call run.log(metrics, step)")


CASE = RecipeCase
CHECKS = (signature, configuration, runs)


def _is_group(annotation: Any) -> bool:
    """Return whether a field of the configuration is a nested model, possibly optional."""
    from pydantic import BaseModel

    members = [member for member in typing.get_args(annotation) or (annotation,) if member is not types.NoneType]
    return len(members) == 1 and isinstance(members[0], type) and issubclass(members[0], BaseModel)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
