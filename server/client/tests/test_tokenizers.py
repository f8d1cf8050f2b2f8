"""A tenant's machine gets the tokenizer of the served model from the service."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import Served, ledger
from transformers import AutoTokenizer

from twinkle.testing import tiny_model
from twinkle_client import download_tokenizer, tokenizers
from twinkle_client.errors import NotFound, ServiceError
from twinkle_client.http import Connection


class Offered:
    """A service that offers files, and counts how often it sends each."""

    def __init__(self, files: dict[str, bytes], tokenizer_id: str = "small") -> None:
        self.files, self.tokenizer_id, self.sent = files, tokenizer_id, dict.fromkeys(files, 0)
        self.seen: list[bool] = []
        """For each file that was sent, whether the folder `small` existed."""
        self.digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["x-api-key"] == "tml-key"
        name = request.url.path.removeprefix("/twinkle/tokenizer").removeprefix("/")
        if name:
            self.sent[name] += 1
            self.seen.append(Path("small").exists())
            kind = {"content-type": "application/octet-stream"}
            return httpx.Response(200, content=self.files[name], headers=kind)
        files = {name: {"size": len(self.files[name]), "sha256": self.digests[name]} for name in self.files}
        return httpx.Response(200, json={"model_name": "org/small", "tokenizer_id": self.tokenizer_id, "files": files})


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Offered]:
    """Make every connection one to a service with the given files, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_BASE_URL", "http://service:1/team/api/v1")

    def made(files: dict[str, bytes], tokenizer_id: str = "small") -> Offered:
        offered = Offered(files, tokenizer_id)

        def connect(url: str, key: str) -> Connection:
            assert url == "http://service:1/team"
            return Connection("http://service:1", key, transport=httpx.MockTransport(offered))

        monkeypatch.setattr(tokenizers, "Connection", connect)
        return offered

    return made


def test_a_tokenizer_is_downloaded_to_where_the_sdk_looks_for_it(offer: Callable[..., Offered], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    files = {name: (model / name).read_bytes() for name in names}
    offered = offer(files)
    folder = download_tokenizer(api_key="tml-key")
    assert folder == Path("small")
    assert AutoTokenizer.from_pretrained("small").encode("Who?") == AutoTokenizer.from_pretrained(model).encode("Who?")
    (folder / "config.json").write_text("{}")
    assert download_tokenizer(api_key="tml-key") == folder
    assert offered.sent == {"tokenizer.json": 1, "tokenizer_config.json": 1, "config.json": 2}
    assert (folder / "config.json").read_bytes() == files["config.json"]
    assert download_tokenizer("other", api_key="tml-key") == Path("other")
    assert sorted(path.name for path in Path("other").iterdir()) == sorted(names)


def test_others_see_a_new_folder_when_it_is_complete(offer: Callable[..., Offered], tmp_path: Path) -> None:
    files = {"tokenizer.json": b"{}", "config.json": b"{}"}
    offered = offer(files)
    folder = download_tokenizer(api_key="tml-key")
    assert offered.seen == [False, False]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_the_folder_has_the_announced_name(offer: Callable[..., Offered]) -> None:
    for announced, folder in (("owner/name", "owner/name"), ("/srv/models/small", "small")):
        offer({"tokenizer.json": b"{}"}, announced)
        assert download_tokenizer(api_key="tml-key") == Path(folder)
        assert (Path(folder) / "tokenizer.json").is_file()


def test_what_a_service_should_not_send_is_refused(offer: Callable[..., Offered], tmp_path: Path) -> None:
    offer({"../tokenizer.json": b"{}"})
    with pytest.raises(ServiceError, match="not in the folder"):
        download_tokenizer(api_key="tml-key")
    offer({"tokenizer.json": b"{}"}, "../small")
    with pytest.raises(ServiceError, match="pass a folder"):
        download_tokenizer(api_key="tml-key")
    offer({"tokenizer.json": b"{}"}).digests["tokenizer.json"] = "0" * 64
    with pytest.raises(ServiceError, match=r"tokenizer\.json differs from the digest"):
        download_tokenizer(api_key="tml-key")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.full  # starts a service
def test_a_model_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    service: Served = ledger(tmp_path / "data", {})
    try:
        service.start()
        with pytest.raises(NotFound, match="has no tokenizer"):
            download_tokenizer(tmp_path / "folder", base_url=service.url)
    finally:
        service.stop()
    assert not (tmp_path / "folder").exists()
