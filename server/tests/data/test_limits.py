"""What requests for data cannot do: reach another tenant, name files, exceed a limit, or disturb anyone else."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_data import DataService

import twinkle.errors
from twinkle.dataset import DatasetMeta
from twinkle.errors import ArgumentError, ComponentNotFound, DataError, NotTrusted, TrainingStateError, Unsupported
from twinkle_client import wire
from twinkle_client.calls import Answer, Send, Sleep
from twinkle_client.components import Preprocessor, Reward, Template
from twinkle_client.data import Client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, IterableDataset
from twinkle_client.errors import Conflict, ConnectionFailed, Gone, NotFound, RequestRefused
from twinkle_client.http import Connection

ROWS = [{"text": f"row {number}", "n": number} for number in range(10)]


@pytest.fixture
def client(service: DataService) -> Any:
    made = service.tenant(f"tenant-{time.monotonic_ns()}")
    yield made
    for resource in service.state.data.of(made.connection._key):  # type: ignore[union-attr, attr-defined]
        made.connection.run(made.connection.request("DELETE", f"/data/{resource.id}"))


def rows(client: Client, **options: Any) -> Dataset:
    return Dataset(DatasetMeta(data=ROWS), client=client, **options)


def test_another_tenant_finds_nothing(service: DataService, client: Client) -> None:
    dataset = rows(client)
    stranger = service.tenant("stranger")
    routes = [
        ("POST", f"/data/{dataset.resource_id}/call", {"method": "__len__", "number": 1}),
        ("DELETE", f"/data/{dataset.resource_id}", {}),
        ("POST", "/data", {"session_id": stranger.session_id, "kind": "dataloader", "name": "DataLoader",
                           "parent": dataset.resource_id}),
    ]  # fmt: skip
    for method, path, query in routes:
        with pytest.raises(NotFound, match="does not exist"):
            stranger.connection.run(stranger.connection.request(method, path, query=query))
    query = {"session_id": client.session_id, "kind": "dataset", "name": "Dataset"}
    with pytest.raises(Gone, match="session"):
        stranger.connection.run(stranger.connection.request("POST", "/data", query=query))
    assert stranger.connection.run(stranger.connection.request("GET", "/data"))["resources"] == []
    assert len(dataset) == 10
    listed = client.connection.run(client.connection.request("GET", "/data"))["resources"]
    assert [entry["resource_id"] for entry in listed] == [dataset.resource_id]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../own.jsonl",
        "file:///etc/passwd",
        "~/x.jsonl",
        "hf://org/name",
        "org/name",
        "ms://other/x",
        ".",
    ],
)
def test_a_data_set_is_never_a_path(client: Client, name: str) -> None:
    with pytest.raises(DataError, match="cannot be loaded by this service, which has 'org/own'"):
        _raw_dataset(client, name)


@pytest.mark.parametrize(
    "other", ["/etc", "../model", "builtin://smollm2-135m-instruct", "hf://org/other", "file:///x"]
)
def test_a_tokenizer_is_that_of_the_served_model(client: Client, other: str) -> None:
    dataset = rows(client)
    with pytest.raises(Unsupported, match="this service has the tokenizer of 'org/tiny'"):
        dataset.set_template("Template", model_id=other)
    with pytest.raises(Unsupported, match="this service has the tokenizer"):
        dataset.filter("LengthFilter", init_args={"max_length": 3, "model_id": other, "column": "text"})
    dataset.filter("LengthFilter", init_args={"max_length": 99, "model_id": "hf://org/tiny", "column": "text"})
    assert len(dataset) == 10


@pytest.mark.parametrize("name", ["os:system", "./x.py:Evil", "hf://org/repo@abc#Name", "acme_data.rows:AcmeReads"])
def test_code_cannot_be_named(client: Client, name: str) -> None:
    dataset = rows(client)
    with pytest.raises((NotTrusted, ComponentNotFound)):
        dataset.map(name)
    with pytest.raises((NotTrusted, ComponentNotFound)):
        dataset.set_template("Template", model_id="org/tiny", loss_scale=name)
    with pytest.raises((NotTrusted, ComponentNotFound)):
        Template(name, model_id="org/tiny", client=client).encode({"messages": []})


def test_only_safe_components_can_be_named(client: Client) -> None:
    with pytest.raises(NotTrusted, match="acme-data does not declare it safe for tenants"):
        rows(client).map("AcmeUnsafe")
    with pytest.raises(NotTrusted, match="does not declare it safe"):
        Reward("MathReward", client=client)([])
    with pytest.raises(ArgumentError, match="cannot run on the service"):
        rows(client).map(lambda columns: columns)


@pytest.mark.parametrize("name", ["AcmeReads", "AcmeReadsData", "AcmeConnects", "AcmeSpawns"])
def test_code_of_a_worker_reaches_nothing(client: Client, name: str) -> None:
    dataset = rows(client)
    with pytest.raises(Unsupported, match="data resources do not"):
        dataset.map(name)
    dataset.map("AcmeSecrets")
    assert set(dataset["text"]) == {"[]"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("AcmeSleeps", "took longer than 4 s", marks=pytest.mark.full),
        pytest.param("AcmeEats", "more than 256 MiB of memory", marks=pytest.mark.full),
        ("AcmeCrashes", "exit status 3"),
    ],
)
def test_a_bad_call_ends_its_own_resource_only(client: Client, name: str, reason: str) -> None:
    other, bad = rows(client), rows(client)
    with pytest.raises(Gone, match=reason):
        bad.map(name)
    with pytest.raises(Gone, match=f"{reason}.*; create it again"):
        len(bad)
    assert len(other) == 10


@pytest.mark.full
def test_other_tenants_do_not_wait_for_a_call_that_hangs(service: DataService, client: Client) -> None:
    neighbour = service.tenant("neighbour")
    fine, bad = rows(neighbour), rows(client)

    async def both() -> list[Any]:
        hangs = asyncio.ensure_future(bad.map_async("AcmeSleeps"))  # type: ignore[attr-defined]
        done = []
        for index in range(20):
            done.append(await fine.getitem_async(index % 10))  # type: ignore[attr-defined]
            assert not hangs.done()
        with pytest.raises(Gone):
            await hangs
        return done

    assert asyncio.run(both()) == [*ROWS, *ROWS]
    fine.close()


def test_errors_are_those_of_a_local_call(client: Client) -> None:
    dataset = rows(client)
    with pytest.raises(TrainingStateError, match="encode needs a template"):
        dataset.encode()
    with pytest.raises(ArgumentError, match="num_proc must be 1"):
        dataset.map("AlpacaProcessor", num_proc=4)
    with pytest.raises(ArgumentError, match="unknown argument 'batchsize'"):
        dataset.map("AlpacaProcessor", batchsize=4)
    with pytest.raises(DataError, match=r"the call raised RuntimeError: wrong phase of the moon in …/rows\.py"):
        dataset.map("AcmeRaises")
    with pytest.raises(ComponentNotFound, match="no method '_table'"):
        dataset._run(dataset._invoke("_table", {}))
    with pytest.raises(Unsupported, match="mode='immediate'"):
        dataset.save_as("x.jsonl", mode="training")
    assert len(dataset) == 10


@pytest.mark.full
def test_rows_and_results_are_limited(client: Client) -> None:
    many = [{"n": number} for number in range(5001)]
    with pytest.raises(DataError, match="5001 rows; this service allows 5000"):
        Dataset(DatasetMeta(data=many), client=client)
    with pytest.raises(DataError, match="data_slice has 6000 rows"):
        Dataset(DatasetMeta(data=ROWS, data_slice=range(6000)), client=client)
    with pytest.raises(Gone, match="rows; this service allows 5000"):
        Dataset(DatasetMeta("builtin://arithmetic"), size=6000, client=client)


@pytest.mark.full
def test_the_number_of_resources_is_limited(service: DataService, client: Client) -> None:
    held = [rows(client) for _ in range(6)]
    with pytest.raises(RequestRefused, match=r"you have 6 \(limit 6\)"):
        rows(client)
    held[0].close()
    held[0].close()
    held.append(rows(client))
    with pytest.raises(Gone, match="it was deleted"):
        len(held[0])


def test_a_repeated_request_gets_the_same_batch(service: DataService, client: Client) -> None:
    dataset = rows(client)
    loader = DataLoader(dataset, batch_size=4)
    path = f"/data/{loader.resource_id}/call"
    connection = client.connection

    def ask(method: str, number: int, **kwargs: Any) -> Any:
        body = {"args": [], "kwargs": kwargs}
        return connection.run(connection.request("POST", path, body, query={"method": method, "number": number}))

    iteration = ask("__iter__", 1)
    first = ask("__next__", 2, iteration=iteration, count=1)
    assert ask("__next__", 2, iteration=iteration, count=1) == first
    assert ask("__next__", 3, iteration=iteration, count=1)["items"][0][0] == ROWS[4]
    for number, method in ((2, "__next__"), (3, "get_state"), (5, "get_state")):
        with pytest.raises(Conflict):
            ask(method, number)
    assert ask("get_state", 4) == {"consumed_train_samples": 8}


class _Loses:
    """A connection that loses the answer of some requests after they were carried out."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lose = connection, 0

    def run(self, call: Any) -> Any:
        return self._drive(call)

    def _drive(self, call: Any) -> Any:
        from twinkle_client.http import _drive

        def perform(effect: Send | Sleep) -> Answer | None:
            answer = self.connection._perform(effect)
            if isinstance(effect, Send) and self.lose:
                self.lose -= 1
                raise ConnectionError("the answer was lost")
            return answer

        return _drive(call, perform)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def test_a_lost_answer_costs_no_rows(client: Client) -> None:
    losing = _Loses(client.connection)
    client.connection = losing  # type: ignore[misc, assignment]
    losing.lose = 1
    dataset = rows(client)
    loader = DataLoader(dataset, batch_size=2)
    seen = []
    for batch in loader:
        losing.lose = 1
        seen += batch
    assert seen == ROWS
    losing.connection._retry_seconds, losing.lose = 0.0, 1
    with pytest.raises(ConnectionFailed):
        dataset.filter("LengthFilter", init_args={"max_length": 5, "unit": "characters", "column": "text"})
    losing.connection._retry_seconds = 20.0
    assert len(dataset) == 10  # the filter is found to have run, and the next number is right
    assert losing.connection is not client.connection


def test_one_iteration_ends_another(client: Client) -> None:
    loader = DataLoader(rows(client), batch_size=4)
    first = iter(loader)
    next(first)
    assert len(list(loader)) == 3
    with pytest.raises(TrainingStateError, match="another iteration"):
        next(first)
    with IterableDataset(DatasetMeta(data=ROWS), client=client) as stream:
        assert list(stream) == ROWS


def test_after_a_restart_the_error_says_what_to_do(service: DataService, client: Client) -> None:
    dataset = rows(client)
    resources = service.state.data
    assert resources is not None
    held = dict(resources._resources)
    resources._resources.clear()  # as a new process of the service has none
    try:
        with pytest.raises(Gone, match="the service was restarted, or it was unused for long; create it again"):
            len(dataset)
        stranger = service.tenant("stranger")
        with pytest.raises(NotFound):
            stranger.connection.run(stranger.connection.request("DELETE", f"/data/{dataset.resource_id}"))
    finally:
        resources._resources.update(held)


def test_unused_resources_and_those_of_ended_sessions_are_removed(service: DataService, client: Client) -> None:
    resources = service.state.data
    assert resources is not None
    dataset, loose = rows(client), rows(client)
    now = time.monotonic()
    resources._clock = lambda: now + 1700.0
    try:
        assert len(loose) == 10
        resources._clock = lambda: now + 1900.0
        asyncio.run_coroutine_threadsafe(resources.sweep(), service.loop).result(20)
    finally:
        resources._clock = time.monotonic
    with pytest.raises(Gone, match="not used for 1800 s"):
        len(dataset)
    assert len(loose) == 10
    plain = httpx.post(
        f"{service.url}/api/v1/sessions/{client.session_id}/finish", headers={"X-API-Key": client.connection._key}
    )
    assert plain.status_code == 200, plain.text
    asyncio.run_coroutine_threadsafe(resources.sweep(), service.loop).result(20)
    with pytest.raises(Gone, match="session has ended"):
        len(loose)


def test_rows_are_saved_on_the_client(client: Client, tmp_path: Path) -> None:
    dataset = rows(client)
    for ending in ("jsonl", "json"):
        dataset.save_as(tmp_path / f"rows.{ending}")
        again = Dataset(DatasetMeta(str(tmp_path / f"rows.{ending}")), client=client)  # read here, and sent
        assert list(again) == ROWS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "rows.jsonl"]
    with pytest.raises(Unsupported, match="jsonl and json"):
        dataset.save_as(tmp_path / "rows.parquet")


def test_components_run_on_the_service(client: Client) -> None:
    template = Template("Template", model_id="ms://org/tiny", client=client)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    encoded = template.encode(row)
    assert encoded["labels"][-1] == -100
    assert "ho" in template.decode(encoded["input_ids"])
    made = Preprocessor("SelfCognitionProcessor", model_name="M", model_author="A", client=client)
    columns = made({"query": ["who?"], "response": ["I am {{NAME}} by {{AUTHOR}}"]})
    assert columns["messages"][0][-1]["content"] == "I am M by A"
    own = Dataset(DatasetMeta("org/own"), client=client)
    own.map(made)  # by its recipe
    own.set_template(template)
    own.encode()
    assert len(own) == 3
    assert own[0]["input_ids"]


_BODIES = [
    {"args": 3, "kwargs": {}},
    {"args": [{"$range": [1, 2, 0]}], "kwargs": {}},
    {"args": [{"$meta": {"dataset_id": 3}}], "kwargs": {}},
    {"args": [], "kwargs": {"token": "hf_x"}},
    {"args": [{"$resource": "data-1"}], "kwargs": {}},
    {"args": [{"$meta": {"nope": 3}}], "kwargs": {}},
    {"args": [[[[{"a": 1}]]]], "kwargs": {"dataset_meta": 3}},
    [1],
]


@pytest.mark.parametrize("body", [b"x", b"TWF1\xff\xff\xff\xff", *map(wire.pack, _BODIES)])
def test_malformed_requests_are_refused(client: Client, body: bytes) -> None:
    query = {"session_id": client.session_id, "kind": "dataset", "name": "Dataset"}
    with pytest.raises(RequestRefused) as refused:
        client.connection.run(client.connection.request("POST", "/data", body, query=query))
    assert hasattr(twinkle.errors, refused.value.kind or "")
    assert service_is_well(client)


def service_is_well(client: Client) -> bool:
    return client.connection.run(client.connection.request("GET", "/data")) == {"resources": []}


def _raw_dataset(client: Client, name: str) -> Any:
    """Create a data set by a name that the client would read here."""
    body = {"args": [{"$meta": {"dataset_id": name}}], "kwargs": {}}
    query = {"session_id": client.session_id, "kind": "dataset", "name": "Dataset"}
    try:
        return client.connection.run(client.connection.request("POST", "/data", body, query=query))
    except RequestRefused as error:
        raise getattr(twinkle.errors, error.kind or "")(str(error)) from error


def test_each_kind_that_is_listed_has_methods() -> None:
    from twinkle_server.data import calls, offered

    assert tuple(calls.METHODS) == offered.KINDS
