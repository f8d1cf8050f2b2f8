"""Contract checks of every kind."""

import inspect
import pickle
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, require

_WRONG = "no_such_argument"


def docstring(case: Case) -> None:
    """It has a docstring."""
    require(inspect.getdoc(case.component), "it has no docstring; describe it in one line")


def unknown_argument(case: Case) -> None:
    """Its constructor refuses unknown arguments with an error that names them."""
    if not case.is_class or getattr(case, "make", None) is not None:
        raise NotApplicable("the kit does not build it")
    try:
        case.build(**{_WRONG: 1})
    except Exception as error:  # any error type is allowed, but its message must name the argument
        require(
            _WRONG in str(error),
            f"given {_WRONG}=1 the constructor said {type(error).__name__}: {error}; it must name the argument",
        )
        return
    require(False, f"the constructor accepted {_WRONG}=1; declare its parameters without **kwargs")


def pickled(component: Any) -> Any:
    """Return the component after pickling and unpickling."""
    try:
        return pickle.loads(pickle.dumps(component))
    except Exception as error:  # pickling can raise any exception of the object's parts
        require(False, f"it cannot be pickled: {type(error).__name__}: {error}; keep what cannot travel out of it")


CHECKS = (docstring, unknown_argument)
