"""`twinkle.exists`, `twinkle.requires`, `twinkle.Plugin` and the published path of `Torch`."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import twinkle
from twinkle.errors import ArgumentError, ComponentNotFound, ComponentTypeError, HubError, RequirementMissing
from twinkle.loss import Loss
from twinkle.platform import GPU, NPU
from twinkle.template import Template


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("twinkle-core", True),
        ("Twinkle_Core", True),
        (f"packaging=={version('packaging')}", True),
        ("packaging>=1", True),
        ("packaging>=9999", False),
        ("no-such-package", False),
        ("no-such-package; python_version < '3'", True),  # not needed here
    ],
)
def test_exists(requirement: str, expected: bool) -> None:
    assert twinkle.exists(requirement) is expected


def test_requires_names_all_that_is_missing_and_how_to_get_it() -> None:
    twinkle.requires()
    twinkle.requires("twinkle-core", "packaging>=1")
    with pytest.raises(RequirementMissing) as caught:
        twinkle.requires("packaging>=9999", "twinkle-core", "no-such-package[extra]>=2")
    assert str(caught.value) == (
        f"this needs packaging>=9999 (installed: {version('packaging')}), no-such-package[extra]>=2 (not installed); "
        "run: pip install 'packaging>=9999' 'no-such-package[extra]>=2'"
    )
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("wrong", ["torch >> 2", "", "a b", 3, None])
def test_what_is_no_requirement_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"torch>=2\.6"):
        twinkle.exists(wrong)


def test_a_plugin_is_loaded_by_reference_and_base(tmp_path: Path) -> None:
    from twinkle.template import Template as Found

    assert twinkle.Plugin.load_plugin("Template", Template) is Found
    file = tmp_path / "mine.py"
    file.write_text(
        "from twinkle.loss import Loss\nfrom twinkle.template import Template\n"
        "class Mine(Loss):\n    def __call__(self, inputs, outputs, **kwargs): raise NotImplementedError\n"
        "class Own(Template):\n    pass\n"
    )
    mine = twinkle.Plugin.load_plugin(f"{file}:Mine", Loss)
    assert mine.__name__ == "Mine"
    own = twinkle.Plugin.load_plugin(f"{file}:Own", Template)
    assert twinkle.Plugin.load_plugin(f"{file}:Own", own) is own
    with pytest.raises(ComponentTypeError, match="'Template' is Template, not a subclass of Own"):
        twinkle.Plugin.load_plugin("Template", own)


def test_a_plugin_that_is_not_there_or_not_of_that_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_FORBID_HF", "1")
    with pytest.raises(ComponentNotFound, match="nearest: 'Template'"):
        twinkle.Plugin.load_plugin("Templat", Template)
    with pytest.raises(HubError, match="cannot use hf://"):
        twinkle.Plugin.load_plugin("hf://org/name", Loss)
    for base in (dict, "Loss", None):
        with pytest.raises(ArgumentError, match="plugin_base is "):
            twinkle.Plugin.load_plugin("Template", base)  # type: ignore[arg-type]


def test_published_questions_about_devices() -> None:
    from twinkle.utils.framework import Torch

    assert (Torch.is_gpu_available(), Torch.is_npu_available()) == (GPU.is_available(), NPU.is_available())
