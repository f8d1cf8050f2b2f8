"""Data sets from both hubs, as `Dataset(DatasetMeta(...))` loads them."""

import io
from pathlib import Path
from typing import Any

import pytest

from twinkle.testing import FakeHub

FILES = {
    "train.jsonl": '{"query": "a", "n": 1}\n{"query": "b", "n": 2}\n',
    "test.jsonl": '{"query": "c", "n": 3}\n',
}
CARD = """---
configs:
- config_name: small
  data_files: small/*.jsonl
- config_name: large
  data_files: large/*.jsonl
---
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.mark.full
def test_splits_slices_and_options(hub: FakeHub, client: Any, scheme: str, name: str) -> None:
    repository = hub.add(name, FILES, repo_type="dataset")
    repository.commit({"train.jsonl": '{"query": "new", "n": 9}\n'}, branch="side")
    id = f"{scheme}://{name}"
    assert client("dataset(id)", id=id) == [{"query": "a", "n": 1}, {"query": "b", "n": 2}]
    assert client("dataset(id, 'default', 'test')", id=id) == [{"query": "c", "n": 3}]
    assert client("dataset(id, 'default', 'train', range(3))[2]", id=id) == {"query": "a", "n": 1}
    assert client("dataset(id, revision='side')", id=id) == [{"query": "new", "n": 9}]
    assert client("dataset(id + '@side')", id=id) == [{"query": "new", "n": 9}]
    assert client("stream(id)", id=id) == [{"query": "a", "n": 1}, {"query": "b", "n": 2}]
    assert client("list(HubOperation.load_dataset(id, split='test'))", id=id) == [{"query": "c", "n": 3}]


@pytest.mark.full
def test_parquet_and_configurations(hub: FakeHub, client: Any, scheme: str, name: str) -> None:
    hub.add(name, {"data/train-00000.parquet": parquet([{"a": 1}, {"a": 2}])}, repo_type="dataset")
    assert client("dataset(id)", id=f"{scheme}://{name}") == [{"a": 1}, {"a": 2}]
    files = {"README.md": CARD, "small/a.jsonl": '{"a": 1}\n', "large/a.jsonl": '{"a": 2}\n'}
    hub.add(name + "-two", files, repo_type="dataset")
    id = f"{scheme}://{name}-two"
    assert client("dataset(id, 'large')", id=id) == [{"a": 2}]
    with pytest.raises(client.told, match=r"DataError: data set .*Config name is missing.*'small'.*as subset_name"):
        client("dataset(id)", id=id)
    with pytest.raises(client.told, match=r"DataError: data set .*'middle'.*'small'"):
        client("dataset(id, 'middle')", id=id)
    with pytest.raises(client.told, match=r"DataError: data set .*Unknown split.*pass one of them as split"):
        client("dataset(id, 'small', 'dev')", id=id)
    with pytest.raises(client.told, match=r"ArgumentError: .*'revison', nearest: 'revision'"):
        client("dataset(id, revison='x')", id=id)


def test_a_data_set_that_is_not_there_and_one_that_is_broken(hub: FakeHub, client: Any, scheme: str, name: str) -> None:
    with pytest.raises(client.told, match=r"HubError: .*has no such data set or revision, or it is private and no"):
        client("dataset(id)", id=f"{scheme}://{name}")
    hub.add(name + "-broken", {"train.jsonl": '{"a": '}, repo_type="dataset")
    with pytest.raises(client.told, match=r"DataError: data set "):
        client("dataset(id)", id=f"{scheme}://{name}-broken")
    hub.add(name + "-empty", {"README.md": "nothing here"}, repo_type="dataset")
    with pytest.raises(client.told, match=r"DataError: data set .*"):
        client("dataset(id)", id=f"{scheme}://{name}-empty")


def test_the_code_of_a_data_set_is_never_run(hub: FakeHub, client: Any, scheme: str, name: str, tmp_path: Path) -> None:
    script = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    hub.add(name, {f"{name.partition('/')[2]}.py": script, **FILES}, repo_type="dataset")
    try:
        client("dataset(id)", id=f"{scheme}://{name}")
    except client.told as error:
        assert "scripts are no longer supported" in str(error)  # noqa: PT017 - either way is fine, running it is not
    assert not (tmp_path / "ran").exists()


def test_rows_in_the_cache_need_no_network(hub: FakeHub, client: Any, scheme: str, name: str, asked) -> None:
    hub.add(name, FILES, repo_type="dataset")
    id = f"{scheme}://{name}"
    rows = client("dataset(id)", id=id)
    count = len(asked())
    offline = {"HF_HUB_OFFLINE": "1"}
    nowhere = dict.fromkeys(("HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"), "http://127.0.0.1:9")
    for environment in (offline, nowhere):
        assert client("dataset(id)", id=id, environment=environment) == rows
        with pytest.raises(
            client.told, match=r"(HF_HUB_OFFLINE is set|Connection refused).*(the cache has no|are not in the cache)"
        ):
            client("dataset(id)", id=id + "-other", environment=environment)
    assert len(asked()) == count


def test_an_id_without_a_prefix_is_the_default_hubs(hub: FakeHub, client: Any, name: str, asked) -> None:
    hub.add(name, FILES, repo_type="dataset")
    assert len(client("dataset(id)", id=name)) == 2
    assert asked("/api/v1/datasets/" + name)
    with pytest.raises(client.told, match=r"HubError: ms://.*-no: .*; there is no local '.*-no' either"):
        client("dataset(id)", id=name + "-no")
