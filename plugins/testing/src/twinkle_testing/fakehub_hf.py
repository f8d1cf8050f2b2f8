"""The Hugging Face routes of the fake hub."""

import base64
import json
from typing import Any

from twinkle_testing.fakehub_http import KIND, REPO, Answer, Handler, route
from twinkle_testing.fakehub_store import Commit, Repository, RepoType, blob_id, is_large, sha256

_DATE = "2026-01-01T00:00:00.000Z"


def _typed(kind: str | None) -> RepoType:
    return "dataset" if kind and kind.startswith("dataset") else "model"


def _refusal(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message} if code else {})


def _checked_user(handler: Handler) -> str | None:
    if handler.token and handler.user is None:
        message = "Invalid credentials in Authorization header"
        raise Answer(401, {"error": message}, {"X-Error-Message": message})
    return handler.user


def _found(handler: Handler, name: str, repo_type: RepoType) -> Repository:
    """Return the repository, or answer like the hub: a redirect, 401 without a token, 404 with one."""
    user = _checked_user(handler)
    store = handler.hub.store
    moved = store.moved.get((repo_type, name))
    if moved is not None:
        place = handler.path.replace(name, moved, 1)
        raise Answer(307, {"error": f"moved to {moved}"}, {"Location": place})
    found = store.find(name, repo_type)
    if found is None or (found.private and user is None):
        if user is None:
            # The real hub sends no error code here: its client infers the reason of a 401, but only over https.
            raise _refusal(401, "RepoNotFound", "Invalid username or password.")
        raise _refusal(404, "RepoNotFound", "Repository not found")
    return found


def _commit(repository: Repository, revision: str | None) -> Commit:
    found = repository.at(revision)
    if found is None:
        raise _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    return found


def _writer(handler: Handler, name: str) -> str:
    user = _checked_user(handler)
    if user is None:
        raise _refusal(401, "", "Invalid username or password.")
    if name.startswith("forbidden/"):
        raise _refusal(403, "", "You don't have the rights to create or write in this namespace")
    return user


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
    if is_large(path, data):
        entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
    return entry


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    told: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
    if is_large(path, data):
        told["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
    return told


def _tree(commit: Commit, folder: str, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    below = {path: data for path, data in commit.files.items() if path.startswith(prefix)}
    if prefix and not below:
        raise _refusal(404, "EntryNotFound", f"{folder} does not exist on this revision")
    folders: set[str] = set()
    entries = []
    for path, data in sorted(below.items()):
        parts = path.removeprefix(prefix).split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        folders |= {prefix + name for name in (parents if recursive else parents[:1])}
        if recursive or len(parts) == 1:
            entries.append(_entry(path, data))
    made = [{"type": "directory", "path": name, "size": 0, "oid": sha256(name.encode())[:40]} for name in folders]
    return sorted([*entries, *made], key=lambda entry: str(entry["path"]))


@route("GET", r"/api/whoami-v2")
def whoami(handler: Handler) -> None:
    """Return the user of the token."""
    user = _checked_user(handler)
    if user is None:
        raise _refusal(401, "", "Invalid username or password.")
    raise Answer(200, {"type": "user", "name": user, "fullname": user, "orgs": [], "auth": {"type": "access_token"}})


@route("GET", rf"/api/{KIND}/{REPO}(/revision/(?P<revision>.+))?")
def info(handler: Handler, kind: str, repo: str, revision: str | None) -> None:
    """Describe a repository at a revision."""
    repository = _found(handler, repo, _typed(kind))
    commit = _commit(repository, revision)
    files: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.files)]
    if "blobs" in handler.query:
        files = [_sibling(path, data) for path, data in sorted(commit.files.items())]
    told: dict[str, Any] = {"id": repository.name, "modelId": repository.name, "author": repository.name.split("/")[0]}
    told |= {"sha": commit.id, "lastModified": _DATE, "createdAt": _DATE, "private": repository.private}
    raise Answer(200, {**told, "gated": False, "disabled": False, "tags": [], "downloads": 0, "siblings": files})


@route("GET", rf"/api/{KIND}/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
def tree(handler: Handler, kind: str, repo: str, revision: str, folder: str | None) -> None:
    """List a folder."""
    commit = _commit(_found(handler, repo, _typed(kind)), revision)
    raise Answer(200, _tree(commit, folder or "", handler.query.get("recursive", "").lower() in ("true", "1")))


@route("POST", rf"/api/{KIND}/{REPO}/paths-info/(?P<revision>[^/]+)")
def paths_info(handler: Handler, kind: str, repo: str, revision: str) -> None:
    """Describe some paths."""
    commit = _commit(_found(handler, repo, _typed(kind)), revision)
    asked = handler.json().get("paths", [])
    known = {entry["path"]: entry for entry in _tree(commit, "", recursive=True)}
    raise Answer(200, [known[path] for path in asked if path in known])


@route("GET", rf"/api/{KIND}/{REPO}/refs")
def refs(handler: Handler, kind: str, repo: str) -> None:
    """List branches and tags."""
    repository = _found(handler, repo, _typed(kind))
    named = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
    told = {
        group: [{"name": name, "ref": f"refs/{word}/{name}", "targetCommit": commit} for name, commit in held.items()]
        for group, (word, held) in named.items()
    }
    raise Answer(200, {**told, "converts": []})


@route("GET", rf"(/(?P<kind>datasets))?/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(handler: Handler, kind: str | None, repo: str, revision: str, path: str) -> None:
    """Send a file."""
    commit = _commit(_found(handler, repo, _typed(kind)), revision)
    if path not in commit.files:
        missing = _refusal(404, "EntryNotFound", "Entry not found")
        raise Answer(404, missing.body, {**missing.headers, "X-Repo-Commit": commit.id})
    data = commit.files[path]
    tag = sha256(data) if is_large(path, data) else blob_id(data)
    handler.send_file(data, {"ETag": f'"{tag}"', "X-Repo-Commit": commit.id})


@route("POST", r"/api/repos/create")
def create(handler: Handler) -> None:
    """Create a repository."""
    asked = handler.json()
    owner = asked.get("organization") or handler.user or ""
    name = f"{owner}/{asked['name']}"
    _writer(handler, name)
    repo_type = _typed(asked.get("type"))
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    url = f"{handler.hub.url}/{'datasets/' if repo_type == 'dataset' else ''}{name}"
    if handler.hub.store.create(name, repo_type, private) is None:
        raise Answer(409, {"error": "You already created this repo", "url": url, "name": name})
    raise Answer(200, {"url": url, "name": name, "id": name})


@route("POST", rf"/api/{KIND}/{REPO}/preupload/(?P<revision>[^/]+)")
def preupload(handler: Handler, kind: str, repo: str, revision: str) -> None:
    """Return which files are stored in git and which as large files."""
    _writer(handler, repo)
    commit = _commit(_found(handler, repo, _typed(kind)), revision)

    def mode(path: str) -> dict[str, Any]:
        old = commit.files.get(path)
        known = {"oid": blob_id(old)} if old is not None else {}
        return {"path": path, "shouldIgnore": False, "uploadMode": "lfs" if is_large(path, b"x") else "regular"} | known

    raise Answer(200, {"files": [mode(file["path"]) for file in handler.json()["files"]]})


@route("POST", rf"(/(?P<kind>datasets))?/{REPO}\.git/info/lfs/objects/batch")
def batch(handler: Handler, kind: str | None, repo: str) -> None:
    """Return the upload address of large files."""
    _writer(handler, repo)
    _found(handler, repo, _typed(kind))
    store, told = handler.hub.store, []
    for item in handler.json()["objects"]:
        entry = {"oid": item["oid"], "size": item["size"]}
        if item["oid"] not in store.blobs:
            entry["actions"] = {"upload": {"href": f"{handler.hub.url}/blobs/{item['oid']}", "header": {}}}
        told.append(entry)
    raise Answer(200, {"transfer": "basic", "objects": told})


@route("PUT", r"/blobs/(?P<oid>[0-9a-f]{64})")
def put_blob(handler: Handler, oid: str) -> None:
    """Receive a large file; its name is its SHA-256."""
    if sha256(handler.body) != oid:
        raise Answer(400, {"error": "the content does not have this SHA-256"})
    handler.hub.store.blobs[oid] = handler.body
    raise Answer(200, {"Code": 200, "Success": True})


@route("POST", rf"/api/{KIND}/{REPO}/commit/(?P<revision>[^/]+)")
def commit(handler: Handler, kind: str, repo: str, revision: str) -> None:
    """Add a commit."""
    _writer(handler, repo)
    repository = _found(handler, repo, _typed(kind))
    files: dict[str, bytes | str] = {}
    gone: list[str] = []
    message = ""
    for line in handler.body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header":
            message = value["summary"]
        elif item["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif item["key"] == "lfsFile":
            files[value["path"]] = handler.hub.store.blobs[value["oid"]]
        elif item["key"] == "deletedFile":
            gone.append(value["path"])
    with handler.hub.store.lock:
        made = repository.commit(files, message, revision, gone)
    raise Answer(200, {"commitUrl": f"{handler.hub.url}/{repository.name}/commit/{made}", "commitOid": made})


@route("POST", rf"/api/{KIND}/{REPO}/branch/(?P<branch>.+)")
def branch(handler: Handler, kind: str, repo: str, branch: str) -> None:
    """Create a branch."""
    _writer(handler, repo)
    repository = _found(handler, repo, _typed(kind))
    if branch in repository.branches:
        raise Answer(409, {"error": "Reference already exists"})
    repository.branches[branch] = _commit(repository, handler.json().get("startingPoint")).id
    raise Answer(200, {})


@route("POST", r"/api/validate-yaml")
def validate_yaml(handler: Handler) -> None:
    """Validate a card; always succeeds."""
    raise Answer(200, {"errors": [], "warnings": []})
