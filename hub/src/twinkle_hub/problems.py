"""Translates errors of client libraries to `HubError`, with the request, the hub's answer and the remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from twinkle.errors import HubError, TwinkleError

_CLIENTS = {
    "datasets", "fsspec", "hf_xet", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "modelscope",
    "modelscope_hub", "requests", "urllib3",
}  # fmt: skip

_NO_CONNECTION = {"ConnectError", "ConnectionRefusedError", "ConnectTimeout", "NewConnectionError", "gaierror"}


class Unreachable(HubError):
    """The hub did not answer, or is temporarily unavailable; the same call may succeed later.

    Attributes:
        reason: the message without advice.
        can_retry: the hub was reachable, so an immediate retry may succeed.
    """

    def __init__(self, message: str, reason: str = "", can_retry: bool = False) -> None:
        super().__init__(message)
        self.reason, self.can_retry = reason or message, can_retry


@dataclass(frozen=True)
class RequestContext:
    """The request and the hub that it goes to, for error messages.

    Attributes:
        hub: display name of the hub.
        place: the requested repository, with its scheme.
        url: endpoint of the hub.
        has_token: the request has a token.
        token_ways: how to provide a token.
        noun: type of the requested object.
    """

    hub: str
    place: str
    url: str
    has_token: bool
    token_ways: str
    noun: str = "repository"

    def require_token(self) -> None:
        """Raise if there is no token; writing needs one."""
        if not self.has_token:
            raise HubError(f"cannot write to {self.place}: no token was given; {self.token_ways}")


@contextmanager
def translated_errors(request: RequestContext) -> Iterator[None]:
    """Raise errors of client libraries as `HubError`; other exceptions (bugs in this package) pass unchanged."""
    try:
        yield
    except TwinkleError:
        raise
    except Exception as error:  # the clients' exceptions have no common base class
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise _hub_error(error, request) from error


def _hub_error(error: Exception, request: RequestContext) -> HubError:
    name, status, place = type(error).__name__, status_of(error), request.place
    if name == "GatedRepoError":
        return HubError(f"{place} is gated: accept its conditions at {request.url}, then {request.token_ways}")
    if name == "RevisionNotFoundError":
        return HubError(f"{place}: {request.hub} has the repository, but not this revision; {_revision_ways(place)}")
    if name.endswith("EntryNotFoundError") and name != "LocalEntryNotFoundError":
        return HubError(f"{place}: the repository has no such file at this revision")
    if status == 401 and request.has_token:
        return HubError(f"{place}: {request.hub} rejected the token (401); {request.token_ways}")
    if status == 403:
        return HubError(f"{place}: the token lacks the permission for this (403); {request.token_ways}")
    if status in (401, 404) or name in ("RepositoryNotFoundError", "DatasetNotFoundError", "NotExistError"):
        return HubError(f"{place}: {request.hub} has no such {request.noun} or revision, {_or_private(request)}")
    if _is_local_error(error):
        return HubError(
            f"cannot store {place}: {error}; free some disk space, or move the cache (HF_HOME, MODELSCOPE_CACHE)"
        )
    if _is_temporary(error, status):
        what = f"{request.hub} answered {status}" if status else f"cannot reach {request.hub} ({_reason(error)})"
        reason = f"{place}: {what} at {request.url}"
        return Unreachable(f"{reason}; {_LATER}", reason, status is not None or not _never_connected(error))
    return HubError(f"{place}: {request.hub} refused: {_first_line(error)}")


_LATER = "check the network and call again; an interrupted download resumes"


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error of a client library, if it has one."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _is_temporary(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in (408, 429)
    if type(error).__name__ in ("HFValidationError", "InvalidParameter", "CacheNotFound", "BadRequestError"):
        return False
    return not isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError)


def _is_local_error(error: Exception) -> bool:
    """Return whether writing a local file failed, by a file name in the OS error or an error number such as ENOSPC."""
    no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    return type(error).__module__ == "builtins" and (
        getattr(error, "filename", None) is not None or getattr(error, "errno", None) in no_room
    )


def _or_private(request: RequestContext) -> str:
    if request.has_token:
        return "or it is private and your token has no access; check the name"
    return f"or it is private and no token was given; check the name, or {request.token_ways}"


def _revision_ways(place: str) -> str:
    return "give a branch, a tag or a full commit" + (", after the '@'" if "@" in place else "")


def _reason(error: BaseException) -> str:
    """Return the text of the innermost error, which describes the network failure."""
    failed = getattr(error, "failed_files", None)
    if isinstance(failed, dict) and failed:
        path, failure = next(iter(failed.items()))
        return f"{path}: {_reason(failure)}"
    *_, last = _chain(error)
    return _first_line(last)


def _never_connected(error: BaseException) -> bool:
    return any(type(link).__name__ in _NO_CONNECTION for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes and contexts."""
    link: BaseException | None = error
    while isinstance(link, Exception):
        yield link
        link = link.__cause__ or link.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
