"""The least that answers this protocol over HTTP: no log, no order, no keys, one process, an engine on a thread.

What a call costs here is what the machine, the web server and the client take; nothing that keeps a promise is faster.
"""

import asyncio
import itertools
import queue
import socket
import sys
import threading
from typing import Any

import numpy as np
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from twinkle_server.wire import tinker_pb2 as wire

_JSON, _PROTOBUF = "application/json", "application/x-protobuf"


def application() -> FastAPI:
    """Return it."""
    served = FastAPI()
    numbers = itertools.count()
    waiting: dict[str, asyncio.Future[Response]] = {}
    work: queue.SimpleQueue[tuple[asyncio.Future[Response], bytes]] = queue.SimpleQueue()

    def engine() -> None:
        while True:
            future, body = work.get()
            future.get_loop().call_soon_threadsafe(future.set_result, Response(_pass(body), media_type=_PROTOBUF))

    threading.Thread(target=engine, daemon=True).start()

    @served.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        name = str(next(numbers))
        waiting[name] = asyncio.get_running_loop().create_future()
        work.put((waiting[name], await request.body()))
        return _json(request_id=name, model_id="s:train:0")

    @served.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        return await waiting.pop(orjson.loads(await request.body())["request_id"])

    @served.post("/api/v1/create_model")
    async def create_model() -> Response:
        name = f"create-{next(numbers)}"
        waiting[name] = asyncio.get_running_loop().create_future()
        waiting[name].set_result(_json(model_id="s:train:0", type="create_model"))
        return _json(request_id=name, model_id="s:train:0")

    for path, answer in {
        "create_session": {"session_id": "s", "type": "create_session"},
        "session_heartbeat": {"type": "session_heartbeat"},
        "client/config": {},
        "client/dynamic_config": {},
        "telemetry": {"status": "accepted"},
        "get_info": {
            "type": "get_info",
            "model_data": {"arch": "null", "model_name": "null", "tokenizer_id": "null"},
            "model_id": "s:train:0",
            "is_lora": True,
            "lora_rank": 8,
            "model_name": "null",
        },
    }.items():
        served.post(f"/api/v1/{path}")(_constant(answer))
    served.get("/api/v1/get_server_capabilities")(_constant({"supported_models": [{"model_name": "null"}]}))
    return served


def _constant(answer: dict[str, Any]) -> Any:
    async def endpoint() -> Response:
        return _json(**answer)

    return endpoint


def _json(**fields: Any) -> Response:
    return Response(orjson.dumps(fields), media_type=_JSON)


def _pass(body: bytes) -> bytes:
    asked = wire.ForwardBackwardRequest.FromString(body)
    lengths = [len(row.model_input[0].encoded_text.tokens) // 4 for row in asked.data]
    said = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 0.0})
    rows = said.loss_fn_outputs.add(num_datums=len(lengths))
    ends = np.cumsum([0, *(4 * length for length in lengths)])
    rows.fields["logprobs"].CopyFrom(
        wire.BatchedTensor(data=bytes(int(ends[-1])), offsets=ends.astype("<i8").tobytes(), dtype=wire.DTYPE_FLOAT32)
    )
    return said.SerializeToString()


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"at http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(application(), access_log=False, log_level="error", timeout_keep_alive=60)
    uvicorn.Server(config).run([listener])
