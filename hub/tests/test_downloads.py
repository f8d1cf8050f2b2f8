"""Models and files from both hubs, by the real client libraries: what comes, what is kept, what is said otherwise."""

from typing import Any

import pytest

from twinkle.testing import FakeHub
from twinkle_testing.fakehub import TOKEN

FILES = {"config.json": "{}", "model.safetensors": "w" * 3000, "sub/notes.txt": "hello"}

BIG = b"0" * 12_000_000  # the client of Hugging Face writes pieces of 10 MB


@pytest.fixture(autouse=True)
def _faults_end(hub: FakeHub):
    yield
    hub.mend()


def test_a_model_comes_whole_and_is_not_fetched_twice(hub: FakeHub, client: Any, scheme, name, asked) -> None:
    hub.add(name, FILES)
    folder = client("HubOperation.download_model(id)", id=f"{scheme}://{name}")
    assert client("files(folder)", folder=folder) == FILES
    before = len(asked("GET", "model.safetensors"))
    assert client("HubOperation.download_model(id)", id=f"{scheme}://{name}") == folder
    assert len(asked("GET", "model.safetensors")) == before == 1


@pytest.mark.full
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub, client: Any, scheme, name) -> None:
    repository = hub.add(name, {"config.json": "1"})
    first = repository.branches["main"]
    repository.tags["v1"] = first
    repository.commit({"config.json": "2"})
    repository.commit({"config.json": "3"}, branch="dev")
    repository.commit({"config.json": "4"}, branch="feature/x")

    def content(id: str, **options: str) -> str:
        return client("files(HubOperation.download_model(id, **options))", id=id, options=options)["config.json"]

    assert content(f"{scheme}://{name}") == "2"
    assert content(f"{scheme}://{name}@dev") == "3"
    assert content(f"{scheme}://{name}", revision="v1") == "1"
    assert content(f"{scheme}://{name}@feature/x") == "4"
    assert content(f"{scheme}://{name}@{first}") == "1"
    with pytest.raises(client.told, match=r"HubError: .*@nope: .* (this|such repository or) revision"):
        content(f"{scheme}://{name}@nope")
    with pytest.raises(
        client.told, match=r"ArgumentError: .*names the revision 'dev', and revision= is 'v1'; give only one"
    ):
        content(f"{scheme}://{name}@dev", revision="v1")


def test_weights_that_nothing_reads_are_left_out(hub: FakeHub, client: Any, scheme, name) -> None:
    more = {"pytorch_model.bin": "x", "model.onnx": "x", "original/all.pth": "x", "tokenizer.json": "{}"}
    hub.add(name, {**FILES, **more})
    hub.add(name + "-old", {"config.json": "{}", "pytorch_model.bin": "x", "tf_model.h5": "x"})
    id = f"{scheme}://{name}"
    names = "sorted(files(HubOperation.download_model(id, **options)))"
    assert client(names, id=id + "-old", options={}) == ["config.json", "pytorch_model.bin"]
    small = {"download_model": False, "ignore_patterns": "sub/*"}
    assert client(names, id=id, options=small) == ["config.json", "tokenizer.json"]
    whole = ["config.json", "model.safetensors", "sub/notes.txt", "tokenizer.json"]
    assert client(names, id=id, options={}) == whole
    offline = {"HF_HUB_OFFLINE": "1"}
    assert client(names, id=id, options={}, environment=offline) == whole
    assert client(names, id=id + "-old", options={}, environment=offline) == ["config.json", "pytorch_model.bin"]


def test_single_files_come_alone_and_a_pattern_without_a_match_names_the_nearest(hub, client, scheme, name) -> None:
    hub.add(name, FILES)
    one = "files(HubOperation.download_file(id, allow_patterns=patterns))"
    assert client(one, id=f"{scheme}://{name}", patterns="sub/*") == {"sub/notes.txt": "hello"}
    assert client(one, id=f"{scheme}://{name}", patterns=["config.json"])["config.json"] == "{}"
    with pytest.raises(client.told, match=r"HubError: .*no file matches 'confg.json'; it has config.json"):
        client(one, id=f"{scheme}://{name}", patterns="confg.json")
    offline = {"HF_HUB_OFFLINE": "1"}
    assert "config.json" in client(one, id=f"{scheme}://{name}", patterns="*.json", environment=offline)
    with pytest.raises(
        client.told, match=r"OFFLINE is set, and (the cache has no complete copy of it|no cached file matches 'model)"
    ):
        client(one, id=f"{scheme}://{name}", patterns="model.safetensors", environment=offline)


def test_a_renamed_repository_is_followed(hub: FakeHub, client: Any, scheme, name, asked) -> None:
    hub.add(name, FILES)
    hub.rename(name, name + "-new")
    assert client("files(HubOperation.download_model(id))", id=f"{scheme}://{name}") == FILES
    assert asked(" 307")


def test_a_private_repository_needs_a_token(hub: FakeHub, client: Any, scheme, name) -> None:
    hub.add(name, FILES, private=True)
    ask = "files(HubOperation.download_model(id, token=token))"
    id, variable = f"{scheme}://{name}", {"hf": "HF_TOKEN", "ms": "MODELSCOPE_API_TOKEN"}[scheme]
    with pytest.raises(client.told, match=rf"HubError: .*or it is private and no token was given; .* set {variable}"):
        client(ask, id=id, token=None)
    with pytest.raises(client.told, match=r"HubError: .*rejected the token") as error:
        client(ask, id=id, token="hf_wrong_secret")
    assert "wrong_secret" not in str(error.value)
    assert client(ask, id=id, token=None, environment={variable: TOKEN}) == FILES


def test_a_repository_that_is_not_there(hub: FakeHub, client: Any, scheme, name) -> None:
    with pytest.raises(
        client.told, match=r"HubError: .*has no such repository.*no token was given; check the name"
    ) as error:
        client("HubOperation.download_model(id)", id=f"{scheme}://{name}")
    assert "OSError" in error.value.kinds
    with pytest.raises(client.told, match=r"or it is private and your token has no access; check the name$"):
        client("HubOperation.download_model(id, token=token)", id=f"{scheme}://{name}", token=TOKEN)


@pytest.mark.full
def test_a_connection_that_breaks_is_taken_up_where_it_stopped(hub: FakeHub, client: Any, scheme, name, asked) -> None:
    hub.add(name, {"config.json": "{}", "model.safetensors": BIG})
    hub.cut(rf"GET .*{name}.*model.safetensors", after=11_000_000)
    folder = client("HubOperation.download_model(id)", id=f"{scheme}://{name}")
    assert client("size(path)", path=f"{folder}/model.safetensors") == len(BIG)
    assert asked("GET", "model.safetensors", " 206")


@pytest.mark.full
def test_a_hub_that_fails_once_is_asked_again(hub: FakeHub, client: Any, scheme, name) -> None:
    hub.add(name, FILES)
    hub.fail(rf"GET .*{name}", 503)
    assert client("files(HubOperation.download_model(id))", id=f"{scheme}://{name}") == FILES


@pytest.mark.full
def test_a_repository_that_vanishes_is_told_and_the_next_call_goes_on(hub, client, scheme, name, asked) -> None:
    hub.add(name, {"config.json": "{}", "model.safetensors": BIG})
    hub.cut(rf"GET .*{name}.*model.safetensors", after=11_000_000)
    hub.fail(rf"GET .*{name}.*model.safetensors", 404, times=9)
    with pytest.raises(client.told, match=r"^(HubError|Unreachable): "):
        client("HubOperation.download_model(id)", id=f"{scheme}://{name}")
    offline = {"HF_HUB_OFFLINE": "1"}
    with pytest.raises(client.told, match=r"HF_HUB_OFFLINE is set, and the cache has only a part of it"):
        client("HubOperation.download_model(id)", id=f"{scheme}://{name}", environment=offline)
    hub.mend()
    folder = client("HubOperation.download_model(id)", id=f"{scheme}://{name}")
    assert client("size(path)", path=f"{folder}/model.safetensors") == len(BIG)
    assert len(asked("GET", "config.json")) == 1
    assert client("HubOperation.download_model(id)", id=f"{scheme}://{name}", environment=offline) == folder


def test_what_is_in_the_cache_needs_no_network(hub: FakeHub, client: Any, scheme, name, asked) -> None:
    hub.add(name, FILES)
    id = f"{scheme}://{name}"
    folder = client("HubOperation.download_model(id)", id=id)
    count = len(asked())
    assert client("HubOperation.download_model(id)", id=id, environment={"HF_HUB_OFFLINE": "1"}) == folder
    assert len(asked()) == count
    nowhere = dict.fromkeys(("HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"), "http://127.0.0.1:9")
    assert client("HubOperation.download_model(id)", id=id, environment=nowhere) == folder
    with pytest.raises(
        client.told, match=r"Unreachable: .*cannot reach .*Connection refused.*the cache has no complete copy of it"
    ):
        client("HubOperation.download_model(id)", id=id + "-other", environment=nowhere)
    with pytest.raises(client.told, match=r"HF_HUB_OFFLINE is set, and the cache has no complete copy of it"):
        client("HubOperation.download_model(id)", id=id + "-other", environment={"HF_HUB_OFFLINE": "1"})


def test_an_id_without_a_prefix_and_the_aliases(hub: FakeHub, client: Any, name, asked) -> None:
    hub.add(name, FILES)
    hub.add(name + "-x", FILES)
    client("local_model(id)", id=name)
    assert asked("/api/v1/models/" + name)
    client("local_model(id)", id=name + "-x", environment={"TWINKLE_DEFAULT_HUB": "hf"})
    assert asked("/api/models/" + name)
    aliases = {"TWINKLE_MODEL_ID_ALIASES": f'{{"{name}-y": "hf://{name}-x"}}'}
    assert "hugging-face" in client("local_model(id)", id=f"ms://{name}-y", environment=aliases)
    assert client("HubOperation.source_type(id)", id=name) == "ms"
    assert client("HubOperation.remove_source_type(id)", id=f"hf://{name}") == name


def test_a_repository_of_hugging_face_may_have_no_owner(client: Any, hub: FakeHub) -> None:
    hub.add("gpt2", FILES)
    hub.add("gsm8k", {"train.jsonl": '{"n": 1}\n'}, repo_type="dataset")
    hub.rename("gsm8k", "openai/gsm8k", "dataset")
    folder = client("HubOperation.download_model(id)", id="hf://gpt2")
    assert client("files(folder)", folder=folder) == FILES
    assert client("files(HubOperation.download_model(id, revision='main'))", id="hf://gpt2") == FILES
    default = {"TWINKLE_DEFAULT_HUB": "hf"}
    assert client("str(local_model(id))", id="gpt2", environment=default) == folder
    assert client("dataset(id)", id="hf://gsm8k") == [{"n": 1}]
    assert client("dataset(id)", id="gsm8k", environment=default) == [{"n": 1}]
    with pytest.raises(client.told, match="ModelLoadError: model 'gpt2' not found: there is no"):
        client("str(local_model(id))", id="gpt2")


def test_hugging_face_may_be_forbidden(client: Any, hub: FakeHub, name, asked) -> None:
    hub.add(name, FILES)
    for call in ("download_model(id)", "load_dataset(id)", "create_repo(id)", "push_to_hub(id, '.')"):
        with pytest.raises(client.told, match="HubError: cannot use hf://: TWINKLE_FORBID_HF is set"):
            client(f"HubOperation.{call}", id=f"hf://{name}", environment={"TWINKLE_FORBID_HF": "1"})
    assert asked() == []
    client("HubOperation.download_model(id)", id=f"hf://{name}", environment={"TWINKLE_FORBID_HF": "0"})


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("ms://acme", "is not a repository"),
        ("hf://..", "is not a repository"),
        ("hf://acme/x/y", "is not a repository"),
        ("ms://../x", "is not a repository"),
        ("hf://acme/x#Loss", "names a component"),
        ("hf://acme/x@../../etc", "is not a branch, tag or commit"),
        ("hf://acme/x@", "is not a branch, tag or commit"),
        ("file://models/x", "must be absolute"),
    ],
)
def test_a_malformed_reference_is_refused_before_anything_is_asked(client: Any, asked, id: str, words: str) -> None:
    with pytest.raises(client.told, match=words):
        client("HubOperation.download_model(id)", id=id)
    assert asked() == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("download_model('')", "the model id is empty"),
        ("download_model('hf://a/b', revision='../x')", "is not a branch, tag or commit"),
        ("download_file('hf://a/b', repo_type='space')", "repo_type must be 'model' or 'dataset', got 'space'"),
        ("create_repo('ms://a/b@v1')", "a new repository has no revisions; omit '@v1'"),
    ],
)
def test_a_call_without_sense_is_refused_before_anything_is_asked(client: Any, asked, call: str, words: str) -> None:
    with pytest.raises(client.told, match=words):
        client(f"HubOperation.{call}")
    assert asked() == []


def test_an_empty_repository_is_told(hub: FakeHub, client: Any, scheme, name) -> None:
    hub.add(name, {})
    with pytest.raises(client.told, match=r"HubError: .*this repository on .* has no files"):
        client("local_model(id)", id=f"{scheme}://{name}")


def test_an_unknown_option_is_refused(client: Any, scheme: str) -> None:
    with pytest.raises(client.told, match=r"ArgumentError: .*'revison', nearest: 'revision'"):
        client("local_model(id, revison='x')", id=f"{scheme}://a/b")
