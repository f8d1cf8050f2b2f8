"""Links work without a key, for one folder and a while; nobody can make or change one."""

import io
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from twinkle_server.checkpoints import links as module
from twinkle_server.checkpoints.links import Links, download_routes
from twinkle_server.engine.files import publish
from twinkle_server.errors import NotFound, ServiceError

BASE = "http://testserver/"
FOLDER = "checkpoints/0123"
FILES = {"adapter_model.safetensors": b"w" * 3_000_000, "adapter_config.json": b"{}"}


@pytest.fixture
def links(tmp_path: Path) -> Links:
    def write(work: Path) -> None:
        for name, data in FILES.items():
            (work / name).write_bytes(data)

    publish(tmp_path / FOLDER, write)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    return Links(tmp_path, b"s" * 32)


@pytest.fixture
def client(links: Links):
    app = FastAPI()
    app.include_router(download_routes(links))

    @app.exception_handler(ServiceError)
    async def told(request: Any, error: ServiceError) -> JSONResponse:
        return JSONResponse({"detail": error.message}, error.status)

    with TestClient(app) as opened:
        yield opened


def test_each_file_and_the_whole_can_be_fetched(links: Links, client: TestClient) -> None:
    urls, expires = links.files(BASE, FOLDER)
    assert {name: client.get(url).content for name, url in urls.items()} == FILES
    whole, also = links.archive(BASE, FOLDER)
    answer = client.get(whole)
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        assert set(tar.getnames()) == set(FILES)
    assert abs(expires - also) <= 1


def test_a_link_ends(links: Links, client: TestClient, monkeypatch) -> None:
    urls, expires = links.files(BASE, FOLDER)
    monkeypatch.setattr(module.time, "time", lambda: expires + 1)
    for url in urls.values():
        answer = client.get(url)
        assert answer.status_code == 404
        assert "has expired" in answer.json()["detail"]


def test_changed_and_foreign_links_are_nothing(links: Links, client: TestClient, tmp_path: Path) -> None:
    url = links.files(BASE, FOLDER)[0]["adapter_config.json"]
    token = urlsplit(url).path.split("/")[2]
    other = Links(tmp_path, b"t" * 32).files(BASE, FOLDER)[0]["adapter_config.json"]
    payload, _, signature = token.rpartition(".")
    flipped = "A" if signature[0] != "A" else "B"  # the last character of base64 has bits without a meaning
    changed = [f"{payload}.{flipped}{signature[1:]}", "x" * 5000, "e30.x", "%00", "..", "eyJmIjoiLiJ9"]
    for bad in [other, *(url.replace(token, text) for text in changed)]:
        assert client.get(bad).status_code == 404, bad


@pytest.mark.parametrize("name", ["manifest.json", "none", "..", "%2e%2e%2fsecret", "..%2f..%2fsecret", "archive.tar"])
def test_a_link_opens_nothing_but_listed_files(links: Links, client: TestClient, name: str) -> None:
    url = links.files(BASE, FOLDER)[0]["adapter_config.json"]
    assert client.get(url.replace("adapter_config.json", name)).status_code == 404


def test_the_link_of_an_archive_opens_no_single_file(links: Links, client: TestClient) -> None:
    whole = links.archive(BASE, FOLDER)[0]
    assert client.get(whole.replace("archive.tar", "adapter_config.json")).status_code == 404


def test_a_deleted_checkpoint_is_not_there(links: Links, client: TestClient, tmp_path: Path) -> None:
    urls, _ = links.files(BASE, FOLDER)
    (tmp_path / FOLDER).rename(tmp_path / "gone")
    assert all(client.get(url).status_code == 404 for url in urls.values())
    with pytest.raises(NotFound):
        links.files(BASE, FOLDER)
