"""A hub on loopback that implements the HTTP interfaces that Hugging Face's and ModelScope's clients use.

`FakeHub` holds repositories with real commits and serves them under both interfaces from threads of this process. It
injects faults on request, so that tests can check clients against a hub that disconnects, stalls or fails.
"""

import re
import threading
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path

from twinkle_testing import fakehub_hf, fakehub_ms  # noqa: F401 - they register their routes
from twinkle_testing.fakehub_http import Fault, Handler
from twinkle_testing.fakehub_store import Repository, RepoType, Store

TOKEN = "hf_fakehub0token"
"""The default token of a `FakeHub`; it belongs to the user `tester`."""


class FakeHub:
    """A context manager: inside the block the hub answers at `url`.

    Example:
        with FakeHub() as hub:
            hub.add("acme/tiny", {"config.json": "{}"})
            subprocess.run([...], env={**os.environ, **hub.environment(tmp_path)})

    Attributes:
        requests: `METHOD path status` of every request so far.
    """

    def __init__(self, tokens: Mapping[str, str] | None = None) -> None:
        """Prepare an empty hub.

        Args:
            tokens: users' names by token; by default the user `tester` has `TOKEN`. Every user is a member of all
                organizations and may read and write their repositories.
        """
        self.store = Store({TOKEN: "tester"} if tokens is None else tokens)
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Address of the hub, without a slash at the end."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Return environment variables that make client libraries of a new process use this hub and separate caches.

        Args:
            home: a folder for caches and logins; those of the user are not used.
        """
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hugging-face"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MODELSCOPE_DOMAIN": self.url,
            "MODELSCOPE_ENDPOINT": self.url,
            "MODELSCOPE_CACHE": str(home / "modelscope"),
            "MODELSCOPE_HOME": str(home / "modelscope-home"),
            "MODELSCOPE_CREDENTIALS_PATH": str(home / "modelscope-home" / "credentials"),
            "TWINKLE_CACHE_DIR": str(home / "twinkle"),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def add(
        self,
        name: str,
        files: Mapping[str, bytes | str] | Path,
        *,
        repo_type: RepoType = "model",
        private: bool = False,
    ) -> Repository:
        """Create a repository with one commit and return it; `Repository.commit` adds commits.

        Args:
            name: `owner/name`.
            files: content by path, or a folder to read them from.
            repo_type: `model` or `dataset`.
            private: only tokens may see it.

        Raises:
            ValueError: the name is taken.
        """
        made = self.store.create(name, repo_type, private)
        if made is None:
            raise ValueError(f"the fake hub has a {repo_type} {name!r} already")
        if isinstance(files, Path):
            found = sorted(path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        made.commit(files, "first files")
        return made

    def rename(self, old: str, new: str, repo_type: RepoType = "model") -> None:
        """Rename a repository; the old name redirects to the new one."""
        with self.store.lock:
            repository = self.store.repositories.pop((repo_type, old))
            repository.name = new
            self.store.repositories[repo_type, new] = repository
            self.store.moved[repo_type, old] = new

    def remove(self, name: str, repo_type: RepoType = "model") -> None:
        """Remove a repository."""
        with self.store.lock:
            del self.store.repositories[repo_type, name]

    def cut(self, pattern: str, after: int, times: int = 1) -> None:
        """End the connection after `after` bytes of the body, for the next `times` matching requests."""
        self._faults.append(Fault("cut", pattern, after, times))

    def slow(self, pattern: str, seconds: float, times: int = 1) -> None:
        """Wait before the answer, for the next `times` matching requests."""
        self._faults.append(Fault("slow", pattern, seconds, times))

    def fail(self, pattern: str, status: int = 503, times: int = 1) -> None:
        """Answer with an error, for the next `times` matching requests."""
        self._faults.append(Fault("status", pattern, status, times))

    def mend(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def fault(self, request: str) -> Fault | None:
        """Return the fault for this request, and count it."""
        with self._lock:
            for fault in self._faults:
                if fault.begun < fault.times and re.search(fault.pattern, request):
                    fault.begun += 1
                    return fault
        return None

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
