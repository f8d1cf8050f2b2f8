"""Environments as tools, of OpenEnv and of reasoning-gym."""

import http.server
import importlib.util
import json
import pickle
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from waiting_env import WaitingEnv

from twinkle.env import Env, StepResult
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, RequirementMissing
from twinkle_agentic.envs import EnvPool, EnvTool, OpenEnv, ReasoningGymEnv
from twinkle_agentic.envs.base import Env as PublishedEnv
from twinkle_agentic.envs.env_tool import EnvTool as PublishedTool
from twinkle_agentic.envs.openenv import EnvPool as PublishedPool
from twinkle_agentic.examples import CountdownEnv, EmbeddedWorld
from twinkle_agentic.tools import ToolManager


def call(name: str, **arguments: Any) -> Any:
    return {"function": {"name": name, "arguments": arguments}}


def test_the_published_paths_lead_to_the_same_classes() -> None:
    assert (PublishedEnv, PublishedTool, PublishedPool) == (Env, EnvTool, EnvPool)


def test_the_tools_of_an_environment_share_one_episode() -> None:
    env = WaitingEnv()
    env.go.set()
    take, wait = EnvTool.from_env(env)
    assert [tool.tool_info()["function"]["name"] for tool in (take, wait)] == ["take", "wait"]
    assert take("take", {"number": 1}) == "There are 3."
    assert wait("wait", {}) == "waited"
    assert not take.done
    assert take("take", {"number": 3}) == "There are 0."
    assert (take.done, wait.done, wait.episode_reward, wait.last_result.reward) == (True, True, 1.0, 1.0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="the episode is over"):
        wait("wait", {})
    assert wait.reset().observation == "There are 4."
    assert (take.done, take.episode_reward, take.last_result) == (False, 0.0, None)


def test_a_step_that_hangs_keeps_others_out_until_it_is_over() -> None:
    env = WaitingEnv()
    manager = ToolManager(EnvTool.from_env(env), time_limit=0.05)
    assert manager(call("wait")) == "Error: wait: no answer within 0.05 seconds"
    assert manager(call("take", number=1)) == "Error: RuntimeError: the environment is still busy with the step before"
    env.go.set()
    end = time.monotonic() + 30
    while manager.calls.hung and time.monotonic() < end:
        time.sleep(0.01)
    assert manager(call("take", number=1)) == "There are 3."


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("text", "answered with a str; return twinkle.env.StepResult"),
        (StepResult(reward=float("nan")), "gave the reward nan"),
        (StepResult(reward=None), "gave the reward None"),  # type: ignore[arg-type]
        (StepResult(reward=torch.tensor([1.0, 2.0])), "gave the reward tensor"),  # type: ignore[arg-type]
    ],
)
def test_an_environment_that_breaks_its_contract_is_named(result: Any, says: str) -> None:
    class Broken(CountdownEnv):
        def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
            return result  # type: ignore[no-any-return]

    (tool,) = EnvTool.from_env(Broken())
    with pytest.raises(ComponentTypeError, match=f"Broken {says}"):
        tool("take", {})
    assert tool.episode.results == []


@pytest.mark.parametrize("reward", [np.float32(0.5), np.int64(2), torch.tensor(0.5), 1])
def test_a_number_of_any_library_is_a_reward(reward: Any) -> None:
    class Numbers(CountdownEnv):
        def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
            return StepResult("ok", reward)

    (tool,) = EnvTool.from_env(Numbers())
    assert tool("take", {}) == "ok"
    assert tool.episode.rewards == [float(reward)]
    json.dumps(tool.last_result.reward)  # type: ignore[union-attr]


def test_a_tool_of_an_environment_pickles_with_its_episode() -> None:
    (tool,) = EnvTool.from_env(CountdownEnv())
    tool("take", {"number": 3})
    twin = pickle.loads(pickle.dumps(tool))
    assert (twin.last_result, twin("take", {"number": 2})) == (tool.last_result, "There are 5.")
    with pytest.raises(ArgumentError, match="env is a dict"):
        EnvTool({})  # type: ignore[arg-type]


# OpenEnv


def test_an_embedded_environment_is_made_when_it_is_first_used() -> None:
    env = OpenEnv(env_cls=f"{EmbeddedWorld.__module__}:EmbeddedWorld", env_kwargs={"word": "blue"})
    assert env.tools()[0]["function"]["name"] == "env_action"
    assert env.reset().observation == "say the word"
    assert env.step("env_action", {"action": "red"}) == StepResult("wrong", 0.0, False, {"episode_reward": 0.0})
    assert env.step("env_action", {"action": "blue"}) == StepResult("right", 1.0, True, {"episode_reward": 1.0})
    assert env.reset().info == {"episode_reward": 0.0}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package as OpenEnv's are: an action, and an environment below `server`."""
    root = tmp_path / "word_env"
    (root / "server").mkdir(parents=True)
    (root / "__init__.py").write_text(
        "class WordAction:\n    def __init__(self, word):\n        self.word = word\n"
        "    @classmethod\n    def model_json_schema(cls):\n"
        "        fields = {'word': {'type': 'string'}, 'metadata': {'type': 'object'}}\n"
        "        return {'properties': fields, 'required': ['word']}\n"
    )
    (root / "server" / "__init__.py").write_text("")
    (root / "server" / "app.py").write_text("raise SystemExit('a server started')\n")
    (root / "server" / "word_environment.py").write_text(
        "class WordEnvironment:\n    def reset(self, **kwargs):\n        return {'asked': kwargs, 'text': 'begin'}\n"
        "    def step(self, action):\n        return action.word.upper()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "word_env"
    for name in [name for name in sys.modules if name.partition(".")[0] == "word_env"]:
        del sys.modules[name]


def test_the_classes_of_a_package_are_found(package: str) -> None:
    env = OpenEnv(package, reset_kwargs={"seed": 1, "level": 2})
    (tool,) = env.tools()
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
    }
    start = env.reset({"messages": [], "user_data": [("reset_kwargs", '{"seed": 5}')]})
    assert json.loads(start.observation) == {"asked": {"seed": 5, "level": 2}, "text": "begin"}
    assert env.step("env_action", {"word": "ok"}).observation == "OK"
    assert EnvTool.from_env(env)[0]("env_action", {"word": "ok"}) == "OK"


def test_an_action_mapper_makes_the_action(package: str) -> None:
    env = OpenEnv(package, action_mapper=lambda name, arguments: {"word": f"{name}-{arguments['n']}"})
    assert env.step("say", {"n": 3}).observation == "SAY-3"


def test_what_is_missing_or_ambiguous_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="give env_name= or env_cls=, or base_url="):
        OpenEnv()
    with pytest.raises(ArgumentError, match=r"json has not one class \.\.\.Action \(none\); give action_cls="):
        OpenEnv("json", env_cls=EmbeddedWorld).step("env_action", {})
    with pytest.raises(ArgumentError, match=r"write 'package\.module:Class'"):
        OpenEnv(env_cls="nowhere").reset()
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(RequirementMissing, match=r"pip install 'twinkle-agentic\[openenv\]'"):
        OpenEnv(base_url="http://127.0.0.1:9").reset()


class _WordServer(http.server.BaseHTTPRequestHandler):
    """A session of OpenEnv's HTTP surface: reset and step."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            answer = {"observation": {"text": "guess"}, "reward": None, "done": False}
        else:
            right = body["action"] == {"action": "blue"}
            answer = {"observation": {"text": "right" if right else "wrong"}, "reward": float(right), "done": right}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class GenericEnvClient:
    """The surface of openenv.core's client: made with a base_url, `sync()` and `connect()`, then reset, step, close."""

    log: ClassVar[list[str]] = []

    def __init__(self, base_url: str, message_timeout_s: float = 60.0) -> None:
        self.base_url = base_url

    def sync(self) -> "GenericEnvClient":
        self.log.append("sync")
        return self

    def connect(self) -> "GenericEnvClient":
        self.log.append("connect")
        return self

    def close(self) -> None:
        self.log.append("close")

    def reset(self, **kwargs: Any) -> Any:
        return self._sent("/reset", kwargs)

    def step(self, action: Any) -> Any:
        return self._sent("/step", {"action": action})

    def _sent(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self.base_url + path, json.dumps(body).encode())
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return types.SimpleNamespace(**json.loads(answer.read()))


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _WordServer) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()
        thread.join(10)


def test_an_environment_behind_a_server_is_reached_by_openenvs_own_client(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = types.ModuleType("openenv.core")
    core.GenericEnvClient = GenericEnvClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openenv", types.ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    monkeypatch.setattr(GenericEnvClient, "log", [])
    env = OpenEnv(base_url=server, env_kwargs={"message_timeout_s": 5.0})
    assert GenericEnvClient.log == []
    assert env.reset().observation == "guess"
    assert env.step("env_action", {"action": "red"}).observation == "wrong"
    assert env.step("env_action", {"action": "blue"}) == StepResult("right", 1.0, True, {"episode_reward": 1.0})
    pickle.loads(pickle.dumps(env)).close()
    env.close()
    env.close()
    assert GenericEnvClient.log == ["sync", "connect", "close"]


# reasoning-gym


class Sums:
    """What reasoning-gym's `create_dataset` returns."""

    def __init__(self, size: int, seed: int, most: int = 9) -> None:
        self.size, self.seed, self.most = size, seed, most

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {"question": f"{idx} + {self.seed}?", "answer": str(idx + self.seed), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.25 if answer and entry["answer"] in answer else 0.0


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for reasoning_gym, unless it is here."""
    if importlib.util.find_spec("reasoning_gym") is None:
        module = types.ModuleType("reasoning_gym")

        def create_dataset(name: str, **config: Any) -> Sums:
            if name != "sums":
                raise ValueError(f"Dataset '{name}' not registered")
            return Sums(**config)

        module.create_dataset = create_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "reasoning_gym", module)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="the real one is here")
@pytest.mark.usefixtures("gym")
def test_a_question_is_asked_answered_and_scored() -> None:
    env = ReasoningGymEnv("sums", size=20, seed=3, config={"most": 5})
    prompt = env.trajectory(7, system="Be brief.")
    assert [message["content"] for message in prompt["messages"]] == ["Be brief.", "7 + 3?"]
    assert env.reset(prompt).observation == "7 + 3?"
    right = env.step("answer", {"answer": "10"})
    assert (right.reward, right.done) == (1.0, True)
    assert env.reset().observation == "0 + 3?"
    assert env.step("answer", {"answer": "perhaps 3"}).reward == 0.25
    with pytest.raises(ArgumentError, match="answer takes 'answer'; found: nothing"):
        env.step("answer", {})
    rows: Any = [
        {**prompt, "messages": [*prompt["messages"], {"role": "assistant", "content": text}]}
        for text in (
            "So <answer>9</answer>, no, <answer>10</answer>.",
            " 10\n",
            "<answer>9<answer>10</answer>",
            "nine",
            "",
        )
    ]
    assert env.evaluate(rows) == [1.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(DataError, match="trajectory 0 has no 'reasoning_gym' in user_data"):
        env.evaluate([{"messages": []}])
    with pytest.raises(ArgumentError, match="no question 20; it has 0 to 19"):
        env.trajectory(20)
    with pytest.raises(ArgumentError, match="'nothing': Dataset 'nothing' not registered"):
        ReasoningGymEnv("nothing")


def test_the_real_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="an own environment has it: see test_envs_installed.py")
    env = ReasoningGymEnv("basic_arithmetic", size=10, seed=1)
    entry = env._data[4]
    assert env.trajectory(4)["messages"][-1]["content"] == entry["question"]
    env.reset(env.trajectory(4))
    assert env.step("answer", {"answer": entry["answer"]}).reward == 1.0
    row: Any = env.trajectory(4)
    row["messages"].append({"role": "assistant", "content": f"<answer>{entry['answer']}</answer>"})
    assert env.evaluate([row]) == [1.0]
    assert ReasoningGymEnv("basic_arithmetic", size=10, seed=1)._data[4] == entry
    with pytest.raises(ArgumentError, match="not registered"):
        ReasoningGymEnv("nothing")


def test_the_real_reasoning_gym_keeps_the_contract() -> None:
    pytest.importorskip("reasoning_gym", reason="an own environment has it: see test_envs_installed.py")
    from twinkle.testing import check_component

    check_component("twinkle-agentic/ReasoningGymEnv", "env")


def test_the_real_openenv_client_has_the_surface_that_we_call() -> None:
    core = pytest.importorskip("openenv.core", reason="an own environment has it: see test_envs_installed.py")
    client = core.GenericEnvClient(base_url="http://127.0.0.1:9")
    with pytest.raises(Exception, match=r"127\.0\.0\.1|[Cc]onnect"):
        OpenEnv(base_url="http://127.0.0.1:9").reset()
    assert all(hasattr(client.sync(), name) for name in ("connect", "reset", "step", "close"))
