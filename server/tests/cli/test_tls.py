"""HTTPS with a certificate of one's own, and a proxy that strips a prefix: the SDK works through both."""

import http.client
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from ledger_engine import ENGINE, MODEL
from server_raw import Raw, row
from serving import Served, commanded

from twinkle_server import tls
from twinkle_server.cli.server import main as server
from twinkle_server.cli.top import Unreachable
from twinkle_server.cli.top import main as top

SECONDS = 30.0
SDK = """
import sys, tinker
from tinker import types

with tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2]) as client:
    training = client.create_lora_training_client(base_model="ledger_model", rank=4).result(60)
    inputs = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    print(training.forward_backward([datum], "cross_entropy").result(60).metrics["loss:sum"])
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
    print(training.save_state("a").result(60).path)
"""


@dataclass
class Certificates:
    """Files of a certificate for 127.0.0.1, its key, and the authority that clients trust."""

    cert: Path
    key: Path
    authority: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key)

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority))


def certificates(folder: Path) -> Certificates:
    """Write an authority of one's own, and a certificate that it has issued."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("test authority", "test")]
    now, made = datetime.now(UTC), []
    for place, (key, name) in enumerate(zip(keys, names, strict=True)):
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=place == 0, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key()), critical=False)
        )
        if place == 0:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
            builder = builder.add_extension(address, critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    found = Certificates(folder / "cert.pem", folder / "key.pem", folder / "authority.pem")
    found.authority.write_bytes(made[0])
    found.cert.write_bytes(made[1])
    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    found.key.write_bytes(keys[1].private_bytes(*forms))
    return found


def started(data: Path, *words: str, verify: ssl.SSLContext | bool = True) -> Served:
    made = commanded(["twinkle", "serve", str(MODEL), "--backend", ENGINE, "--data", str(data), *words])
    made.verify = verify
    return made.start()


def run_sdk(url: str, key: str, **variables: str) -> list[str]:
    environment = {"PATH": "", "NO_PROXY": "127.0.0.1", "TINKER_TELEMETRY": "0", **variables}
    command = [sys.executable, "-c", SDK, url, key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def status(data: Path) -> str:
    result = CliRunner().invoke(server, ["status", "--data", str(data)])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[0]


def wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def presented(served: Served) -> bytes:
    """Return the certificate that a new connection gets."""
    address = urlsplit(served.url)
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((str(address.hostname), int(address.port or 0))))


@pytest.fixture
def own(tmp_path: Path) -> Certificates:
    return certificates(tmp_path)


@pytest.fixture
def secure(own: Certificates, tmp_path: Path) -> Iterator[Served]:
    """A service with a certificate."""
    service = started(tmp_path / "data", *own.flags, verify=own.trusting)
    yield service
    assert service.stop() == 0


def test_a_certificate_is_served_and_renewed_without_a_restart(
    secure: Served, own: Certificates, tmp_path: Path
) -> None:
    assert secure.url.startswith("https://")
    with httpx.Client(verify=own.trusting, trust_env=False) as client:
        assert client.get(f"{secure.url}/readyz").status_code == 200
    with httpx.Client(trust_env=False) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY"):
        stranger.get(f"{secure.url}/readyz")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(secure.url.replace("https", "http"), trust_env=False)
    assert status(secure.data).startswith("serves ledger_model at https://127.0.0.1")
    first = presented(secure)
    assert first == ssl.PEM_cert_to_DER_cert(own.cert.read_text())
    certificates(tmp_path)
    assert presented(secure) == first, "before it is told"
    assert secure.process is not None
    secure.process.send_signal(signal.SIGHUP)
    renewed = ssl.PEM_cert_to_DER_cert(own.cert.read_text())
    wait(lambda: presented(secure) == renewed, "the renewed certificate is not served")
    assert status(secure.data).startswith("serves ledger_model"), "it knows the new certificate"
    known = (secure.data / "server.json").read_text()
    assert "ready, engine up" in CliRunner().invoke(top, ["--data", str(secure.data), "--once"]).output
    (secure.data / "server.json").write_text(known.replace(tls.fingerprint(own.cert), "0" * 64))
    assert "does not respond" in status(secure.data), "the token is sent to no other certificate"
    refused = CliRunner().invoke(top, ["--data", str(secure.data), "--once"])
    assert isinstance(refused.exception, Unreachable)
    assert "the certificate is not that of the server" in str(refused.exception)
    (secure.data / "server.json").write_text(known)
    own.cert.write_text("no certificate")
    secure.process.send_signal(signal.SIGHUP)
    wait(lambda: "keeping the previous certificate" in secure.log(), "nothing was said about the broken file")
    assert presented(secure) == renewed


class Stripping(BaseHTTPRequestHandler):
    """Forwards what begins with a prefix, without it, as `location /team/ { proxy_pass http://...; }` does."""

    protocol_version = "HTTP/1.1"
    upstream: ClassVar[str] = ""
    prefix: ClassVar[str] = "/team"
    headers_added: ClassVar[dict[str, str]] = {}

    def _forward(self) -> None:
        if not self.path.startswith(f"{self.prefix}/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.upstream)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "host")}
        kept |= {"X-Forwarded-For": self.client_address[0], "Host": "inner.invalid", **self.headers_added}
        with closing(
            http.client.HTTPConnection(str(address.hostname), address.port, timeout=SECONDS * 2)
        ) as connection:
            connection.request(self.command, self.path.removeprefix(self.prefix), body, kept)
            answer = connection.getresponse()
            content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _forward

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[tuple[Served, str]]:
    """A service with keys behind a proxy that removes `/team`, and the address of the proxy."""
    service = started(tmp_path / "data", "--root-path", "/team", "--trusted-proxy", "127.0.0.1")
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Stripping)
    proxy.daemon_threads = True
    host = f"127.0.0.1:{proxy.server_address[1]}"
    Stripping.upstream, Stripping.headers_added = service.url, {"X-Forwarded-Host": host, "X-Forwarded-Proto": "http"}
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield service, f"http://{host}/team"
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join(SECONDS)
        assert service.stop() == 0


def test_links_of_downloads_are_right_behind_a_proxy_that_strips_a_prefix(behind: tuple[Served, str]) -> None:
    service, url = behind
    with Raw(url, service.key) as raw:
        model = raw.model()
        model.forward_backward([row([1, 2, 3])])
        path = model.save_external("a").removeprefix("tinker://").replace("/external", "/checkpoints/external")
        links = raw.get(f"/training_runs/{path}/external_weights_urls")["urls"]
        assert all(link.startswith(f"{url}/download/") for link in links.values())
        for link in links.values():
            assert httpx.get(link, trust_env=False).status_code == 200
        tokenizer = httpx.get(f"{url}/twinkle/status", headers={"X-API-Key": service.key}, trust_env=False)
        assert tokenizer.status_code == 200
        assert httpx.get(f"{url}/twinkle/status", trust_env=False).status_code == 401, "no local request"
    with Raw(service.url, service.key) as direct:
        links = direct.get(f"/training_runs/{path}/external_weights_urls")["urls"]
        assert all(link.startswith(f"{service.url}/team/download/") for link in links.values())


@pytest.mark.full
def test_the_sdk_trains_through_a_proxy_that_strips_a_prefix(behind: tuple[Served, str]) -> None:
    service, url = behind
    loss, saved = run_sdk(url, service.key)
    assert float(loss) > 0
    with Raw(url, service.key) as raw:
        assert [entry["tinker_path"] for entry in raw.get("/checkpoints")["checkpoints"]] == [saved]


@pytest.mark.full
def test_the_sdk_trains_over_tls_with_an_authority_of_ones_own(secure: Served, own: Certificates) -> None:
    loss, saved = run_sdk(secure.url, secure.key, SSL_CERT_FILE=str(own.authority))
    assert float(loss) > 0
    assert saved.startswith("tinker://")
