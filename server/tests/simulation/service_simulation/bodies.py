"""Bodies of requests, and how answers are read."""

from collections.abc import Sequence

import numpy as np
from ledger_engine import row_id

from twinkle_server.wire import tinker_pb2 as wire

LORA = {"rank": 8, "seed": 7}


def pass_body(model: str, number: int, rows: Sequence[Sequence[int]], *, forward_only: bool = False) -> bytes:
    """Return the body of a pass over rows of tokens."""
    body = wire.ForwardBackwardRequest(
        model_id=model, seq_id=number, loss_fn="cross_entropy", forward_only=forward_only
    )
    for row in rows:
        tokens = np.asarray(row, "<i4")
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dtype, target.dense = wire.DTYPE_INT64, tokens.astype("<i8").tobytes()
        target.shape.append(len(row))
    return body.SerializeToString(deterministic=True)


def row_ids(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the counting engine's names of rows."""
    return tuple(row_id(row, row) for row in rows)


def metrics_of(body: bytes) -> dict[str, float]:
    """Return the metrics of a pass's result."""
    output = wire.ForwardBackwardOutput()
    output.ParseFromString(body)
    return dict(output.metrics)


def sampled_tokens(body: bytes) -> list[list[int]]:
    """Return the tokens of each sequence of a sampling request's result."""
    response = wire.SampleResponse()
    response.ParseFromString(body)
    return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in response.sequences]
