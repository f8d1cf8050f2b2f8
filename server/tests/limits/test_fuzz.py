"""Whatever arrives on whichever route, the answer is no 5xx, errors are JSON, and others go on as before."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_schema
from server_fuzz import Struck, every_route, routes, seeds, strike
from server_raw import Raw, RawModel, arrays, row
from serving import Served, ledger, pool

from twinkle.testing import tiny_model
from twinkle_server.application import describe_routes

TIMES = {"poll": 0.02, "gap_pause": 0.01, "gap_fail": 0.5, "session": 3600.0}
ROWS = [row([7, 8, 9, 10]), row([11, 12, 13], [0.5, -1.0])]
TEMPLATE = Path(__file__).parents[3] / "plugins" / "chat" / "tests" / "chat_templates" / "qwen2_5.jinja"
BUSY = ("forward", "optim", "model", "weights", "sampl", "loss", "completions", "messages", "embeddings")
"""Parts of the paths that lead to the engine."""


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that counts, and takes bodies of a megabyte."""
    data = tmp_path_factory.mktemp("fuzz") / "data"
    yield from running(ledger(data, {"times": TIMES, "limits": {"body_bytes": 2**20}}))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that trains, and takes losses of the client's."""
    folder = tmp_path_factory.mktemp("fuzz-trains")
    base = tiny_model(folder / "base", "qwen3", initializer_range=0.1, chat_template=TEMPLATE.read_text("utf-8"))
    yield from running(pool(folder / "data", base, {"times": {**TIMES, "poll": 5.0}, "custom_losses": True}))


def running(served: Served) -> Iterator[Served]:
    try:
        yield served.start()
    finally:
        served.stop()


def begin(raw: Raw) -> RawModel:
    """Return a model that was trained, and has gradients that are in no step yet."""
    model = raw.model()
    model.train([1, 2, 3])
    model.forward_backward(ROWS)
    return model


def state_of(model: RawModel) -> list[Any]:
    """Return all that can be seen of a model: what a pass says, its gradients' norm, and what a pass says then."""
    passes = [model.forward(ROWS)]
    norm = model.step(learning_rate=1e-2)["metrics"]
    passes.append(model.forward(ROWS))
    seen = [value for output in passes for name in output.loss_fn_outputs[0].fields for value in arrays(output, name)]
    return [*seen, *(np.asarray(norm[name]) for name in sorted(norm))]


def survives(served: Served, count: int, seed: int, paths: list[tuple[str, str]]) -> Struck:
    """Strike, and demand that another model is what it would be without that, and nothing the service's fault."""
    with Raw(served.url) as raw:
        alone = state_of(begin(raw))
        bystander = begin(raw)
        struck = strike(served.url, count, seed, paths)
        for found, expected in zip(state_of(bystander), alone, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        wait_for(raw, struck.futures)
        said = raw.http.get(f"{served.url}/twinkle/status").json()
    assert said["engine_restarts"] == 0
    assert said["ready"] is True
    return struck


def wait_for(raw: Raw, futures: list[str]) -> None:
    """Demand that each is over soon: done, or failed through the fault of who asked."""
    end = time.monotonic() + 120
    for future in futures:
        while (answer := raw.poll(future)).headers["content-type"] == "application/json":
            said = answer.json()
            if said.get("type") != "try_again":
                assert said.get("category", "user") == "user", said
                break
            assert time.monotonic() < end, (future, said)
            time.sleep(0.05)
        assert answer.status_code in (200, 410), answer.text


def engine_routes() -> list[tuple[str, str]]:
    return [(method, path) for method, path in routes() if method == "POST" and any(part in path for part in BUSY)]


def test_mutated_requests_on_every_route_hurt_nobody_else(counting: Served, tmp_path: Path) -> None:
    struck = survives(counting, 1500, 1, [*every_route(tmp_path), *engine_routes()])
    assert len(struck.futures) > 50


@pytest.mark.full
def test_they_do_not_where_there_is_a_real_model_either(training: Served) -> None:
    struck = survives(training, 700, 1, engine_routes())
    assert len(struck.futures) > 30


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_more_of_them_do_not_either_and_are_answered_at_once(counting: Served, tmp_path: Path, seed: int) -> None:
    struck = survives(counting, 5000, seed, [*every_route(tmp_path), *engine_routes()])
    assert np.quantile(struck.refused, 0.99) <= 0.1


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_more_for_the_engine_do_not_either(training: Served, seed: int) -> None:
    survives(training, 2500, seed, engine_routes())


def matches(served: Served, count: int, seed: int, least: float) -> None:
    """Demand that the answers to schemathesis's cases are as described, and a share of operations once a success."""
    found = server_schema.strike(served.url, count, seed)
    assert not found.wrong, f"{len(found.wrong)} of {found.sent}:\n" + "\n".join(found.wrong[:5])
    assert len(found.good) >= least * len(found.asked), sorted(found.asked - found.good)
    with Raw(served.url) as raw:
        said = raw.http.get(f"{served.url}/twinkle/status").json()
    assert (said["engine_restarts"], said["ready"]) == (0, True)


def test_schemathesis_finds_no_answer_that_is_not_described(counting: Served) -> None:
    matches(counting, 1, 0, 0.4)


@pytest.mark.full
def test_schemathesis_finds_none_in_more_cases_either(counting: Served) -> None:
    matches(counting, 12, 0, 0.6)


@pytest.mark.full
def test_schemathesis_finds_none_where_there_is_a_real_model_either(training: Served) -> None:
    matches(training, 5, 0, 0.6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 5))
def test_schemathesis_finds_none_in_many_more(counting: Served, training: Served, seed: int) -> None:
    matches(counting, 80, seed, 0.6)
    matches(training, 20, seed, 0.6)


def test_all_that_is_served_is_asked(tmp_path: Path) -> None:
    described = {(method.upper(), path) for path, methods in describe_routes()["paths"].items() for method in methods}
    served = every_route(tmp_path)
    assert described == set(served)
    every = {path for _, path in served}
    assert every > {path for _, path in routes()}
    assert every >= {"/download/{token}/{file}", "/healthz", "/metrics", "/readyz", "/twinkle/status"}


def test_every_route_with_a_body_has_a_good_one_to_start_from() -> None:
    with_body = {path.removeprefix("/api/v1") for method, path in routes() if method in ("POST", "PUT")}
    missing = {path for path in with_body - set(seeds("s", "m")) if not path.endswith("/publish")}
    assert not missing
