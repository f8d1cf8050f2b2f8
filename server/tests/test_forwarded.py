"""Headers of proxies count only from trusted addresses; a prefix is in links and nowhere else."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from twinkle.errors import ConfigError
from twinkle_server.limits.forwarded import ForwardedMiddleware, networks
from twinkle_server.telemetry.health import is_local

PROXY, STRANGER = "10.1.2.3", "192.0.2.7"


def seen(sender: str, trusted: tuple[str, ...] = ("10.0.0.0/8",), root: str = "", **headers: str) -> dict[str, Any]:
    """Return what the application knows about a request."""
    found: dict[str, Any] = {}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        found.update(base=str(request.base_url), client=scope["client"][0], path=scope["path"], local=is_local(scope))

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": "inner:80", **headers}.items()]
    scope = {"type": "http", "method": "GET", "scheme": "http", "path": "/twinkle/status", "query_string": b"",
             "headers": raw, "client": (sender, 5), "server": ("inner", 80)}  # fmt: skip
    asyncio.run(ForwardedMiddleware(application, trusted, root)(scope, None, None))
    return found


ALL = {
    "x_forwarded_for": "198.51.100.9, 10.9.9.9",
    "x_forwarded_proto": "https",
    "x_forwarded_host": "train.example.org:8443",
    "x_forwarded_prefix": "/team/",
}


def test_a_trusted_proxy_says_who_asks_and_how_links_begin() -> None:
    found = seen(PROXY, **ALL)
    assert found["base"] == "https://train.example.org:8443/team/"
    assert found["client"] == "198.51.100.9", "the nearest sender that is no proxy of ours"
    assert found["path"] == "/twinkle/status"
    assert not found["local"]


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8",)])
def test_anybody_else_says_nothing(trusted: tuple[str, ...]) -> None:
    found = seen(STRANGER, trusted, **ALL)
    assert (found["base"], found["client"]) == ("http://inner:80/", STRANGER)
    assert not seen("127.0.0.1", (), **ALL)["local"], "a request with such headers is not from here"


def test_a_client_cannot_put_an_address_before_that_of_the_proxy() -> None:
    found = seen(PROXY, x_forwarded_for="127.0.0.1, 198.51.100.9")
    assert found["client"] == "198.51.100.9"
    assert seen(PROXY, x_forwarded_for="127.0.0.1")["local"] is False


@pytest.mark.parametrize(
    "changed",
    [
        {"x_forwarded_host": "evil/path"}, {"x_forwarded_host": "a b"}, {"x_forwarded_proto": "javascript"},
        {"x_forwarded_prefix": "//evil.example"}, {"x_forwarded_prefix": "/a/../b?x"},
        {"x_forwarded_prefix": "x" * 999},
    ],
)  # fmt: skip
def test_values_that_are_none_are_ignored(changed: dict[str, str]) -> None:
    assert seen(PROXY, **changed)["base"] == "http://inner:80/"


def test_of_a_chain_the_nearest_proxy_counts() -> None:
    found = seen(PROXY, x_forwarded_host="evil.example, good.example", x_forwarded_proto="http,https")
    assert found["base"] == "https://good.example/"


@pytest.mark.parametrize("prefix", ["/team", "/twinkle", "/a/b"])
def test_the_prefix_is_in_links_even_where_a_route_begins_like_it(prefix: str) -> None:
    found = seen(STRANGER, (), prefix)
    assert (found["base"], found["path"]) == (f"http://inner:80{prefix}/", "/twinkle/status")


def test_an_address_of_six_that_holds_one_of_four_is_that_one() -> None:
    assert seen(f"::ffff:{PROXY}", **ALL)["client"] == "198.51.100.9"


@pytest.mark.parametrize("text", ["proxy.local", "10.0.0.0/33", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--trusted-proxy must be an address or a network"):
        networks([text])
