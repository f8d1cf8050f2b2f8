"""Environments of the OpenEnv project, in this process or behind a server."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.data_format import Trajectory, user_data_get
from twinkle.env import Env, StepResult
from twinkle.errors import ArgumentError, RequirementMissing
from twinkle_agentic.envs.env_pool import EnvPool as EnvPool  # under its published path

ActionMapper = Callable[[str, dict[str, Any]], Any]
_OWN = ("done", "reward", "metadata")  # fields of every observation that are no part of what is observed


class OpenEnv(Env):
    """An OpenEnv environment: made in this process, or reached through `base_url`, one session an object.

    In this process the package of the environment must be installed. Through a server only `openenv-core` is needed;
    then `env_cls` is the client's class, `openenv.core.GenericEnvClient` by default, whose actions are plain dicts.
    Nothing is made or connected before the first `reset` or `step`.

    The observation is text already, or its only field that is text, or its fields as JSON.
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: Any = None,
        env_kwargs: Mapping[str, Any] | None = None,
        action_cls: Any = None,
        action_mapper: ActionMapper | None = None,
        *,
        base_url: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Say which environment it is.

        Args:
            env_name: a package, such as `coding_env`: its one class `...Environment` below `<env_name>.server`, and the
                one class `...Action` that it exports, unless they are given.
            env_cls: the environment's class, or the client's with `base_url`; also as `"package.module:Class"`.
            env_kwargs: arguments of its constructor.
            action_cls: the class of actions, also as text; None with no `env_name`: actions are dicts.
            action_mapper: makes an action, or the fields of one, of the tool's name and its arguments; by default the
                arguments are the fields.
            base_url: of a server, `http://host:port`.
            tools: schemas of the tools that the model sees; by default one, `env_action`, with the action's fields.
            reset_kwargs: arguments of each `reset`; `reset_kwargs` in the `user_data` of a trajectory wins over them.

        Raises:
            ArgumentError: no argument selects the environment.
        """
        if env_name is None and env_cls is None and base_url is None:
            raise ArgumentError("OpenEnv: give env_name= or env_cls=, or base_url= of a server")
        self.env_name, self.base_url = env_name, base_url
        self.reset_kwargs = dict(reset_kwargs or {})
        self._class, self._kwargs = env_cls, dict(env_kwargs or {})
        self._action_class, self._mapper = action_cls, action_mapper
        self._schemas = None if tools is None else [dict(tool) for tool in tools]
        self._env: Any = None
        self._reward = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_env": None}

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode."""
        more = user_data_get((trajectory or {}).get("user_data"), "reset_kwargs", {})
        self._reward = 0.0
        return self._result(self._made().reset(**{**self.reset_kwargs, **more}))

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Perform one action, built from the tool's name and its arguments."""
        fields = dict(arguments)
        action = self._mapper(tool_name, fields) if self._mapper is not None else fields
        action_class = self._action()
        if action_class is not None and isinstance(action, Mapping):
            action = action_class(**action)
        return self._result(self._made().step(action))

    def tools(self) -> list[Any]:
        """Return the schemas of the tools that act on this environment."""
        if self._schemas is not None:
            return [dict(schema) for schema in self._schemas]
        function = {
            "name": "env_action",
            "description": "Acts in the environment and returns what is observed.",
            "parameters": _parameters(self._action()),
        }
        return [{"type": "function", "function": function}]

    def close(self) -> None:
        """Close the environment, or the session; a later `reset` makes another."""
        env, self._env = self._env, None
        if env is not None and hasattr(env, "close"):
            env.close()

    def _made(self) -> Any:
        if self._env is None:
            self._env = self._connected() if self.base_url is not None else self._environment()(**self._kwargs)
        return self._env

    def _connected(self) -> Any:
        client = (_loaded(self._class) or _generic_client())(base_url=self.base_url, **self._kwargs)
        client = client.sync() if hasattr(client, "sync") else client
        if hasattr(client, "connect"):
            client.connect()
        return client

    def _environment(self) -> Any:
        return _loaded(self._class) or _found(f"{self.env_name}.server", "Environment", "env_cls")

    def _action(self) -> Any:
        if self._action_class is None and self.env_name is not None:
            self._action_class = _found(self.env_name, "Action", "action_cls")
        return _loaded(self._action_class)

    def _result(self, raw: Any) -> StepResult:
        """Read a client's result, or an environment's observation, which has reward and end itself."""
        reward, observation = getattr(raw, "reward", None), getattr(raw, "observation", raw)
        number = 0.0 if reward is None else float(reward)
        self._reward += number
        done = bool(getattr(raw, "done", False))
        return StepResult(_text(observation), number, done, {"episode_reward": self._reward})


def _loaded(given: Any) -> Any:
    """Return a class that may be given as `package.module:Class`."""
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    if not module or not name:
        raise ArgumentError(f"{given!r} names no class; write 'package.module:Class'")
    return getattr(importlib.import_module(module), name)


def _generic_client() -> Any:
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise RequirementMissing(
            "OpenEnv with base_url= needs openenv-core: pip install 'twinkle-agentic[openenv]'; or give the client's "
            "class as env_cls="
        ) from error
    return GenericEnvClient


def _found(package: str, ending: str, argument: str) -> Any:
    """Return the one class below a package whose name ends so and that the package itself defines."""
    root = importlib.import_module(package)
    modules = [root]
    for info in pkgutil.iter_modules(getattr(root, "__path__", ()), f"{package}."):
        if info.name.rpartition(".")[2] not in ("app", "server"):  # these start one
            modules.append(importlib.import_module(info.name))
    top = package.partition(".")[0]
    classes = {
        value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and name.endswith(ending) and value.__module__.partition(".")[0] == top
    }
    if len(classes) != 1:
        names = ", ".join(sorted(cls.__name__ for cls in classes)) or "none"
        raise ArgumentError(f"{package} has not one class ...{ending} ({names}); give {argument}= as 'module:Class'")
    return classes.pop()


def _parameters(action: Any) -> dict[str, Any]:
    """Return the JSON schema of an action's fields; without a class one text, `action`."""
    if not hasattr(action, "model_json_schema"):
        return {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
    schema = action.model_json_schema()
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name in properties]
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": properties, "required": required, **definitions}


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
    if not isinstance(fields, Mapping):
        fields = dict(vars(fields)) if hasattr(fields, "__dict__") else {"observation": fields}
    shown = {name: value for name, value in fields.items() if name not in _OWN}
    texts = [value for value in shown.values() if isinstance(value, str)]
    if len(shown) == 1 and texts:
        return texts[0]
    return json.dumps(shown, ensure_ascii=False, default=str)
