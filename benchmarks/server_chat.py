"""Chat through `/v1` against the engine alone: tokens per second, and the delay of new weights.

    python benchmarks/server_chat.py

Random Qwen3 (hidden 512, 12 layers, vocabulary 8,192), float32, one thread for the engine, 16 prompts of 64 tokens with
128 sampled tokens each, all at once. Theirs: `TransformersEngine` in this process, whose tokens nobody reads. Ours: the
same engine behind `twinkle serve`, with one streaming HTTP connection for each prompt. Both take turns; wall time. The
texts must be the same. Goal: at least 0.95 x the tokens per second of the engine alone.

Then an adapter is trained: from the answer of `optim_step` to the first bytes of a completion with the new weights.
Goal: at most 100 ms and the time of one step of the engine that reads the prompt.
"""

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _pairs import describe_machine, in_turn, ratio
from _serving import NAME, PACKAGES, Connection, Served, create, pool, step
from fused_tenants import Shape, make_model
from transformers.utils import logging

from twinkle_transformers.engine import TransformersEngine

GOAL, DELAY = 0.95, 100.0
PROMPT = 64
SAMPLER = {"max_batch_size": 32, "prefix_cache_bytes": 0}
"""Without a prefix cache, every round reads the prompts again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    shape = Shape(options.hidden, options.layers, 8192, 1, PROMPT)
    print(describe_machine([*PACKAGES, "torch", "transformers"]))
    print(f"hidden {shape.hidden}, {shape.layers} layers, {options.clients} clients, {options.tokens} tokens each")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(shape, folder / "model")
        service = pool(folder / "data", folder / "model", {"name": NAME, "extra": {"sampler": SAMPLER}}).start()
        try:
            prompts = [[(7 * row + place) % 250 for place in range(PROMPT)] for row in range(options.clients)]
            alone = Alone(folder / "model", prompts, options.tokens)
            fast = throughput(service, alone, options.repetitions)
            return 0 if latency(service, alone, options.repetitions) and fast else 1
        finally:
            service.stop()


def throughput(service: Served, alone: "Alone", repetitions: int) -> bool:
    """Print tokens per second of both; return whether the goal is met."""
    streams = Streams(service.url, alone.prompts, alone.tokens)
    counts = streams.run()
    if counts != [alone.tokens] * len(alone.prompts) or streams.texts() != alone.texts():
        raise SystemExit(f"the service sampled {counts} tokens, or other ones than the engine alone")
    times = in_turn({"alone": alone.run, "/v1": streams.run}, repetitions, clock=time.perf_counter)
    total = alone.tokens * len(alone.prompts)
    for name, seconds in times.items():
        print(
            f"{name:8}{total / min(seconds):>10.0f} tokens/s at best, {total / statistics.median(seconds):.0f} median"
        )
    found = ratio(times["alone"], times["/v1"])
    print(f"ratio of tokens per second {found}; goal at least {GOAL}")
    return found.median >= GOAL


def latency(service: Served, alone: "Alone", repetitions: int) -> bool:
    """Print the delay of new weights; return whether the goal is met."""
    connection = Connection(service.url)
    model, delays = create(connection, seed=1), []
    row = {"tokens": alone.prompts[0], "type": "encoded_text"}
    inputs = {"target_tokens": {"data": alone.prompts[1], "dtype": "int64", "shape": [PROMPT]}}
    data = [{"model_input": {"chunks": [row]}, "loss_fn_inputs": inputs}]
    for number in range(1, 2 * (repetitions + 2), 2):
        passed = {"data": data, "loss_fn": "cross_entropy"}
        asked = connection.json("/forward_backward", model_id=model, seq_id=number, forward_backward_input=passed)
        connection.result(asked["request_id"])
        step(connection, model, number + 1)
        begin = time.perf_counter()
        first_bytes(service.url, model, alone.prompts[0])
        delays.append(1000 * (time.perf_counter() - begin))
    kept, one = delays[2:], alone.step_ms()
    print(f"from optim_step to the first bytes of the new weights: {min(kept):.1f} ms at best, "
          f"{statistics.median(kept):.1f} median; reading the prompt alone takes {one:.1f} ms")  # fmt: skip
    print(f"goal: median at most {DELAY:.0f} ms + {one:.1f} ms")
    return statistics.median(kept) <= DELAY + one


def body_of(model: str, prompt: list[int], tokens: int) -> bytes:
    """Return a streaming completion that ends after so many tokens."""
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "seed": 1}
    return json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()


def first_bytes(url: str, model: str, prompt: list[int]) -> None:
    """Wait for the first event of a completion."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", "/v1/completions", body_of(model, prompt, 4), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(answer.read().decode())
    answer.readline()
    connection.close()


class Alone:
    """The engine in this process."""

    def __init__(self, model: Path, prompts: list[list[int]], tokens: int) -> None:
        self.prompts, self.tokens = prompts, tokens
        self._engine = TransformersEngine(str(model), sampler=SAMPLER)
        self._done: list[Any] = []

    def run(self) -> None:
        """Sample all prompts."""
        params = {"max_tokens": self.tokens, "temperature": 0, "seed": 1}
        self._done = [self._engine.submit(prompt, params) for prompt in self.prompts]
        while not all(request.done for request in self._done):
            self._engine.decode()

    def texts(self) -> list[str]:
        """Return the texts of a run."""
        self.run()
        return [request.result().sequences[0].decoded for request in self._done]

    def step_ms(self) -> float:
        """Return the least time to read a prompt and sample its first token."""
        seconds = []
        for _ in range(5):
            request = self._engine.submit(self.prompts[0], {"max_tokens": 1, "temperature": 0})
            begin = time.perf_counter()
            while not request.done:
                self._engine.decode()
            seconds.append(time.perf_counter() - begin)
        return 1000 * min(seconds)


class Streams:
    """Streaming clients of the service."""

    def __init__(self, url: str, prompts: list[list[int]], tokens: int) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")
        self._bodies = [body_of(NAME, prompt, tokens) for prompt in prompts]
        self._answers: list[bytes] = []

    def run(self) -> list[int]:
        """Read all streams to their end; return the tokens that each reports."""
        self._answers = asyncio.run(self._all())
        return [self._last(answer)["usage"]["completion_tokens"] for answer in self._answers]

    def texts(self) -> list[str]:
        """Return the texts of the last run."""
        return ["".join(c["text"] for event in _events(a) for c in event["choices"]) for a in self._answers]

    def _last(self, answer: bytes) -> Any:
        return _events(answer)[-1]

    async def _all(self) -> list[bytes]:
        return await asyncio.gather(*(self._one(body) for body in self._bodies))

    async def _one(self, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read(-1)
        writer.close()
        return answer


def _events(answer: bytes) -> list[Any]:
    """Return the events of a chunked response."""
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
