"""Renders templates; every value is escaped, and no page may load or run anything that is not ours."""

import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    import jinja2
    import markupsafe

_FOLDER: Final = Path(__file__).parent
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every response of the dashboard."""
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page(request: Request, template: str, code: int = 200, **values: Any) -> Response:
    """Render a page.

    Args:
        request: whose path decides how links lead to the root; all links are relative, for proxies that strip a prefix.
        template: name of the file.
        code: status of the response.
        **values: of the template.
    """
    values = {"visitor": None, "here": "", **values}
    text = _environment().get_template(template).render(root=root_of(request), now=time.time(), **values)
    return Response(text, code, {**HEADERS, "Cache-Control": "no-store"}, "text/html; charset=utf-8")


def data(content: bytes) -> Response:
    """Return JSON for a script of a page."""
    return Response(content, 200, {**HEADERS, "Cache-Control": "no-store"}, "application/json")


def moved(request: Request, target: str) -> Response:
    """Return a redirect to a page, given its path without the leading slash."""
    return Response(
        status_code=303, headers={**HEADERS, "Cache-Control": "no-store", "Location": root_of(request) + target}
    )


def root_of(request: Request) -> str:
    """Return the relative link from a page to the root of the service."""
    return "../" * (request.url.path.count("/") - 1) or "./"


@cache
def assets() -> dict[str, Response]:
    """Return the responses with the files of the pages, by name."""
    found = {}
    for path in (_FOLDER / "static").iterdir():
        if media := _TYPES.get(path.suffix):
            headers = {**HEADERS, "Cache-Control": "no-cache"}
            found[path.name] = Response(path.read_bytes(), 200, headers, f"{media}; charset=utf-8")
    return found


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # imported by the first page, not at the start of the service

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "size": size, "span": span, "ago": ago, "clock": clock}
    environment.filters |= {"breakable": breakable, "measured": measured}
    return environment


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with a few significant digits, and large ones as integers; "–" for None."""
    if value is None:
        return "–"
    plain = math.isfinite(value) and abs(value) < 1e15
    if isinstance(value, int) or (plain and (abs(value) >= 10 ** (digits - 1) or value == round(value))):
        return f"{round(value):,}"
    return f"{value:.{digits}g}"


def size(value: float) -> str:
    """Return a size in bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(seconds: float) -> str:
    """Return a duration."""
    whole = int(max(0.0, seconds))
    for limit, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= 2 * limit:
            return f"{whole // limit} {unit}"
    return f"{whole} s"


def ago(moment: float | None) -> str:
    """Return how long ago a time (UTC seconds) was."""
    return "–" if moment is None else f"{span(time.time() - moment)} ago"


def clock(moment: float) -> str:
    """Return a time (UTC seconds) as a date and time."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")


def breakable(name: object) -> "markupsafe.Markup":
    """Return an id or a path, escaped, which may be broken after its separators only."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=/)(?!/)|(?<=:)(?!/)", str(name)))


def measured(path: Mapping[str, Any]) -> str:
    """Return what an engine says about a fast path, without its name and state, which have columns of their own."""
    text = str(path.get("summary") or path.get("reason") or "")
    for state in ("on", "off"):
        text = text.removeprefix(f"{path.get('path')} {state}")
    return text.lstrip(": ")
