"""A number of a request means one request for ever: the same one is known again, another one is refused with 409."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_history import read_ledger
from server_raw import Raw, RawModel, pass_body, row
from serving import ledger

from twinkle_server.application import create_application
from twinkle_server.settings import Settings

# What a client's loss graph gets is its content's hash, and nothing is kept of it: there is nothing to be confused.
WITHOUT = {"/create_custom_loss"}
Requests = dict[str, tuple[Any, list[Any]]]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raw]:
    service = ledger(tmp_path_factory.mktemp("numbers") / "data", {"times": {"poll": 1.0}}).start()
    with Raw(service.url) as connection:
        yield connection
    service.stop()


def requests(raw: Raw) -> tuple[RawModel, Requests]:
    """Return a model, and for each numbered route a request with others that claim its number."""
    model = raw.model()
    model.forward_backward([row([5, 2, 3])])
    first = model.save("a")
    model.step()
    second, sampled = model.save("b"), model.save_sampler("s")
    sampler = raw.sampler(model.session, 0, model_path=sampled)
    numbers = iter(range(model.last + 1, model.last + 20))
    created = raw.create_body(model.session, 1)
    loaded = {"session_id": model.session, "model_seq_id": 2, "path": first, "optimizer": True}
    copied = {"session_id": model.session, "model_seq_id": 3, "source_path": first}
    opened = {"session_id": model.session, "sampling_session_seq_id": 1, "model_path": sampled}
    found: Requests = {
        "/create_model": (created, [{**created, "lora_config": {"rank": 4}}, {**created, "user_metadata": {"a": "b"}}]),
        "/load_weights": (loaded, [{**loaded, "path": second}, {**loaded, "optimizer": False}]),
        "/copy_weights": (copied, [{**copied, "source_path": second}, {**copied, "ttl_seconds": 7200}]),
        "/create_sampling_session": (opened, [{**opened, "model_path": first}]),
        "/asample": (
            sampler.body([7], number=0),
            [sampler.body([8], number=0), sampler.body([7], count=2, number=0)],
        ),
    }

    def numbered(path: str, body: dict[str, Any], *changes: dict[str, Any]) -> None:
        body = {"model_id": model.id, "seq_id": next(numbers), **body}
        found[path] = (body, [{**body, **change} for change in changes])

    at = next(numbers)
    rows = [[row([6, 2, 3])], [row([6, 2, 4])], []]
    same, other, none = (pass_body(model.id, at, data) for data in rows)
    found["/forward_backward"] = (same, [other, none, pass_body(model.id, at, rows[0], forward_only=True)])
    chunk = {"model_input": {"chunks": [{"tokens": [7], "type": "encoded_text"}]}, "loss_fn_inputs": {}}
    passed = {"data": [chunk], "loss_fn": "cross_entropy"}
    numbered("/forward", {"forward_input": passed}, {"forward_input": {**passed, "data": [chunk, chunk]}})
    numbered("/optim_step", {"adam_params": {}}, {"adam_params": {"learning_rate": 0.5}}, {"adam_params": "none"})
    numbered("/save_weights", {"path": "c"}, {"path": "d"}, {"path": "c", "overwrite": True})
    numbered("/save_weights_for_sampler", {"path": "c"}, {"path": "d"}, {"path": "c", "ttl_seconds": 7200})
    numbered("/save_weights_external", {"path": "c"}, {"path": "d"})
    numbered("/load_weights into", {"path": first, "optimizer": True}, {"path": second}, {"optimizer": False})
    model.last = next(numbers) - 1
    return model, found


def test_another_request_under_a_number_that_was_used_is_409_on_every_route(raw: Raw) -> None:
    model, found = requests(raw)
    assert {path for path in found if " " not in path} | WITHOUT == numbered_routes(), "a numbered route is not here"
    for path, (body, others) in found.items():
        route = path.partition(" ")[0]
        first, again = (raw.send(route, body) for _ in range(2))
        assert (first.status_code, again.json()) == (200, first.json()), path
        for other in others:
            refused = raw.send(route, other)
            assert (refused.status_code, bool(refused.json().get("detail"))) == (409, True), (path, other)
    step = found["/optim_step"][0]
    stolen = raw.send("/save_weights", {"model_id": model.id, "seq_id": step["seq_id"], "path": "e"})
    assert stolen.status_code == 409, "a number of another kind of operation"
    pending, applied = read_ledger(model.forward([row([1, 2])]))
    assert ([number >> 32 for number in pending], applied) == ([], []), "loaded as it was saved, before its step"
    names = {entry["checkpoint_id"] for entry in raw.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"]}
    assert names == {f"{kind}/{name}" for kind, name in KEPT}


KEPT = [("weights", "a"), ("weights", "b"), ("sampler_weights", "s"), ("weights", "c"), ("sampler_weights", "c")]
KEPT += [("external_weights", "c")]


def numbered_routes() -> set[str]:
    """Return routes whose bodies have a number, from the application's own description; passes are not described."""
    described = create_application(None, None, Settings("m", Path("none"))).openapi()["paths"]  # type: ignore[arg-type]
    found = {"/forward", "/forward_backward"}
    for path, operations in described.items():
        if not path.startswith("/api/v1"):  # native routes: `server/client/tests/service`
            continue
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if any(name.endswith("seq_id") for name in content["schema"].get("properties", {})):
                    found.add(path.removeprefix("/api/v1"))
    return found
