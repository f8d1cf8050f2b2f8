"""The base of every configuration model: nothing unknown is accepted, and a misspelt key names the nearest one."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from twinkle.errors import ConfigError
from twinkle_registry import nearest

Arguments = dict[str, Any]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """A pydantic model without unknown keys. Assignments are checked like constructor arguments.

    Where there is a key `name` or `id`, a text alone stands for a mapping with that key.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, str) and (key := next((key for key in ("name", "id") if key in cls.model_fields), "")):
            return {key: values}
        if not isinstance(values, dict):
            return values
        known = list(cls.model_fields)
        for key in values:
            if key not in known:
                close = nearest(str(key), known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                raise ConfigError(f"unknown key {key!r}; {hint}")
        return values
