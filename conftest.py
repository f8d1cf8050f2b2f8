"""What no test leaves behind for the next one in the same process."""

import functools
import gc
import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("twinkle", deadline=None)
hypothesis.settings.load_profile("twinkle")

if units := os.environ.get("TWINKLE_TEST_ROUND_BY_ROWS"):
    from twinkle_testing.other_machine import round_by_rows

    round_by_rows(float(units))


@pytest.hookimpl(tryfirst=True)  # before `-m` is obeyed
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of tests with the marker `sample` as `full`, except some: the first, the last, some between."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        (wanted,) = group[0].get_closest_marker("sample").args
        last = max(1, wanted - 1)
        chosen = {number * (len(group) - 1) // last for number in range(wanted)}
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker("full")


def pytest_collection_finish() -> None:
    """Exempt what collection made from garbage collection: each full one would look at millions of objects again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_folder_that_this_user_trusts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no test read or write which folders the person at this machine trusts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="module")
def no_setting_of_another_module(no_folder_that_this_user_trusts: None) -> Iterator[None]:
    """Fail where the tests of a module leave variables that Twinkle reads other than they were."""
    before = _settings()
    yield
    after = _settings()
    changed = {name: (before.get(name), after.get(name)) for name in before | after}
    changed = {name: values for name, values in changed.items() if values[0] != values[1]}
    for name, (old, _) in changed.items():  # so that one module fails, and not those after it
        os.environ.pop(name, None)
        os.environ.update({} if old is None else {name: old})
    assert not changed, f"tests of this module left these variables changed (before, after): {changed}"


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TWINKLE_")}


@pytest.fixture(autouse=True)
def no_runtime_of_another_test() -> Iterator[None]:
    """Let each test begin before any `twinkle.initialize`."""
    yield
    if current := sys.modules.get("twinkle.runtime.current"):
        vars(current)["_current"] = None
    if failures := sys.modules.get("twinkle_notifiers.failures"):
        failures.watch([], None)


@pytest.fixture(autouse=True)
def rounding_is_measured_once_a_process() -> None:
    """Let models of the same weights share how far rounding moves their results: each test opens such a model again.

    The measurement runs the same computation with noise; what it depends on is the computation, for which its result
    without noise stands here, to the bit.
    """
    numerics = sys.modules.get("twinkle_torch.numerics")
    if numerics is None or hasattr(numerics.measured_rounding, "measured"):
        return
    measure, measured = numerics.measured_rounding, {}

    @functools.wraps(measure)
    def once(call: Any, *, draws: int = 2, first: Any = None) -> Any:
        if first is None:
            return measure(call, draws=draws)
        bits = first.detach().cpu().contiguous().view(numerics.torch.uint8).numpy()
        key = draws, first.dtype, first.shape, hashlib.sha256(bits).digest()
        if key not in measured:
            measured[key] = measure(call, draws=draws, first=first)
        return measured[key].clone()

    once.measured = measured  # type: ignore[attr-defined]
    numerics.measured_rounding = once


@pytest.fixture(autouse=True, scope="module")
def no_patch_of_another_module() -> Iterator[None]:
    """Forget what a module's tests left patched: its models are gone or about to go."""
    yield
    if record := sys.modules.get("twinkle_patches.record"):
        vars(record)["_applications"].clear()
        vars(record)["_changes"].clear()
