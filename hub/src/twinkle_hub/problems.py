"""What the client libraries raise, told as one `HubError`: what was asked, what the hub said, what to do."""

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
    """The hub did not answer, or not now: the same call may do well later.

    Attributes:
        reason: the message without advice.
        is_worth_repeating: it was there, so that asking again at once may help.
    """

    def __init__(self, message: str, reason: str = "", is_worth_repeating: bool = False) -> None:
        super().__init__(message)
        self.reason, self.is_worth_repeating = reason or message, is_worth_repeating


@dataclass(frozen=True)
class Talk:
    """Who is spoken to, for messages.

    Attributes:
        hub: the hub's name for people.
        place: the repository as it was asked for, with its scheme.
        url: where the hub answers.
        has_token: a token goes along.
        ways: how to give one.
        what: what is asked for.
    """

    hub: str
    place: str
    url: str
    has_token: bool
    ways: str
    what: str = "repository"

    def require_token(self) -> None:
        """Raise if there is no token; writing needs one."""
        if not self.has_token:
            raise HubError(f"cannot write to {self.place}: no token was given; {self.ways}")


@contextmanager
def told(talk: Talk) -> Iterator[None]:
    """Turn an error of a client library into a `HubError`; a mistake in our own code stays what it is."""
    try:
        yield
    except TwinkleError:
        raise
    except Exception as error:  # each client has a tree of its own, with no common root
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise _explained(error, talk) from error


def _explained(error: Exception, talk: Talk) -> HubError:
    name, status, place = type(error).__name__, status_of(error), talk.place
    if name == "GatedRepoError":
        return HubError(f"{place} is shared on conditions: open its page at {talk.url}, accept them, then {talk.ways}")
    if name == "RevisionNotFoundError":
        return HubError(f"{place}: {talk.hub} has the repository, but not this revision; {_revision_ways(place)}")
    if name.endswith("EntryNotFoundError") and name != "LocalEntryNotFoundError":
        return HubError(f"{place}: the repository has no such file at this revision")
    if status == 401 and talk.has_token:
        return HubError(f"{place}: {talk.hub} does not know the token that was sent; {talk.ways}")
    if status == 403:
        return HubError(f"{place}: the token may not do this (403); {talk.ways}")
    if status in (401, 404) or name in ("RepositoryNotFoundError", "DatasetNotFoundError", "NotExistError"):
        return HubError(f"{place}: {talk.hub} has no such {talk.what} or revision, {_or_private(talk)}")
    if _is_of_this_machine(error):
        return HubError(f"{place} cannot be kept: {error}; make room, or move the cache (HF_HOME, MODELSCOPE_CACHE)")
    if _may_pass(error, status):
        what = f"{talk.hub} answered {status}" if status else f"cannot reach {talk.hub} ({_reason(error)})"
        reason = f"{place}: {what} at {talk.url}"
        return Unreachable(f"{reason}; {_LATER}", reason, status is not None or not _never_connected(error))
    return HubError(f"{place}: {talk.hub} refused: {_first_line(error)}")


_LATER = "check the network and call again; a download goes on where it stopped"


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a client library speaks of, if any."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _may_pass(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in (408, 429)
    if type(error).__name__ in ("HFValidationError", "InvalidParameter", "CacheNotFound", "BadRequestError"):
        return False
    return not isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError)


def _is_of_this_machine(error: Exception) -> bool:
    """Return whether a file could not be written: the system's own errors name it, or say that the disk is full."""
    no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    return type(error).__module__ == "builtins" and (
        getattr(error, "filename", None) is not None or getattr(error, "errno", None) in no_room
    )


def _or_private(talk: Talk) -> str:
    if talk.has_token:
        return "or it is private and your token may not see it; check the name"
    return f"or it is private and no token was given; check the name, or {talk.ways}"


def _revision_ways(place: str) -> str:
    return "give a branch, a tag or a whole commit" + (", after the '@'" if "@" in place else "")


def _reason(error: BaseException) -> str:
    """Return the innermost reason, which names what happened on the wire."""
    failed = getattr(error, "failed_files", None)
    if isinstance(failed, dict) and failed:
        path, why = next(iter(failed.items()))
        return f"{path}: {_reason(why)}"
    *_, last = _chain(error)
    return _first_line(last)


def _never_connected(error: BaseException) -> bool:
    return any(type(link).__name__ in _NO_CONNECTION for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it, as far as it was an error too."""
    link: BaseException | None = error
    while isinstance(link, Exception):
        yield link
        link = link.__cause__ or link.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
