"""Types of settings with bounds."""

from typing import Annotated

from annotated_types import Ge, Gt, Le

Count = Annotated[int, Ge(1)]
Amount = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
