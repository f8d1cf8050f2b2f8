"""The ModelScope routes of the fake hub."""

import base64
import re
from typing import Any

from twinkle_testing.fakehub_http import KIND, REPO, Answer, Handler, route
from twinkle_testing.fakehub_store import Commit, Repository, RepoType, is_large, sha256

_API = r"/api/v1"
_DATE = 1767225600  # seconds


def _typed(kind: str) -> RepoType:
    return "dataset" if kind == "datasets" else "model"


def _good(data: Any, **more: Any) -> Answer:
    return Answer(200, {"Code": 200, "Success": True, "Message": "success", "RequestId": "fake", "Data": data, **more})


def _bad(status: int, message: str, code: int | None = None) -> Answer:
    return Answer(status, {"Code": code or status, "Success": False, "Message": message, "RequestId": "fake"})


def _checked_user(handler: Handler) -> str | None:
    if handler.token and handler.user is None:
        raise _bad(401, "token is invalid", 10990101001)
    return handler.user


def _found(handler: Handler, name: str, repo_type: RepoType) -> Repository:
    """Return the repository, or answer like the hub: 404 also for repositories without access."""
    user = _checked_user(handler)
    store = handler.hub.store
    moved = store.moved.get((repo_type, name))
    if moved is not None:
        raise Answer(307, {"Code": 307}, {"Location": handler.path.replace(name, moved, 1)})
    found = store.find(name, repo_type)
    if found is None or (found.private and user is None):
        raise _bad(404, f"record not found: {name}", 10010205001)
    return found


def _commit(repository: Repository, revision: str | None) -> Commit:
    found = repository.at(revision)
    if found is None:
        raise _bad(404, f"revision not found: {revision}", 10010204001)
    return found


def _writer(handler: Handler, name: str) -> None:
    if _checked_user(handler) is None:
        raise _bad(401, "please login")
    if name.startswith("forbidden/"):
        raise _bad(403, "no permission")


def _entries(commit: Commit, root: str) -> list[dict[str, Any]]:
    prefix = f"{root.strip('/')}/" if root.strip("/") else ""
    return [
        {
            "Path": path, "Name": path.rpartition("/")[2], "Type": "blob", "Size": len(data), "Sha256": sha256(data),
            "Revision": commit.id, "IsLFS": is_large(path, data), "CommittedDate": _DATE,
        }
        for path, data in sorted(commit.files.items())
        if path.startswith(prefix)
    ]  # fmt: skip


def _told(repository: Repository) -> dict[str, Any]:
    owner, _, name = repository.name.partition("/")
    seen = 1 if repository.private else 5
    return {"Path": owner, "Owner": owner, "Name": name, "Visibility": seen, "License": "Apache-2.0"}


@route("GET", rf"{_API}/{KIND}/{REPO}")
def info(handler: Handler, kind: str, repo: str) -> None:
    """Describe a repository."""
    raise _good(_told(_found(handler, repo, _typed(kind))))


@route("GET", rf"/openapi/v1/{KIND}/{REPO}")
def open_info(handler: Handler, kind: str, repo: str) -> None:
    """Describe a repository, in the newer form."""
    owner, _, name = _found(handler, repo, _typed(kind)).name.partition("/")
    raise Answer(200, {"success": True, "data": {"owner": owner, "name": name, "id": f"{owner}/{name}"}})


@route("GET", r"/openapi/v1/users/me")
def me(handler: Handler) -> None:
    """Return the user of the token."""
    user = _checked_user(handler)
    if user is None:
        raise Answer(401, {"success": False, "code": "Unauthorized", "message": "please login"})
    raise Answer(200, {"success": True, "data": {"username": user, "preferred_username": user}})


@route("POST", rf"{_API}/login")
def login(handler: Handler) -> None:
    """Log in with a token."""
    token = str(handler.json().get("AccessToken"))
    user = handler.hub.store.tokens.get(token)
    if user is None:
        raise _bad(401, "token is invalid")
    raise _good({"AccessToken": token, "Username": user, "Email": f"{user}@example.com"})


@route("GET", rf"{_API}/{KIND}/{REPO}/repo/(files|tree)")
def files(handler: Handler, kind: str, repo: str) -> None:
    """List the files, a data set's in pages."""
    commit = _commit(_found(handler, repo, _typed(kind)), handler.query.get("Revision"))
    entries = _entries(commit, handler.query.get("Root", ""))
    size, page = int(handler.query.get("PageSize", 0)), int(handler.query.get("PageNumber", 1))
    shown = entries[size * (page - 1) : size * page] if size else entries
    told = commit.id if handler.hub.store.tells_commits else ""
    latest = {"Id": told, "ShortId": commit.id[:8], "Message": commit.message, "CommittedDate": _DATE}
    raise _good({"Files": shown, "LatestCommitter": latest}, TotalCount=len(entries))


@route("GET", rf"{_API}/{KIND}/{REPO}/repo")
def file(handler: Handler, kind: str, repo: str) -> None:
    """Send a file."""
    commit = _commit(_found(handler, repo, _typed(kind)), handler.query.get("Revision"))
    path = handler.query.get("FilePath", "")
    if path not in commit.files:
        raise _bad(404, f"file not found: {path}")
    data = commit.files[path]
    handler.send_file(data, {"ETag": f'"{sha256(data)}"', "X-Linked-ETag": f'"{sha256(data)}"'})


@route("GET", rf"{_API}/{KIND}/{REPO}/revisions")
def revisions(handler: Handler, kind: str, repo: str) -> None:
    """List the names of branches and tags; the hub does not return their commits."""
    repository = _found(handler, repo, _typed(kind))
    names = [{"Revision": "master" if name == "main" else name, "CreatedAt": _DATE} for name in repository.branches]
    tags = [{"Revision": name, "CreatedAt": _DATE} for name in repository.tags]
    raise _good({"RevisionMap": {"Branches": names, "Tags": tags}})


@route("GET", rf"(/(?P<kind>datasets))?/{REPO}\.git/info/refs")
def git_refs(handler: Handler, kind: str | None, repo: str) -> None:
    """Return branches and tags with their commits, like a git server before a fetch."""
    repository = _found(handler, repo, _typed(kind or "models"))
    named = [(f"refs/heads/{'master' if name == 'main' else name}", at) for name, at in repository.branches.items()]
    named += [(f"refs/tags/{name}", at) for name, at in repository.tags.items()]
    lines = ["# service=git-upload-pack\n", ""]
    lines += [f"{at} {name}" + ("\0multi_ack\n" if not n else "\n") for n, (name, at) in enumerate(named)]
    packets = "".join(f"{len(line) + 4:04x}{line}" if line else "0000" for line in [*lines, ""])
    handler.send(200, packets.encode(), {"Content-Type": "application/x-git-upload-pack-advertisement"})


@route("POST", rf"{_API}/{KIND}")
def create(handler: Handler, kind: str) -> None:
    """Create a repository: a model from JSON, a data set from a form."""
    asked = handler.json() if kind == "models" else _form(handler)
    name = f"{asked.get('Path') or asked.get('Owner')}/{asked['Name']}"
    _writer(handler, name)
    made = handler.hub.store.create(name, _typed(kind), private=int(asked["Visibility"]) == 1)
    if made is None:
        raise _bad(400, f"{name} already exists", 10010401009)
    raise _good(_told(made))


def _form(handler: Handler) -> dict[str, str]:
    text = handler.body.decode("utf-8", "replace")
    return dict(re.findall(r'name="(\w+)"[^\r]*\r\n\r\n(.*?)\r\n--', text, re.DOTALL))


@route("POST", rf"{_API}/repos/{KIND}/{REPO}/info/lfs/objects/batch")
def batch(handler: Handler, kind: str, repo: str) -> None:
    """Return the upload address of large files."""
    _writer(handler, repo)
    _found(handler, repo, _typed(kind))
    missing = [item for item in handler.json()["objects"] if item["oid"] not in handler.hub.store.blobs]
    raise _good(
        {
            "objects": [
                {**item, "actions": {"upload": {"href": f"{handler.hub.url}/blobs/{item['oid']}"}}} for item in missing
            ]
        }
    )


@route("POST", rf"{_API}/repos/{KIND}/{REPO}/commit/(?P<revision>[^/]+)")
def commit(handler: Handler, kind: str, repo: str, revision: str) -> None:
    """Add a commit."""
    _writer(handler, repo)
    repository = _found(handler, repo, _typed(kind))
    asked = handler.json()
    changed: dict[str, bytes | str] = {}
    gone: list[str] = []
    for action in asked["actions"]:
        if action["action"] == "delete":
            gone.append(action["path"])
        elif action["type"] == "lfs":
            changed[action["path"]] = handler.hub.store.blobs[action["sha256"]]
        else:
            changed[action["path"]] = base64.b64decode(action["content"])
    with handler.hub.store.lock:
        made = repository.commit(changed, asked["commit_message"], revision, gone)
    raise _good({"oid": made, "CommitId": made})


@route("GET", rf"{_API}/repos/internalAccelerationInfo")
def acceleration(handler: Handler) -> None:
    """Return that the client is not in the hub's own cloud."""
    raise _good({"InternalRegionQueryAddress": ""})
