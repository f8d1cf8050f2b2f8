"""A pool of environments of one class: each slot runs a separate episode, and batches of slots step together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from twinkle import registry, remote_class, remote_function
from twinkle.data_format import Trajectory
from twinkle.env import Env, StepResult
from twinkle.errors import ArgumentError
from twinkle_agentic.envs.env_tool import checked
from twinkle_agentic.tools.calling import error_text

_THREADS = 32


@remote_class("all")
class EnvPool:
    """Holds `pool_size` environments, made when they are first used.

    An environment that raises in a step ends that episode, `done=True` with the error in `info["error"]`, and not the
    batch. The slots of a batch run in threads, at most 32 at one time, and a batch is as slow as its slowest step. A
    slot whose last step hangs (a `ToolManager` does not wait for it) has a new environment for its next episode.
    """

    def __init__(
        self,
        pool_size: int = 32,
        device_mesh: Any = None,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        env_cls: Any = "OpenEnv",
    ) -> None:
        """Store how to create the environments.

        Args:
            pool_size: number of slots.
            device_mesh: which workers hold them, under a runtime that places components.
            env_kwargs: arguments of each environment.
            env_cls: the environment's class, in any form of component argument.

        Raises:
            ArgumentError: `pool_size` is no number from 1.
        """
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
            raise ArgumentError(f"pool_size is {pool_size!r}; it is a number of environments from 1")
        self.pool_size, self.device_mesh = pool_size, device_mesh
        self._class, self._kwargs = env_cls, dict(env_kwargs or {})
        self._envs: dict[int, Env] = {}
        self._running: dict[int, Env] = {}

    @remote_function(dispatch="all", collect="first")
    def reset(self, idx: int, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode in one slot."""
        env = self._env(idx)
        if self._running.pop(idx, None) is not None:  # its last step hangs
            del self._envs[idx]
            env = self._env(idx)
        return checked(env, env.reset(trajectory))

    @remote_function(dispatch="all", collect="first")
    def step(self, idx: int, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act once in one slot."""
        env = self._env(idx)
        try:
            with self._step_of(idx, env):
                return checked(env, env.step(tool_name, arguments))
        except (Exception, SystemExit) as error:  # an error of an environment ends only its own episode
            text = error_text(error)
            return StepResult(f"Error: {text}", 0.0, True, {"error": text})

    @remote_function(dispatch="all", collect="first")
    def reset_batch(
        self, indices: Sequence[int], trajectories: Sequence[Trajectory | None] | None = None
    ) -> list[StepResult]:
        """Begin episodes in several slots at once, and return their first observations in the order of `indices`."""
        starts = [None] * len(indices) if trajectories is None else list(trajectories)
        return self._together(self.reset, indices, trajectories=starts)

    @remote_function(dispatch="all", collect="first")
    def step_batch(
        self, indices: Sequence[int], tool_names: Sequence[str], arguments_list: Sequence[Mapping[str, Any]]
    ) -> list[StepResult]:
        """Act once in several slots at once, and return the answers in the order of `indices`.

        Raises:
            ArgumentError: a slot is named twice or is none, or the lists differ in length.
        """
        return self._together(self.step, indices, tool_names=tool_names, arguments_list=arguments_list)

    @remote_function(dispatch="all", collect="first")
    def tools(self) -> list[Any]:
        """Return the tools that act on one of the environments."""
        return self._env(0).tools()

    @remote_function(dispatch="all", collect="first")
    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories by one of the environments."""
        return self._env(0).evaluate(trajectories, **kwargs)

    def get_adapters(self, n: int) -> "list[EnvPoolAdapter]":
        """Return the first `n` slots, each as an environment.

        Raises:
            ArgumentError: there are fewer.
        """
        if not 0 <= n <= self.pool_size:
            raise ArgumentError(f"{n} environments are asked of a pool of {self.pool_size}; raise pool_size")
        return [EnvPoolAdapter(self, idx) for idx in range(n)]

    @remote_function(dispatch="all")
    def close(self) -> None:
        """Close every environment, even if others raise; a later use of the pool creates new ones.

        One whose step still runs is closed when it is over.
        """
        envs, self._envs = self._envs, {}
        running, self._running = self._running, {}
        with ExitStack() as closing:
            for idx, env in envs.items():
                if idx not in running:
                    closing.callback(env.close)

    def _env(self, idx: int) -> Env:
        if isinstance(idx, bool) or not isinstance(idx, int) or not 0 <= idx < self.pool_size:
            raise ArgumentError(f"there is no slot {idx!r}; this pool has 0 to {self.pool_size - 1}")
        if idx not in self._envs:
            made: Env = registry().build(self._class, "env", **self._kwargs)
            if self._envs.setdefault(idx, made) is not made:
                made.close()  # another thread was faster
        return self._envs[idx]

    @contextmanager
    def _step_of(self, idx: int, env: Env) -> Iterator[None]:
        """Take a slot for one step; an environment that the slot was rid of meanwhile is closed."""
        if idx in self._running:
            raise RuntimeError("the slot is still busy with the step before")
        self._running[idx] = env
        try:
            yield
        finally:
            if self._running.get(idx) is env:
                del self._running[idx]
            else:
                env.close()

    def _together(
        self, act: Callable[..., StepResult], indices: Sequence[int], **rest: Sequence[Any]
    ) -> list[StepResult]:
        for name, values in rest.items():
            if len(values) != len(indices):
                raise ArgumentError(f"{name} has {len(values)} entries for {len(indices)} slots; give one a slot")
        if len(set(indices)) != len(indices):
            raise ArgumentError(f"indices name a slot twice: {list(indices)}; one slot takes one step at a time")
        for idx in indices:
            self._env(idx)
        with ThreadPoolExecutor(min(_THREADS, len(indices)) or 1) as threads:
            return list(threads.map(act, indices, *rest.values()))


class EnvPoolAdapter(Env):
    """One slot of a pool, as an environment."""

    def __init__(self, pool: EnvPool, idx: int) -> None:
        self.pool, self.idx = pool, idx

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode in the slot."""
        return self.pool.reset(self.idx, trajectory)

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act once in the slot; an error ends the episode."""
        return self.pool.step(self.idx, tool_name, arguments)

    def tools(self) -> list[Any]:
        """Return the tools of the pool's environments."""
        return self.pool.tools()

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories by one of the pool's environments."""
        return self.pool.evaluate(trajectories, **kwargs)
