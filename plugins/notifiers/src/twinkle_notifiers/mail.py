"""Messages by e-mail, through a mail server that takes them over SMTP."""

import smtplib
import socket
import ssl
from collections.abc import Sequence
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Any, Literal

from twinkle.errors import ArgumentError
from twinkle.notifier import Notifier, secrets_of
from twinkle_notifiers.delivery import Delivery, NotNow, Refused
from twinkle_notifiers.text import bytes_of, clean, shortened

LIMIT = 500_000  # bytes
_PORTS = {"starttls": 587, "ssl": 465, "none": 25}
_LONGEST_SUBJECT = 120


class EmailNotifier(Notifier):
    """Sends a message as a plain-text e-mail; its first line is the subject.

    All attempts of one message have the same Message-ID, by which mail servers know it again. A message above 500,000
    bytes loses its middle. What cannot be delivered is logged and forgotten.

    Args:
        host: the mail server.
        sender: the address that it is from.
        recipients: the address or addresses of the recipients.
        user: the name to log in with; None: without.
        password: its password; a secret.
        security: `starttls` (encrypted after a greeting), `ssl` (from the first byte) or `none` (refused with a
            password, which anybody on the way could read).
        port: by default 587, 465 or 25, as `security` says.
        ca_file: a file of certificates to trust instead of the system's, for a server with a certificate of its own.
        timeout: seconds to wait for each answer of the server.
        retries: attempts after the first, where the server is away or busy.
        time_limit: seconds for all attempts together.

    Raises:
        ArgumentError: an argument does not fit; no message shows the password.
    """

    def __init__(
        self,
        host: str,
        sender: str,
        recipients: str | Sequence[str],
        user: str | None = None,
        password: str | None = None,
        security: Literal["starttls", "ssl", "none"] = "starttls",
        port: int | None = None,
        ca_file: str | None = None,
        timeout: float = 10.0,
        *,
        retries: int = 3,
        time_limit: float = 30.0,
    ) -> None:
        if security not in _PORTS:
            raise ArgumentError(f"EmailNotifier: security is {security!r}; it is one of {', '.join(map(repr, _PORTS))}")
        if not isinstance(host, str) or not host or not host.isascii() or any(letter <= " " for letter in host):
            raise ArgumentError(f"EmailNotifier: host is {host!r}; give the name of a mail server")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536):
            raise ArgumentError(f"EmailNotifier: port is {port!r}; it is a whole number from 1 to 65535")
        if (user is None) != (password is None):
            raise ArgumentError("EmailNotifier: user and password belong together; only one of them is given")
        if password is not None and security == "none":
            raise ArgumentError("EmailNotifier: security='none' would send the password in the clear; use 'starttls'")
        self._host, self._port, self._security = host, port or _PORTS[security], security
        self._sender = _address(sender, "sender")
        several = [recipients] if isinstance(recipients, str) else list(recipients)
        self._recipients = [_address(one, "recipients") for one in several]
        if not several:
            raise ArgumentError("EmailNotifier: recipients is empty; give at least one address")
        self._user, self._password, self._ca_file = user, password, ca_file
        self._deliver = Delivery("EmailNotifier", timeout, retries, time_limit)

    def __call__(self, message: str) -> None:
        """Deliver `message`, or log why not."""
        mail = self._mail(shortened(clean(message), LIMIT, bytes_of))
        self._deliver(lambda seconds: self._send(mail, seconds), to=self._host, secrets=secrets_of(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor and `type`; they hold the password."""
        return {
            "type": "EmailNotifier",
            "host": self._host,
            "sender": self._sender,
            "recipients": list(self._recipients),
            "user": self._user,
            "password": self._password,
            "security": self._security,
            "port": self._port,
            "ca_file": self._ca_file,
            **self._deliver.to_dict(),
        }

    def _mail(self, text: str) -> EmailMessage:
        mail = EmailMessage()
        subject = " ".join(text.strip().partition("\n")[0].split())[:_LONGEST_SUBJECT]
        mail["Subject"] = "".join(letter for letter in subject if letter.isprintable())
        mail["From"] = self._sender
        mail["To"] = ", ".join(self._recipients)
        mail["Date"] = formatdate()
        mail["Message-ID"] = make_msgid(domain="twinkle.invalid")  # the name of this machine may take long to find
        mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no holiday notes in return
        mail.set_content(text, cte="base64")
        return mail

    def _send(self, mail: EmailMessage, seconds: float) -> None:
        try:
            with self._server(seconds) as server:
                if self._user is not None and self._password is not None:
                    server.login(self._user, self._password)
                refused = server.send_message(mail)
        except smtplib.SMTPResponseException as error:  # its text may repeat what was sent to log in
            raise _answer(error.smtp_code) from None
        except smtplib.SMTPRecipientsRefused as error:
            raise _answer(max(code for code, _ in error.recipients.values())) from None
        except smtplib.SMTPNotSupportedError:
            raise Refused("the server offers no STARTTLS or no login that is known; see security=") from None
        except ssl.SSLCertVerificationError as error:
            raise Refused(f"its certificate is not trusted ({error.verify_message}); see ca_file=") from None
        except OSError as error:  # also smtplib's other errors
            raise NotNow(type(error).__name__) from None
        if refused:
            raise Refused(f"{len(refused)} of {len(self._recipients)} recipients are refused; the others have it")

    def _server(self, seconds: float) -> smtplib.SMTP:
        name = socket.gethostname()  # smtplib's own choice asks the network for a longer one
        if self._security == "ssl":
            return smtplib.SMTP_SSL(self._host, self._port, name, timeout=seconds, context=self._trust())
        server = smtplib.SMTP(self._host, self._port, name, timeout=seconds)
        if self._security == "starttls":
            try:
                server.starttls(context=self._trust())
            except BaseException:
                server.close()
                raise
        return server

    def _trust(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            raise Refused(f"ca_file {self._ca_file} cannot be read: {error.strerror or error}") from None


def _address(text: Any, name: str) -> str:
    try:
        return Address(addr_spec=text).addr_spec
    except Exception as error:  # the parser raises many kinds
        raise ArgumentError(f"EmailNotifier: {name} holds {text!r}; give addresses such as me@example.org") from error


def _answer(code: int) -> Exception:
    """Return the error for an SMTP reply (RFC 5321: 4xx is temporary, 5xx permanent)."""
    why = f"SMTP {code}" + (", the login is refused" if code == 535 else "")
    return NotNow(why) if 400 <= code < 500 or code == -1 else Refused(why)
