"""Every face of the service at once while it is killed and its network breaks: trained once, and no stream cut short.

A native client, a Tinker client, and the unmodified SDKs of OpenAI and Anthropic work on one service. The ledger
engine answers a chat with the rows that a model was trained on, so that a text tells which weights it comes from.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from ledger_engine import MODEL
from server_clients import Client, Trainer, follow
from server_fates import Fate, Killer
from server_history import none_foreign
from server_proxy import NONE, Fault, Proxy, proxied, weather
from serving import Served, ledger

from twinkle.dataset.meta import DatasetMeta
from twinkle.testing import tiny_tokenizer
from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler
from twinkle_client.dataset import Dataset
from twinkle_client.errors import Gone

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
NAME = "acme/ledger"
FIRST, LAST = 10, 90
"""Token ids of rows: each is one printable character of the tokenizer."""
HELLO: Any = [{"role": "user", "content": "hello"}]
CUT = (openai.APIError, anthropic.APIError, httpx.HTTPError)
"""What a stream that cannot go on raises."""
PROGRAM = ("train", "step", "read", "train", "save", "step", "copy", "load", "train", "sample", "step", "read")
DATA = [{"text": f"row {number}"} for number in range(600)]


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    model = folder / "model"
    tiny_tokenizer().save_pretrained(model)
    (model / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    settings = {
        "model": str(model), "name": NAME, "snapshot_steps": 2,
        "times": {"poll": 1.0, "gap_fail": 120.0, "snapshot": 0.5},
        "extra": {"tokenizer": str(model), "vocabulary": 259, "seconds_per_decode": 0.02},
    }  # fmt: skip
    service = ledger(folder / "data", settings).start()
    try:
        yield service
    finally:
        service.kill()


@dataclass
class Trained:
    """What a native client was told.

    Attributes:
        run: id of its model.
        rows: first tokens of its rows, in order; each step applies one.
        begun: number of steps that were asked for.
        done: number of steps that were acknowledged.
        ended: set when it has ended, however that was.
        streams: complete answers of each SDK.
        cut: streams that ended with an error.
    """

    run: str = ""
    rows: list[int] = field(default_factory=lambda: [FIRST])
    begun: int = 0
    done: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    streams: dict[str, int] = field(default_factory=dict)
    cut: int = 0

    def version(self, steps: int) -> list[int]:
        """Return the tokens of the answer after so many steps."""
        return [steps, steps, *self.rows[:steps]]

    def text(self, steps: int) -> str:
        """Return the answer after so many steps; the token that ends it is not part of a text."""
        return "".join(chr(ord("!") + token) for token in self.version(steps)[:-1])


def train(url: str, trained: Trained, more: Callable[[], bool], most: int) -> None:
    """Train with the native client, one row a step, and look at everything after each step."""
    with TwinkleClient(url, session_heartbeat_interval=1.0, retry_seconds=120.0) as client:
        model = MultiLoraTransformersModel(client=client)
        model.add_adapter_to_model("a", {"r": 8})
        sampler = vLLMSampler(client=client)
        trained.run = model.training_run_id()
        while trained.done < most and (more() or trained.done < 3):
            token, step = FIRST + trained.done, trained.done + 1
            trained.rows = [*range(FIRST, token + 1)]
            model.forward_backward([{"input_ids": [token, 2, 3], "labels": [token, 2, 3]}])
            trained.begun = step
            assert model.clip_grad_and_step() == 1.0, "the step is over one row: none was trained twice"
            trained.done = step
            metrics = model.calculate_metric(is_training=True)
            seen = [int(metrics[f"applied.{at}.token"]) for at in range(int(metrics["applied.count"]))]
            assert (seen, metrics["pending.count"], metrics["steps"]) == (trained.rows, 0, step)
            assert metrics["seen.count"] == 1, "what metrics see is once there"
            if step % 3 == 0:
                path = model.save(f"s{step}", is_sampler=True)
                [response] = sampler.sample([{"input_ids": [7, 8]}], {"max_tokens": 200}, adapter_uri=path)
                assert [list(each.tokens) for each in response.sequences] == [trained.version(step)]
                kept = model.save(f"c{step}", save_optimizer=True, consumed_train_samples=step)
                assert model.resume_from_checkpoint(kept)["consumed_train_samples"] == step


def chat(url: str, trained: Trained, stream: Callable[[str, str], tuple[str, str | None]], face: str) -> None:
    """Ask for streams of the present weights until the training has ended: each is complete, or raises."""
    while not trained.ended.is_set():
        if not trained.run:
            trained.ended.wait(0.02)
            continue
        least = trained.done
        try:
            text, reason = stream(url, trained.run)
        except CUT:
            trained.cut += 1
            trained.ended.wait(0.05)
            continue
        assert reason in ("stop", "end_turn"), f"{face} was cut short without an error: {text!r}, {reason}"
        possible = [trained.text(steps) for steps in range(least, trained.begun + 1)]
        assert text in possible, f"{face} answered {text!r}, which are none of the weights {possible}"
        trained.streams[face] += 1


def openai_stream(url: str, model: str) -> tuple[str, str | None]:
    text, reason = "", None
    with openai.OpenAI(base_url=f"{url}/v1", api_key="tml-x", max_retries=1, timeout=30) as client:
        for chunk in client.chat.completions.create(model=model, messages=HELLO, max_tokens=200, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    return text, reason


def anthropic_stream(url: str, model: str) -> tuple[str, str | None]:
    with (
        anthropic.Anthropic(base_url=url, api_key="tml-x", max_retries=1, timeout=30) as client,
        client.messages.stream(model=model, messages=HELLO, max_tokens=200) as stream,
    ):
        text = "".join(stream.text_stream)
        return text, stream.get_final_message().stop_reason


def read_data(url: str, trained: Trained) -> None:
    """Read data sets that live on the service: all rows in order, or an error."""
    complete = 0
    while not trained.ended.is_set() or not complete:
        try:
            with TwinkleClient(url, session_heartbeat_interval=1.0, retry_seconds=120.0) as client:
                dataset = Dataset(DatasetMeta(data=DATA), client=client)
                assert list(dataset) == DATA
                complete += 1
        except Gone:
            continue  # it lived in a service that was killed


FACES = {"openai": openai_stream, "anthropic": anthropic_stream}


async def work(
    service: Served, fate: Fate, proxy: Proxy, most: int, *, chats: bool = True, data: bool = False
) -> Trained:
    """Let all faces work while fate does to the service what it does."""
    faces = FACES if chats else {}
    proxy.upstream, trained = service.url, Trained(streams=dict.fromkeys(faces, 0))
    left = getattr(fate, "left", [])

    def native() -> None:
        try:
            train(proxy.url, trained, lambda: bool(left) or not all(trained.streams.values()), most)
        finally:
            trained.ended.set()

    async with proxied(proxy), Client(proxy.url) as client:
        watching = asyncio.create_task(fate.watch(service, proxy))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(native))
                for face, stream in faces.items():
                    tasks.create_task(asyncio.to_thread(chat, proxy.url, trained, stream, face))
                if data:
                    tasks.create_task(asyncio.to_thread(read_data, proxy.url, trained))
                trainer = tasks.create_task(tinker(client))
        finally:
            trained.ended.set()
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
    trainer.result().history.check()
    none_foreign([trainer.result().history])
    return trained


async def tinker(client: Client) -> Trainer:
    """Train a model of another protocol beside."""
    trainer = await Trainer(client, await client.session(), 0, 100).create(NAME)
    await follow(trainer, PROGRAM)
    return trainer


def first_of(kind: str) -> Callable[[int, str], Fault]:
    """Return a plan in which the first answer to some request is lost, and the second request comes twice."""
    faults = [Fault(repeats=1), Fault(mute=True)]
    return lambda number, path: faults.pop() if faults and kind in path else NONE


def test_native_and_tinker_clients_survive_a_kill_of_engine_and_service_and_a_lost_answer(tmp_path: Path) -> None:
    fate = Killer(1, 2, 0.5)
    with served(tmp_path) as service:
        trained = asyncio.run(work(service, fate, Proxy("", first_of("forward_backward")), 60, chats=False))
    assert trained.done >= 3
    assert not fate.left


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_faces_survive_kills_behind_a_bad_network(tmp_path: Path) -> None:
    fate = Killer(2, 4, 3.0)
    with served(tmp_path) as service:
        proxy = weather(2, mute=0.05, repeats=0.05, delay=0.05, lost=0.03)
        trained = asyncio.run(work(service, fate, proxy, 70, data=True))
    assert min(trained.streams.values()) >= 1
    assert trained.cut > 0, "no stream was cut"
    assert not fate.left


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(10))
def test_all_faces_survive_many_kills(tmp_path: Path, seed: int) -> None:
    fate, cut = Killer(seed, 20, 3.0), 0
    with served(tmp_path) as service:
        for place in range(20):
            proxy = weather(100 * seed + place, mute=0.1, repeats=0.05, delay=0.05, lost=0.03)
            trained = asyncio.run(work(service, fate, proxy, 70, data=place % 4 == 0))
            cut += trained.cut
            if not fate.left:
                break
    print(f"{cut} streams were cut")
    assert not fate.left
