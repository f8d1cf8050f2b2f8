"""`TwinkleClient`: a session on a service, and what the service has of its owner."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle.errors import TrainingStateError
from twinkle_client.calls import Call, twins
from twinkle_client.errors import TwinkleClientError
from twinkle_client.http import Connection
from twinkle_client.sessions import Heartbeats

if TYPE_CHECKING:
    from twinkle_client import types

T = TypeVar("T")
_current: list["TwinkleClient"] = []
_lock = threading.Lock()


class TwinkleClient:
    """A session on a service. Models, samplers and data sets belong to one; several clients can exist in a process.

    Every method that calls the service also exists as coroutine `..._async`.

    Args:
        base_url: address of the service; by default `TWINKLE_SERVER_URL`, or `http://127.0.0.1:8000`.
        api_key: key of the tenant; by default `TWINKLE_SERVER_TOKEN`.
        route_prefix: prefix of the native routes.
        session_heartbeat_interval: seconds between heartbeats; without them the service ends the session.
        session_metadata: texts that are kept with the session.
        record_rollouts: whether the service may keep sampled rows of this session, for its dashboard.
        retry_seconds: how long requests are repeated after lost connections and answers such as 429 and 503.
        connection: instead of the arguments of an address, a connection.

    Raises:
        ConnectionFailed: the service does not answer.
        AuthenticationError: the key is unknown.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        route_prefix: str = "/twinkle",
        session_heartbeat_interval: float = 10,
        session_metadata: Mapping[str, Any] | None = None,
        *,
        record_rollouts: bool = True,
        retry_seconds: float = 300.0,
        connection: Connection | None = None,
    ) -> None:
        self.connection = connection or Connection(
            base_url, api_key, route_prefix=route_prefix, retry_seconds=retry_seconds
        )
        self._interval = session_heartbeat_interval
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._saves: dict[str, int] = {}
        self._heartbeats: Heartbeats | None = None
        self.session_id = ""
        self._record_rollouts = record_rollouts
        self.create_session(session_metadata)

    def __repr__(self) -> str:
        return f"<TwinkleClient {self.connection.base_url} session={self.session_id}>"

    def __enter__(self) -> "TwinkleClient":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(self, call: Call[T]) -> T:
        """Run a call in this thread."""
        return self.connection.run(call)

    async def run_async(self, call: Call[T]) -> T:
        """Run a call on the current event loop."""
        return await self.connection.run_async(call)

    def next_number(self, kind: str) -> int:
        """Return the next number of a kind of resource in this session."""
        with self._lock:
            number = self._numbers.get(kind, 0)
            self._numbers[kind] = number + 1
            return number

    def note_save(self, path: str) -> None:
        """Record that a checkpoint was saved, which may replace one of the same path."""
        with self._lock:
            self._saves[_one_scheme(path)] = self._saves.get(_one_scheme(path), 0) + 1

    def saves_of(self, path: str) -> int:
        """Return how often this client has saved a checkpoint of a path; samplers then read it again."""
        with self._lock:
            return self._saves.get(_one_scheme(path), 0)

    # Session

    def create_session(self, metadata: Mapping[str, Any] | None = None) -> str:
        """Begin a new session, which replaces the client's present one, and return its id."""
        from importlib.metadata import version

        own = {} if self._record_rollouts else {"record_rollouts": "false"}
        body = {
            "metadata": {**{key: str(value) for key, value in (metadata or {}).items()}, **own},
            "client_version": version("twinkle-client"),
        }
        session: str = self.run(self.connection.request("POST", "/create_session", body))["session_id"]
        if self._heartbeats is not None:
            self._heartbeats.stop()
        with self._lock:
            self._numbers.clear()
        self.session_id = session
        self._heartbeats = Heartbeats(self.connection, session, self._interval)
        return session

    def _close(self) -> Call[None]:
        """Finish the session: its models are saved on the service and freed. A second time is no error."""
        if self._heartbeats is None:
            return
        self._heartbeats.stop()
        self._heartbeats = None
        with _lock:
            _current[:] = [client for client in _current if client is not self]
        yield from self.connection.request("POST", "/finish_session", {"session_id": self.session_id})

    close, close_async = twins(_close)

    # The service

    def health_check(self) -> bool:
        """Return whether the service answers this key."""
        try:
            self.run(self.connection.request("GET", "/healthz", retry_seconds=0.0, timeout=10.0))
        except TwinkleClientError:
            return False
        return True

    def _get_capacity_info(self) -> Call["types.CapacityInfoResponse"]:
        """Return how many adapters this key may have, and has."""
        from twinkle_client import types

        return types.CapacityInfoResponse(**(yield from self.connection.request("GET", "/capacity_info")))

    get_capacity_info, get_capacity_info_async = twins(_get_capacity_info)

    def _get_server_capabilities(self) -> Call["types.ServerCapabilities"]:
        """Return the served models, and the components that calls may name."""
        from twinkle_client import types

        return types.ServerCapabilities(**(yield from self.connection.request("GET", "/get_server_capabilities")))

    get_server_capabilities, get_server_capabilities_async = twins(_get_server_capabilities)

    # Training runs and checkpoints

    def _list_training_runs_with_cursor(
        self, limit: int = 20, offset: int = 0, all_users: bool = False
    ) -> Call[tuple[list["types.TrainingRun"], "types.Cursor"]]:
        """Return training runs of this key, newest first, and the position in the list.

        Args:
            limit: maximum number of runs.
            offset: number of runs to leave out.
            all_users: must be False: no key sees the runs of another.
        """
        from twinkle_client import types

        _check_own(all_users)
        query = {"limit": limit, "offset": offset}
        page = yield from self.connection.request("GET", "/training_runs", query=query)
        return [types.TrainingRun(**run) for run in page["training_runs"]], types.Cursor(**page["cursor"])

    list_training_runs_with_cursor, list_training_runs_with_cursor_async = twins(_list_training_runs_with_cursor)

    def _list_training_runs(
        self, limit: int = 20, offset: int = 0, all_users: bool = False
    ) -> Call[list["types.TrainingRun"]]:
        """Return training runs of this key, newest first."""
        runs, _ = yield from self._list_training_runs_with_cursor(limit, offset, all_users)
        return runs

    list_training_runs, list_training_runs_async = twins(_list_training_runs)

    def _get_training_run(self, run_id: str) -> Call["types.TrainingRun"]:
        """Return a training run."""
        from twinkle_client import types

        return types.TrainingRun(**(yield from self.connection.request("GET", f"/training_runs/{_part(run_id)}")))

    get_training_run, get_training_run_async = twins(_get_training_run)

    def _find_training_run_by_model(self, base_model: str) -> Call[list["types.TrainingRun"]]:
        """Return the training runs of a base model, newest first."""
        from twinkle_client import types

        query = {"limit": 1000, "base_model": base_model}
        page = yield from self.connection.request("GET", "/training_runs", query=query)
        return [types.TrainingRun(**run) for run in page["training_runs"]]

    find_training_run_by_model, find_training_run_by_model_async = twins(_find_training_run_by_model)

    def _list_checkpoints(self, run_id: str) -> Call[list["types.Checkpoint"]]:
        """Return the checkpoints of a training run, newest first."""
        from twinkle_client import types

        page = yield from self.connection.request("GET", f"/training_runs/{_part(run_id)}/checkpoints")
        return [types.Checkpoint(**checkpoint) for checkpoint in page["checkpoints"]]

    list_checkpoints, list_checkpoints_async = twins(_list_checkpoints)

    def _get_checkpoint_path(self, run_id: str, checkpoint_id: str) -> Call["types.ParsedCheckpointTwinklePath"]:
        """Return the path of a checkpoint from its run and its id, such as `weights/last`."""
        from twinkle_client import types

        route = f"/checkpoint_path/{_part(run_id)}/{_checkpoint(checkpoint_id)}"
        return types.ParsedCheckpointTwinklePath(**(yield from self.connection.request("GET", route)))

    get_checkpoint_path, get_checkpoint_path_async = twins(_get_checkpoint_path)

    def _get_checkpoint_twinkle_path(self, run_id: str, checkpoint_id: str) -> Call[str]:
        """Return the `twinkle://` path of a checkpoint."""
        return (yield from self._get_checkpoint_path(run_id, checkpoint_id)).twinkle_path

    get_checkpoint_twinkle_path, get_checkpoint_twinkle_path_async = twins(_get_checkpoint_twinkle_path)

    def _get_latest_checkpoint_path(self, run_id: str) -> Call[str | None]:
        """Return the `twinkle://` path of a run's newest checkpoint for training, or None."""
        for checkpoint in (yield from self._list_checkpoints(run_id)):
            if checkpoint.checkpoint_type == "training":
                return checkpoint.twinkle_path
        return None

    get_latest_checkpoint_path, get_latest_checkpoint_path_async = twins(_get_latest_checkpoint_path)

    def _delete_checkpoint(self, run_id: str, checkpoint_id: str) -> Call[None]:
        """Delete a checkpoint."""
        route = f"/training_runs/{_part(run_id)}/checkpoints/{_checkpoint(checkpoint_id)}"
        yield from self.connection.request("DELETE", route)

    delete_checkpoint, delete_checkpoint_async = twins(_delete_checkpoint)

    def _get_weights_info(self, twinkle_path: str) -> Call["types.WeightsInfoResponse"]:
        """Return what a model must be to load a checkpoint."""
        from twinkle_client import types

        body = {"twinkle_path": str(twinkle_path)}
        return types.WeightsInfoResponse(**(yield from self.connection.request("POST", "/weights_info", body)))

    get_weights_info, get_weights_info_async = twins(_get_weights_info)


def init_twinkle_client(
    base_url: str | None = None, api_key: str | None = None, session_heartbeat_interval: float = 10, **kwargs: Any
) -> TwinkleClient:
    """Return a new client, which models and other objects use that are given none.

    Args:
        base_url: address of the service; by default `TWINKLE_SERVER_URL`, or `http://127.0.0.1:8000`.
        api_key: key of the tenant; by default `TWINKLE_SERVER_TOKEN`.
        session_heartbeat_interval: seconds between heartbeats.
        **kwargs: further arguments of `TwinkleClient`.
    """
    client = TwinkleClient(base_url, api_key, session_heartbeat_interval=session_heartbeat_interval, **kwargs)
    with _lock:
        _current.append(client)
    return client


def current_client() -> TwinkleClient:
    """Return the client of the last `init_twinkle_client` that was not closed.

    Raises:
        TrainingStateError: there is none.
    """
    with _lock:
        if not _current:
            raise TrainingStateError("there is no client; call init_twinkle_client(base_url=..., api_key=...) first")
        return _current[-1]


def _check_own(all_users: bool) -> None:
    if all_users:
        from twinkle.errors import Unsupported

        raise Unsupported("all_users=True: a key sees its own training runs only; leave it out")


def _one_scheme(path: str) -> str:
    return path.replace("tinker://", "twinkle://", 1)


def _part(text: str) -> str:
    """Return a text as one part of a URL's path."""
    from urllib.parse import quote

    return quote(text, safe=":")


def _checkpoint(checkpoint_id: str) -> str:
    kind, _, name = checkpoint_id.rpartition("/")
    return f"{_part(kind or 'weights')}/{_part(name)}"
