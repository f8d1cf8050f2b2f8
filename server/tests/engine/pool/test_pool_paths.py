"""A service says which fast paths are on for its model, and works without them."""

import pytest
from server_pool import Bench

PATHS = {"packing", "prefixes", "fused", "steps"}


def test_all_paths_of_the_tiny_model_are_on_with_their_numbers(shared: Bench) -> None:
    paths = shared.executor.describe().paths
    assert {path["path"]: path["exact"] for path in paths} == dict.fromkeys(PATHS, True)
    assert all(path["difference"] <= 16 * path["rounding"] for path in paths)
    assert all(path["summary"].startswith(f"{path['path']} on") for path in paths)


def test_without_fast_paths_the_reasons_are_given(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "all")
    paths = fresh().executor.describe().paths
    assert {path["path"] for path in paths} == PATHS
    assert all("disabled by TWINKLE_DISABLE_FAST_PATHS" in path["reason"] for path in paths)
