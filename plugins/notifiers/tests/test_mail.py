"""E-mail against a mail server on this machine: encrypted or not, refused, busy, gone."""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from receivers import Mailbox, mail_server

from twinkle.errors import ArgumentError
from twinkle.notifier import Notifier
from twinkle_notifiers import delivery
from twinkle_notifiers.mail import EmailNotifier

WHO = {"host": "127.0.0.1", "sender": "run@example.org", "recipients": ["one@example.org", "two@example.org"]}
LOGIN = {"user": "run", "password": "9f21c7-e8"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def box() -> Iterator[Mailbox]:
    with mail_server(offers="") as found:
        yield found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """Return a certificate of 127.0.0.1, signed by itself, and what a server does with it."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return folder / "ca.pem", context


def unencrypted(box: Mailbox, **more: Any) -> EmailNotifier:
    return EmailNotifier(**{**WHO, "security": "none", "port": box.port, **more})


def test_a_message_arrives_as_plain_text_with_its_first_line_as_subject(box: Mailbox) -> None:
    text = "Twinkle: sft failed\nValueError: naïve 漢字\n.\n\n" + "x" * 2000
    unencrypted(box)(text)
    (mail,) = box.mails
    assert mail["Subject"] == "Twinkle: sft failed"
    assert mail.get_content().rstrip("\n") == text
    assert (mail["From"], mail["To"]) == ("run@example.org", "one@example.org, two@example.org")
    assert box.recipients == ["one@example.org", "two@example.org"]
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail["Date"]


@pytest.mark.parametrize(
    ("text", "subject"),
    [("", "(an empty message)"), ("\n\nA: b\rBcc: c", "A: b Bcc: c"), ("y" * 500, "y" * 120), ("a\0b\x1bc", "abc")],
)
def test_no_first_line_breaks_the_header(text: str, subject: str, box: Mailbox) -> None:
    unencrypted(box)(text)
    assert box.mails[0]["Subject"] == subject
    assert box.mails[0]["Bcc"] is None


@pytest.mark.parametrize("security", ["starttls", "ssl"])
def test_the_login_goes_through_an_encrypted_line(security: str, certificate: tuple[Path, ssl.SSLContext]) -> None:
    ca_file, tls = certificate
    with mail_server(tls, at_once=security == "ssl") as box:
        notifier = EmailNotifier(**WHO, **LOGIN, security=security, port=box.port, ca_file=str(ca_file))  # type: ignore[arg-type]
        Notifier.from_dict(json.loads(json.dumps(notifier.to_dict())))("hi")
        assert box.encrypted
        assert len(box.mails) == 1
        assert any(command.startswith("AUTH ") for command in box.commands)


@pytest.mark.parametrize("security", ["starttls", "ssl"])
def test_a_server_with_a_strange_certificate_gets_no_password(
    security: Any, certificate: tuple[Path, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    with mail_server(certificate[1], at_once=security == "ssl") as box:
        EmailNotifier(**WHO, **LOGIN, security=security, port=box.port)("hi")
        assert box.mails == []
        assert not any("AUTH" in command for command in box.commands)
    assert "after 1 attempt: its certificate is not trusted (self-signed certificate); see ca_file=" in caplog.text


def test_a_server_without_starttls_gets_nothing(box: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    EmailNotifier(**WHO, **LOGIN, port=box.port)("hi")
    assert box.mails == []
    assert "after 1 attempt: the server offers no STARTTLS" in caplog.text


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["MAIL", "RCPT", "DATA", "EHLO"])
def test_a_busy_server_is_asked_again(command: str, box: Mailbox) -> None:
    box.replies = {command: ["421 later"] if command == "EHLO" else ["451 later"] * 2, "HELO": ["421 later"]}
    unencrypted(box)("hi")
    assert len(box.mails) == 1


def test_the_second_attempt_is_the_same_mail(box: Mailbox) -> None:
    box.replies = {"END": ["451 was it taken?"]}
    unencrypted(box)("hi")
    assert len(box.mails) == 2
    assert box.mails[0]["Message-ID"] == box.mails[1]["Message-ID"]


def test_a_server_that_refuses_is_not_asked_again(box: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    box.replies = {"MAIL": ["550 no such sender run@example.org"]}
    unencrypted(box)("hi")
    assert box.mails == []
    assert "a message to 127.0.0.1 is lost after 1 attempt: SMTP 550" in caplog.text


def test_one_refused_recipient_does_not_keep_the_mail_from_the_others(
    box: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    box.replies = {"RCPT": ["550 who?"]}
    unencrypted(box)("hi")
    assert len(box.mails) == 1
    assert "1 of 2 recipients are refused; the others have it" in caplog.text


def test_a_refused_login_shows_no_password(
    certificate: tuple[Path, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    with mail_server(certificate[1]) as box:
        box.replies = {"AUTH": ["535 9f21c7-e8 is wrong"] * 4}
        notifier = EmailNotifier(**WHO, **LOGIN, port=box.port, ca_file=str(certificate[0]))
        notifier("hi")
    assert "after 1 attempt: SMTP 535, the login is refused" in caplog.text
    assert "9f21c7" not in caplog.text + repr(notifier)


def test_nobody_there_is_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    EmailNotifier(**WHO, port=9, retries=1)("hi")
    assert "a message to 127.0.0.1 is lost after 2 attempts: ConnectionRefusedError" in caplog.text


def test_a_certificate_file_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with mail_server() as box:
        EmailNotifier(**WHO, port=box.port, ca_file="/absent.pem")("hi")
    assert "ca_file /absent.pem cannot be read: No such file or directory" in caplog.text


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"host": "a b"}, "host is 'a b'"),
        ({"port": 0}, "port is 0"),
        ({"port": True}, "port is True"),
        ({"security": "tls"}, "security is 'tls'; it is one of 'starttls', 'ssl', 'none'"),
        ({"sender": "me"}, "sender holds 'me'"),
        ({"sender": "a@b\nBcc: c@d"}, "sender holds"),
        ({"recipients": []}, "recipients is empty"),
        ({"recipients": ["a@b.c", 3]}, "recipients holds 3"),
        ({"user": "me"}, "user and password belong together"),
        ({**LOGIN, "security": "none"}, "would send the password in the clear"),
    ],
)
def test_what_cannot_work_is_refused(more: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        EmailNotifier(**{**WHO, **more})
    assert "9f21c7" not in str(caught.value)


def test_one_recipient_may_be_a_text() -> None:
    assert EmailNotifier("h", "a@b.c", "d@e.f").to_dict()["recipients"] == ["d@e.f"]
