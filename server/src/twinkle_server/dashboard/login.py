"""Who looks at the dashboard: a key opens a session, which a signed cookie identifies."""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

from itsdangerous import BadData, URLSafeSerializer
from starlette.requests import Request
from starlette.responses import Response

from twinkle_server.errors import Forbidden, Unauthorized
from twinkle_server.tenancy.auth import LOCAL, Caller, check_local
from twinkle_server.tenancy.keys import lookup

_LONGEST: Final = 1024


class Keys(Protocol):
    """Looks up keys."""

    async def find(self, key: str) -> Caller | None:
        """Return the caller of a key; None if the key is unknown or revoked."""

    async def holder(self, prefix: str) -> Caller | None:
        """Return the caller of the key with a lookup hash; None if the key is unknown or revoked."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who is logged in.

    Attributes:
        caller: of the key.
        csrf: token that every form of this session contains.
    """

    caller: Caller
    csrf: str

    @property
    def tenant(self) -> str | None:
        """The tenant whose data is shown; None for operators, who see all."""
        return None if self.caller.role == "operator" else self.caller.tenant


class Logins:
    """Opens, recognizes and ends sessions.

    The cookie contains the lookup hash of the key, from which neither the key nor its hash can be computed, and the
    time of expiry. A session ends when its key is revoked.

    Args:
        keys: of the service; None without authentication.
        secret: of the data folder.
        instance: id of the data folder, so that services on one host have cookies of their own.
        seconds: lifetime of a session.
    """

    def __init__(self, keys: Keys | None, secret: bytes, instance: str, seconds: float) -> None:
        self._keys, self._secret, self._seconds = keys, secret, seconds
        self._signer = URLSafeSerializer(
            secret, salt="twinkle.dashboard", signer_kwargs={"digest_method": hashlib.sha256}
        )
        self.cookie = f"twinkle_{instance[:12]}"

    @property
    def needed(self) -> bool:
        """Whether the service has keys."""
        return self._keys is not None

    async def visitor(self, request: Request) -> Visitor:
        """Return who sent a request.

        Raises:
            Unauthorized: nobody is logged in, or the session has ended.
            Forbidden: the service has no keys, and the request comes from another site.
        """
        if self._keys is None:
            check_local(request.scope)
            return self._admit(request, Visitor(LOCAL, self._csrf("local")))
        fields = self._read(request.cookies.get(self.cookie, ""))
        caller = await self._keys.holder(str(fields["k"]))
        if caller is None:
            raise Unauthorized("the key of this session was revoked; log in with another key")
        return self._admit(request, Visitor(caller, self._csrf(str(fields["s"]))))

    async def open(self, request: Request, key: str, response: Response) -> Visitor:
        """Log in with a key: set the cookie in a response.

        Raises:
            Unauthorized: the key is unknown or revoked.
        """
        caller = await self.identify(key)
        if self._keys is None:
            return self._admit(request, Visitor(caller, self._csrf("local")))
        session = secrets.token_urlsafe(16)
        token = self._signer.dumps({"k": lookup(key), "s": session, "e": round(time.time() + self._seconds)})
        response.set_cookie(
            self.cookie,
            token if isinstance(token, str) else token.decode(),
            max_age=round(self._seconds),
            path="/",
            secure=_is_https(request),
            httponly=True,
            samesite="strict",
        )
        return self._admit(request, Visitor(caller, self._csrf(session)))

    def close(self, request: Request, response: Response) -> None:
        """Log out: delete the cookie."""
        response.delete_cookie(self.cookie, path="/", secure=_is_https(request), httponly=True, samesite="strict")

    async def identify(self, key: str) -> Caller:
        """Return the caller of a key.

        Raises:
            Unauthorized: it is unknown or revoked.
        """
        if self._keys is None:
            return LOCAL
        caller = await self._keys.find(key)
        if caller is None:
            raise Unauthorized("this key is unknown or revoked")
        return caller

    def check(self, visitor: Visitor, token: str) -> None:
        """Check the token of a form, so that other sites cannot send it.

        Raises:
            Forbidden: it is not the session's.
        """
        if not hmac.compare_digest(token.encode("utf-8", "replace"), visitor.csrf.encode()):
            raise Forbidden("the form does not belong to this session; reload the page and try again")

    def _admit(self, request: Request, visitor: Visitor) -> Visitor:
        request.scope["caller"] = visitor.caller  # for the audit log and the request log
        return visitor

    def _read(self, cookie: str) -> dict[str, Any]:
        try:
            fields: Any = self._signer.loads(cookie) if 0 < len(cookie) <= _LONGEST else None
            expired = float(fields["e"]) < time.time()
        except (BadData, TypeError, KeyError, ValueError):
            raise Unauthorized("log in with an API key of this service") from None
        if expired:
            raise Unauthorized("the session has expired; log in again")
        return dict(fields)

    def _csrf(self, session: str) -> str:
        return hmac.digest(self._secret, b"dashboard form\0" + session.encode(), "sha256").hex()


def _is_https(request: Request) -> bool:
    """Return whether the browser uses TLS, by itself or with a proxy; a false claim only makes the cookie stricter."""
    return request.url.scheme == "https" or "https" in request.headers.get("x-forwarded-proto", "").lower()
