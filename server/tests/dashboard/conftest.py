"""A service with two tenants, of whom one has trained, asked without a browser."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from click.testing import CliRunner
from dashboard_runs import HOSTILE, hostile_model, learn, model_folder
from server_raw import Failed, Raw, RawModel, row
from serving import Served, ledger

from twinkle_server.cli.server import main


@dataclass
class Site:
    """A service, the keys of its tenants, and the run of one of them."""

    served: Served
    keys: dict[str, str]
    run: RawModel
    clients: list[httpx.Client] = field(default_factory=list)

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client that follows no redirect, logged in with a key."""
        client = httpx.Client(base_url=self.served.url, trust_env=False, timeout=30)
        self.clients.append(client)
        if key is not None:
            assert client.post("/ui/login", data={"key": key}).status_code == 303
        return client


def command(served: Served, *words: str) -> str:
    """Run `twinkle server` on the folder of a service, and return what it prints."""
    done = CliRunner().invoke(main, [*words, "--data", str(served.data)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    settings = {"model": str(model_folder(folder / "model")), "auth": True, "times": {"gap_fail": 1e6}}
    served = ledger(folder / "data", settings).start()
    try:
        keys = {name: command(served, "keys", "create", name).strip() for name in ("ana", "eve")}
        keys["operator"] = served.key
        with Raw(served.url, keys["ana"]) as raw:
            run = hostile_model(raw)
            learn(run, 3, HOSTILE)
            run.save("kept")
            with pytest.raises(Failed):
                run.forward([row([1, 2])], HOSTILE)
            made = Site(served, keys, run)
            yield made
        for client in made.clients:
            client.close()
    finally:
        served.stop()
