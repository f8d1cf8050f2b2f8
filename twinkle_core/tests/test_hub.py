"""From a model id to a folder: what is accepted, and what the errors say."""

import json
from pathlib import Path

import pytest

from twinkle.errors import ArgumentError, ComponentNotFound, HubError, ModelLoadError, SettingsError
from twinkle.hub import Hub, HubOperation, local, local_model, open_hub


class FolderHub(Hub):
    """A hub whose references are folders."""

    asked: list = []  # noqa: RUF012 - a test's notebook

    def download_model(self, reference, revision="main"):
        self.asked.append((reference, revision))
        place = Path(reference.partition("://")[2])
        if not place.is_absolute():
            raise HubError(f"{reference}: there is no shelf of that name")
        return place

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


def test_an_id_without_a_prefix_belongs_to_the_default_hub(folder, shelf, monkeypatch):
    monkeypatch.setenv("TWINKLE_DEFAULT_HUB", "shelf")
    with pytest.raises(HubError, match="there is no shelf of that name"):
        local_model("Qwen/Qwen3-4B@v2")
    assert shelf == [("shelf://Qwen/Qwen3-4B@v2", "main")]


def test_an_existing_path_comes_before_the_default_hub(folder, shelf, monkeypatch):
    monkeypatch.setenv("TWINKLE_DEFAULT_HUB", "shelf")
    monkeypatch.chdir(folder.parent.parent)
    assert local_model("models/qwen3-tiny").samefile(folder)
    assert shelf == []


def test_an_id_that_neither_hub_nor_disk_has_is_told_of_both(folder, shelf, monkeypatch):
    monkeypatch.setenv("TWINKLE_DEFAULT_HUB", "shelf")
    monkeypatch.chdir(folder.parent.parent)
    with pytest.raises(
        HubError,
        match=r"no shelf of that name; there is no local .*qwen3-tinny' either \(nearest: .*tiny.*\); for another hub, "
        r"write its scheme, such as hf://models/qwen3-tinny$",
    ):
        local_model("models/qwen3-tinny")


def test_the_default_hub_is_modelscope(shelf):
    assert HubOperation.source_type("org/name") == "ms"
    with pytest.raises(ComponentNotFound, match=r"nothing offers ms://.*pip install twinkle-hub; there is no local"):
        local_model("org/name")


@pytest.mark.parametrize("text", ["gpt2", "./org/name", "/org/name", "a/b/c", "~/name", "org/../name"])
def test_a_text_that_is_no_id_is_a_path(text, shelf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="not found"):
        local_model(text)
    assert shelf == []


def test_a_single_word_is_told_how_a_hub_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"scheme://name, there are: .*hf://") as error:
        local_model("Qwen3-4B")
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
    assert local_model("ms://Qwen/Qwen3") == folder


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


def test_a_hub_of_the_house_that_is_not_installed_says_what_to_install(shelf):
    for scheme in ("hf", "ms", "file"):
        with pytest.raises(ComponentNotFound, match=r"there are: shelf://; run: pip install twinkle-hub$"):
            open_hub(f"{scheme}://org/name")


def test_an_option_that_the_hub_does_not_take_is_refused_before_it_is_asked(folder, shelf):
    with pytest.raises(ArgumentError, match="unknown argument 'revison', nearest: 'revision'"):
        local_model(f"shelf://{folder}", revison="v2")
    assert shelf == []


def test_a_reference_without_scheme_is_refused(shelf):
    with pytest.raises(ComponentNotFound, match="names no hub"):
        open_hub("org/name")
