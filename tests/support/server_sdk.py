"""The unmodified SDK on loopback."""

import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")
for variable in ("NO_PROXY", "no_proxy"):
    os.environ[variable] = "127.0.0.1,localhost"

import tinker  # noqa: E402  # it reads the environment when it is imported

SECONDS = 90.0


@contextmanager
def opened(url: str, key: str = "tml-local", **options: Any) -> Iterator[tinker.ServiceClient]:
    """Give a client, and finish its session afterwards."""
    with tinker.ServiceClient(base_url=url, api_key=key, **options) as client:
        yield client
    sweep()


def sweep() -> None:
    """Collect the connections that the SDK leaves to the garbage collector, without the warnings about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def forget_connections() -> None:
    """Let the next `RestClient()` of this process read the address and the key from the environment again."""
    from tinker.lib.internal_client_holder import sessionless_holder_cache

    sessionless_holder_cache._holders.clear()


def row(tokens: Sequence[int], weights: Sequence[float] | None = None) -> tinker.Datum:
    """Return a row for cross entropy: every token but the first is a target."""
    inputs = {"target_tokens": list(tokens[1:]), "weights": list(weights or [1.0] * (len(tokens) - 1))}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def trainer(client: tinker.ServiceClient, model: str, rank: int = 8, **options: Any) -> Any:
    """Return a training client."""
    return client.create_lora_training_client(base_model=model, rank=rank, **options).result(SECONDS)


def logprobs(training: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of every token but the first, as a forward pass sees it."""
    answer = training.forward([row(tokens)], "cross_entropy").result(SECONDS)
    return [float(value) for value in answer.loss_fn_outputs[0]["logprobs"].data]


def prompt(tokens: Sequence[int]) -> tinker.ModelInput:
    """Return a prompt."""
    return tinker.ModelInput.from_ints(list(tokens))
