"""Receivers on this machine: one for HTTP that answers as it is told, and one for SMTP that keeps what it takes."""

import json
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, str, dict[str, str]]


@dataclass
class Request:
    """What arrived by HTTP."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Web:
    """An HTTP receiver: it gives the answers one after the other, and the last one for ever."""

    address: str
    answers: list[Answer] = field(default_factory=lambda: [(200, "{}", {})])
    requests: list[Request] = field(default_factory=list)

    def answer(self, *answers: tuple[Any, ...]) -> None:
        full = [(status, text, rest[0] if rest else {}) for status, text, *rest in answers]
        self.answers[:] = full

    def next_answer(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def web() -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.requests.append(Request(self.path, dict(self.headers), body))
            status, text, headers = found.next_answer()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Web(f"http://127.0.0.1:{server.server_port}")
    with serving(server):
        yield found


@dataclass
class Mailbox:
    """An SMTP receiver; `replies` maps a command, or `END` of a mail, to replies of its own."""

    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    replies: dict[str, list[str]] = field(default_factory=dict)
    encrypted: bool = False


@contextmanager
def mail_server(
    tls: ssl.SSLContext | None = None, offers: str = "STARTTLS", at_once: bool = False
) -> Iterator[Mailbox]:
    """Take mail on this machine.

    Args:
        tls: the certificate, where there is encryption.
        offers: what EHLO lists beside AUTH.
        at_once: encryption begins with the first byte.
    """
    box = Mailbox()

    class Handler(socketserver.BaseRequestHandler):
        connection: Any = None
        lines: Any = None

        def handle(self) -> None:
            try:
                self.secure() if at_once else self.open(self.request)
                self.say("220 here")
                while self.command():
                    pass
            except (OSError, ValueError):
                return  # the client has gone, or does not trust the certificate
            finally:
                for opened in (self.lines, self.connection):
                    if opened is not None:
                        opened.close()

        def open(self, connection: Any) -> None:
            self.connection, self.lines = connection, connection.makefile("rb")

        def secure(self) -> None:
            assert tls is not None
            self.open(tls.wrap_socket(self.request if at_once else self.connection, server_side=True))
            box.encrypted = True

        def say(self, text: str) -> None:
            self.connection.sendall(text.encode() + b"\r\n")

        def command(self) -> bool:
            line = self.lines.readline().decode().strip()
            word = line.split(" ")[0].upper()
            box.commands.append(line)
            own = box.replies.get(word, [])
            if own:
                self.say(own.pop(0))
            elif word == "EHLO":
                extensions = [name for name in (offers, "AUTH PLAIN LOGIN") if name]
                rows = ["127.0.0.1", *extensions]
                for row in rows[:-1]:
                    self.say(f"250-{row}")
                self.say(f"250 {rows[-1]}")
            elif word == "STARTTLS":
                self.say("220 go")
                self.secure()
            elif word == "AUTH":
                self.say("235 welcome")
            elif word == "DATA":
                self.say("354 go")
                data = b"".join(iter(self.lines.readline, b".\r\n"))
                mail = message_from_bytes(data, policy=default)
                assert isinstance(mail, EmailMessage)
                box.mails.append(mail)
                self.say(box.replies["END"].pop(0) if box.replies.get("END") else "250 taken")
            elif word == "RCPT":
                box.recipients.append(line.partition("<")[2].rstrip(">"))
                self.say("250 ok")
            else:
                self.say("221 bye" if word == "QUIT" else "250 ok")
            return bool(line) and word != "QUIT"

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    server = Server(("127.0.0.1", 0), Handler)
    box.port = server.server_address[1]
    with serving(server):
        yield box


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
