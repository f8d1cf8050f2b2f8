"""Building checks every argument first, so that nothing is accepted and ignored."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_registry import ArgumentError, ComponentTypeError, Registry, check_keywords

House = Callable[..., Registry]


@pytest.fixture
def registry(site: Any, table: Any, house: House, loss_source: str) -> Registry:
    source = loss_source + "\nclass Half(Loss): ...\n\ndef plain(inputs): ...\n"
    refs = (
        table("PlainLoss", "acme.loss:PlainLoss") + table("Half", "acme.loss:Half") + table("plain", "acme.loss:plain")
    )
    site.plugin("acme", refs, loss=source)
    return house()


def test_a_class_is_instantiated_with_its_arguments(registry: Registry) -> None:
    built = registry.build("PlainLoss", "loss", 0.5, beta=1.0)
    assert (built.epsilon, built.beta) == (0.5, 1.0)
    assert registry.build(type(built), "loss").epsilon == 0.2


def test_parameters_may_be_called_like_those_of_build(registry: Registry) -> None:
    class Named:
        def __init__(self, x: int, kind: str) -> None:
            self.both = (x, kind)

    assert registry.build(Named, "optimizer", x=1, kind="a").both == (1, "a")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"epsilom": 1}, "unknown argument 'epsilom', nearest: 'epsilon'"),
        ((), {"zzz": 1, "bata": 2}, "unknown argument 'zzz'; unknown argument 'bata', nearest: 'beta'"),
        ((1, 2), {}, "at most 1 positional arguments are accepted, got 2"),
        ((1,), {"epsilon": 1}, "both positional and keyword: 'epsilon'"),
    ],
)
def test_a_wrong_argument_names_component_signature_and_nearest(
    registry: Registry, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        registry.build("PlainLoss", "loss", *args, **kwargs)
    assert str(error.value) == (
        f"loss 'PlainLoss': {message}. Its signature is PlainLoss(epsilon: float = 0.2, *, beta: float = 0.0)"
    )
    assert isinstance(error.value, TypeError)


def test_a_class_that_leaves_methods_open_cannot_be_built(registry: Registry) -> None:
    with pytest.raises(
        ComponentTypeError, match="loss 'Half' cannot be instantiated: Half does not implement '__call__'"
    ):
        registry.build("Half", "loss")


def test_an_instance_and_a_function_are_returned_as_they_are(registry: Registry) -> None:
    instance = registry.build("PlainLoss", "loss")
    assert registry.build(instance, "loss") is instance
    assert registry.build("plain", "loss").__name__ == "plain"


def test_arguments_for_an_instance_or_a_function_are_an_error(registry: Registry) -> None:
    instance = registry.build("PlainLoss", "loss")
    with pytest.raises(ArgumentError) as error:
        registry.build(instance, "loss", beta=1)
    assert str(error.value) == (
        "loss 'PlainLoss' is already an instance, so it takes no arguments here, got beta=…; pass the class"
    )
    with pytest.raises(
        ArgumentError, match=r"loss 'plain' is a function, so it takes no arguments here, got 3, beta=…; pass"
    ):
        registry.build("plain", "loss", 3, beta=1)


def test_errors_of_the_constructor_pass_unchanged(registry: Registry) -> None:
    class Fails:
        def __init__(self) -> None:
            raise ValueError("rank must be positive")

    with pytest.raises(ValueError, match="rank must be positive"):
        registry.build(Fails, "optimizer")


def check(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        check_keywords(function, kwargs, what="it", args=args)
    except ArgumentError as error:
        return str(error).removeprefix("it: ").partition(". Its")[0]
    return ""


def positional(a: int, b: int, /, c: int, *, d: int = 0) -> None: ...
def open_ended(a: int, *rest: int, key: int, **more: int) -> None: ...


def test_check_keywords_agrees_with_python() -> None:
    calls: list[tuple[tuple[int, ...], dict[str, int]]] = [
        (args, dict.fromkeys(names, 1))
        for args in ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))
        for names in ((), ("a",), ("c",), ("d",), ("key",), ("c", "d"), ("a", "key"), ("key", "x"), ("x",))
    ]
    for function in (positional, open_ended):
        for args, kwargs in calls:
            try:
                function(*args, **kwargs)
            except TypeError:
                assert check(function, *args, **kwargs), (function, args, kwargs)
            else:
                assert check(function, *args, **kwargs) == "", (function, args, kwargs)


def test_check_keywords_names_what_is_missing() -> None:
    assert check(positional) == "missing argument 'a', 'b', 'c'"
    assert check(positional, 1, 2, e=1) == "unknown argument 'e'; missing argument 'c'"
    assert check(open_ended, 1) == "missing argument 'key'"


def test_check_keywords_accepts_every_keyword_where_the_callable_does() -> None:
    assert check(open_ended, 1, key=2, anything=3) == ""


def test_a_partial_call_may_lack_arguments_but_have_no_unknown_one() -> None:
    check_keywords(positional, {"d": 1}, what="it", partial=True)
    with pytest.raises(ArgumentError, match="unknown argument 'dd', nearest: 'd'"):
        check_keywords(positional, {"dd": 1}, what="it", partial=True)


def test_a_callable_without_a_signature_is_not_checked() -> None:
    assert check(dict.fromkeys, 1, 2, 3, x=1) in (
        "",
        "unknown argument 'x'; at most 2 positional arguments are accepted, got 3",
    )
    assert check(type, 1, 2, 3, 4, x=1) == ""


def test_a_long_signature_is_told_by_its_first_names() -> None:
    def wide(**kwargs: Any) -> None: ...

    parameters = [inspect.Parameter(f"a_rather_long_name_{n}", inspect.Parameter.KEYWORD_ONLY) for n in range(30)]
    wide.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"unknown argument 'x'.* wide takes .*name_11 and 18 more$") as caught:
        check_keywords(wide, {"x": 1}, what="wide", partial=True)
    assert len(str(caught.value)) < 400
