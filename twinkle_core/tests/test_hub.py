"""From a model id to a folder: what is accepted, and what the errors say."""

import json

import pytest

from twinkle.errors import ArgumentError, ComponentNotFound, ModelLoadError, SettingsError
from twinkle.hub import Hub, local, local_model, open_hub


class FolderHub(Hub):
    """A hub whose references are folders."""

    asked: list = []  # noqa: RUF012 - a test's notebook

    def download_model(self, reference, revision="main"):
        self.asked.append((reference, revision))
        from pathlib import Path

        return Path(reference.partition("://")[2])

    def load_dataset(self, reference, subset_name="default", split="train", **kwargs):
        return []


class FakeRegistry:
    """Knows one hub, `shelf://`."""

    def names(self, kind):
        assert kind == "hub"
        return ["shelf"]

    def build(self, name, kind):
        if name != "shelf":
            raise ComponentNotFound(name)
        return FolderHub()


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr("twinkle._registry.registry", FakeRegistry)
    FolderHub.asked.clear()
    return FolderHub.asked


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "models" / "qwen3-tiny"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_an_existing_folder_is_itself(folder, monkeypatch):
    assert local_model(folder) == folder
    assert local_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert local_model("qwen3-tiny").samefile(folder)


def test_a_missing_folder_names_its_neighbours_and_what_to_do(folder):
    with pytest.raises(ModelLoadError) as error:
        local_model(folder.with_name("qwen3-tinny"))
    text = str(error.value)
    assert "qwen3-tinny" in text
    assert "holds qwen3-tiny;" in text
    assert "give the path of a model folder" in text
    assert "hf://" not in text


def test_an_id_that_is_no_path_points_to_the_hubs_and_to_the_aliases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"cannot be fetched yet in this version") as error:
        local_model("Qwen/Qwen3-4B")
    assert local.ALIASES in str(error.value)


def test_an_empty_id_is_refused():
    with pytest.raises(ModelLoadError, match="empty"):
        local_model("")


def test_a_folder_without_config_says_what_it_holds(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "readme.txt").touch()
    with pytest.raises(ModelLoadError, match=r"no config.json \(it holds model.safetensors, readme.txt\)"):
        local_model(tmp_path)


def test_an_empty_folder_is_named_empty(tmp_path):
    with pytest.raises(ModelLoadError, match="it is empty"):
        local_model(tmp_path)


def test_an_adapter_folder_is_told_from_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "the/base"}))
    with pytest.raises(ModelLoadError, match="is an adapter, not a model \\(of 'the/base'\\)"):
        local_model(tmp_path)


def test_several_gguf_files_are_listed(tmp_path):
    for name in ("a.Q4.gguf", "a.Q8.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"give one of a.Q4.gguf, a.Q8.gguf"):
        local_model(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelLoadError, match=r"is a file but no \.gguf"):
        local_model(path)


def test_an_alias_translates_an_id(folder, monkeypatch):
    monkeypatch.setenv(local.ALIASES, json.dumps({"Qwen/Qwen3": str(folder), "hf://Qwen/Qwen3": str(folder)}))
    assert local_model("Qwen/Qwen3") == folder
    assert local_model("hf://Qwen/Qwen3") == folder


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '{"a": ""}'])
def test_a_malformed_alias_map_is_an_error(text, monkeypatch):
    monkeypatch.setenv(local.ALIASES, text)
    with pytest.raises(SettingsError, match=local.ALIASES):
        local_model("a")


def test_a_reference_goes_to_the_hub_of_its_scheme(folder, shelf):
    assert local_model(f"shelf://{folder}") == folder
    assert local_model(f"SHELF://{folder}", revision="v2") == folder
    assert shelf == [(f"shelf://{folder}", "main"), (f"SHELF://{folder}", "v2")]


def test_options_for_a_hub_have_no_place_with_a_local_folder(folder):
    with pytest.raises(ArgumentError, match="'revision'"):
        local_model(folder, revision="main")


def test_an_unknown_scheme_lists_those_there_are(shelf):
    with pytest.raises(ComponentNotFound, match=r"nothing offers gopher://; there are: shelf://$"):
        open_hub("gopher://x")


def test_hf_and_ms_are_not_there_yet_and_nothing_is_to_be_installed(shelf):
    for scheme in ("hf", "ms"):
        with pytest.raises(ComponentNotFound, match=r"not available yet in this version$"):
            open_hub(f"{scheme}://org/name")


def test_a_reference_without_scheme_is_refused(shelf):
    with pytest.raises(ComponentNotFound, match="names no hub"):
        open_hub("org/name")
