"""Paths of the server never reach tenants: a sweep over all routes, the tokenizer's files, and the model's name."""

import asyncio
import functools
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from ledger_engine import MODEL, LedgerEngine
from server_inside import Inside, inside
from server_raw import pass_body, row
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import twinkle_server.application
from twinkle.engine import EngineInfo
from twinkle_server.ids import model_id
from twinkle_server.serve import resolve
from twinkle_server.settings import Settings, Times
from twinkle_server.store.base import check_base, rename_base
from twinkle_server.store.opening import Store, open_store
from twinkle_server.tenancy.keys import issue

TOKENIZER = "PreTrainedTokenizerFast"
FILES = {"tokenizer.json", "tokenizer_config.json", "config.json"}


def synchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


class ReadingEngine(LedgerEngine):
    """The ledger, with a tokenizer in the model's folder."""

    def __init__(self, model_id: str, **options: Any) -> None:
        super().__init__(model_id, **options)
        self._folder = Path(model_id)

    def describe(self) -> EngineInfo:
        """See `Engine`."""
        return replace(super().describe(), tokenizer=str(self._folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer, in whose files transformers has noted where they were."""
    made = tmp_path_factory.mktemp("secret-models") / "tiny"
    shutil.copytree(MODEL, made)
    Tokenizer(WordLevel({"Who": 0, "are": 1, "you?": 2, "<unk>": 3}, "<unk>")).save(str(made / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((made / name).read_text()) if (made / name).exists() else {"tokenizer_class": TOKENIZER}
        (made / name).write_text(json.dumps({**fields, "_name_or_path": str(made), "name_or_path": str(made)}))
    return made


def settings_of(folder: Path, data: Path, **more: Any) -> Settings:
    return resolve(Settings(str(folder), data, backend=f"{__file__}:ReadingEngine", auth=True, **more))


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[tuple[Inside, dict[str, str]]]:
    """Run a service with keys; also yield the headers of a user and of an operator, by role."""
    settings.data.mkdir(exist_ok=True)
    store = open_store(settings.data)
    try:
        keys = {role: await issue(store, role, role=role) for role in ("user", "operator")}  # type: ignore[arg-type]
    finally:
        store.close()
    async with inside(settings) as service:
        service.client.headers["X-API-Key"] = keys["user"]
        yield service, keys


async def work(service: Inside) -> dict[str, str]:
    """Do a bit of everything, and return the names of what there is now, by the names that routes use."""
    session = (await service.post("/create_session", tags=[], user_metadata={}, sdk_version="0.38.0"))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    await service.done("/create_model", body)
    model = model_id(session, 0)
    passed = await service.done("/forward_backward", pass_body(model, 1, [row([1, 2, 3])]))
    await service.done("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    await service.done("/save_weights", {"model_id": model, "seq_id": 3, "path": "a"})
    saved = await service.done("/save_weights_external", {"model_id": model, "seq_id": 4, "path": "a"})
    sampler = await service.post("/create_sampling_session", session_id=session, sampling_session_seq_id=0,
                                 base_model="tiny")  # fmt: skip
    return {
        "session_id": session, "session": session, "model_id": model, "run": model, "kind": "external_weights",
        "name": "a", "checkpoint": "a", "tinker_path": f"tinker://{model}/weights/a", "sampler": str(sampler),
        "path": f"tinker://{model}/weights/a", "request_id": passed["request_id"], "base_model": "tiny",
        "sampling_session_id": sampler["sampling_session_id"], "file": "tokenizer.json", "external": str(saved),
    }  # fmt: skip


async def sweep(service: Inside, application: FastAPI, names: dict[str, str]) -> list[tuple[str, httpx.Response]]:
    """Call every route with names that exist, and with those that do not; an operation ends with its result."""
    answers = []
    numbers = itertools.count(100)
    routes = [route for route in application.router.routes if isinstance(route, APIRoute)]
    for route, method in [(entry, method) for entry in routes for method in sorted(entry.methods)]:
        for known in (names, {}):
            url = "http://127.0.0.1" + re.sub(
                r"\{(\w+)\}", lambda part, known=known: known.get(part[1], "none"), route.path
            )
            body = {**known, "seq_id": next(numbers), "model_seq_id": next(numbers)} if method != "GET" else None
            if known and any(word in route.path for word in ("finish", "unload", "ttl")):
                continue  # it would end what the other routes need
            answer = await service.client.request(method, url, json=body, params={"starting_on": "2026-01-01"})
            answers.append((f"{method} {route.path}", answer))
            if answer.status_code == 200 and "request_id" in answer.text[:200] and "retrieve" not in route.path:
                request = answer.json().get("request_id")
                result = await service.send("/retrieve_future", {"request_id": request}) if request else answer
                answers.append((f"result of {method} {route.path}", result))
    return answers


@synchronous
async def test_no_answer_to_a_tenant_names_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FastAPI] = []
    create = twinkle_server.application.create_application

    def noted(*args: Any, **options: Any) -> FastAPI:
        made.append(create(*args, **options))
        return made[-1]

    monkeypatch.setattr(twinkle_server.application, "create_application", noted)
    data = tmp_path / "data"
    async with served(settings_of(folder, data, times=Times(poll=0.2, gap_fail=0.5))) as (service, _):
        names = await work(service)
        answers = await sweep(service, made[0], names)
        good = {what for what, answer in answers if answer.status_code == 200}
        assert len(answers) > 80
        assert {"POST /api/v1/get_info", "GET /twinkle/tokenizer", "GET /twinkle/tokenizer/{file}"} <= good
        for what, answer in answers:
            for secret in (str(data), str(folder), str(folder.parent)):
                text = json.dumps(dict(answer.headers)) + answer.text
                assert secret not in text, f"{what}: {text[:500]}"


@synchronous
async def test_the_folder_is_named_to_the_operator_on_this_machine_alone(folder: Path, tmp_path: Path) -> None:
    async with served(settings_of(folder, tmp_path / "data")) as (service, keys):
        for role, headers, expected in (
            ("user", {}, "tiny"),
            ("operator", {"X-Forwarded-For": "192.0.2.1"}, "tiny"),
            ("operator", {}, str(folder)),
        ):
            service.client.headers["X-API-Key"] = keys[role]
            listed = await service.client.get("http://127.0.0.1/twinkle/tokenizer", headers=headers)
            assert (listed.json()["model_name"], listed.json()["tokenizer_id"]) == ("tiny", expected)


@synchronous
async def test_the_tokenizer_can_be_fetched_and_read(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    target.mkdir()
    async with served(settings_of(folder, tmp_path / "data")) as (service, _):
        listed = (await service.client.get("http://127.0.0.1/twinkle/tokenizer")).json()
        for name, entry in listed["files"].items():
            answer = await service.client.get(entry["url"])
            assert (len(answer.content), hashlib.sha256(answer.content).hexdigest()) == (entry["size"], entry["sha256"])
            (target / name).write_bytes(answer.content)
        missing = await service.client.get("http://127.0.0.1/twinkle/tokenizer/model.safetensors")
        assert missing.status_code == 404
        service.client.headers.pop("X-API-Key")
        assert (await service.client.get("http://127.0.0.1/twinkle/tokenizer")).status_code == 401
    assert set(listed["files"]) == FILES
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("Who").ids == [0]
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"tokenizer_class": TOKENIZER}


@synchronous
async def test_an_announced_tokenizer_is_named_to_everyone(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, tmp_path / "data", tokenizer="acme/tokenizer")
    async with served(settings) as (service, _):
        listed = (await service.client.get("http://127.0.0.1/twinkle/tokenizer")).json()
    assert listed["tokenizer_id"] == "acme/tokenizer"


def test_a_folder_is_served_under_its_last_part(tmp_path: Path) -> None:
    assert resolve(Settings(str(MODEL), tmp_path)).served_name == MODEL.name
    assert resolve(Settings(str(MODEL), tmp_path, name="acme/best")).served_name == "acme/best"


@synchronous
async def test_adapters_that_were_trained_under_the_path_belong_to_the_new_name(tmp_path: Path) -> None:
    """A data folder of an earlier version: its adapters are known by the path of their base model."""
    data, model = tmp_path / "data", tmp_path / "models" / "tiny"
    shutil.copytree(MODEL, model)
    settings = replace(
        resolve(Settings(str(model), data, backend=f"{__file__}:ReadingEngine", auth=False)), name=str(model)
    )
    async with inside(settings) as service:
        store = service.service._store
        await check_base(store.database, str(model), model)
        session = (await service.post("/create_session", tags=[], user_metadata={}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": {"rank": 4}}
        await service.done("/create_model", body)
        saved = await service.done("/save_weights", {"model_id": model_id(session, 0), "seq_id": 1, "path": "a"})

    async def renamed(store: Store) -> tuple[int, int]:
        return await rename_base(store.database, "tiny", model), await rename_base(store.database, "tiny", model)

    store = open_store(data)
    try:
        assert await renamed(store) == (2, 0)
    finally:
        store.close()
    async with inside(replace(settings, name="tiny")) as service:
        await check_base(service.service._store.database, "tiny", model)
        described = await service.post("/weights_info", tinker_path=saved["path"])
        assert described["base_model"] == "tiny"
        session = (await service.post("/create_session", tags=[], user_metadata={}))["session_id"]
        for number, name in enumerate(("tiny", str(model))):  # the path is still understood
            body = {"session_id": session, "model_seq_id": number, "base_model": name, "lora_config": {"rank": 4}}
            await service.done("/create_model", body)
        await service.done("/load_weights", {"model_id": model_id(session, 0), "seq_id": 1, "path": saved["path"]})
