"""Samplers on a service: the base model, or an adapter that was saved for sampling."""

import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle.errors import ArgumentError, Unsupported
from twinkle.logging import get_logger
from twinkle_client.calls import Call, twins
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.errors import ConnectionFailed, error_of
from twinkle_client.http import value_of
from twinkle_client.model import _bare
from twinkle_client.naming import component_for
from twinkle_client.queues import WaitLog, outcome_of
from twinkle_client.rows import continued_row, rows_of, sendable_prompt

if TYPE_CHECKING:
    from twinkle_client import types

T = TypeVar("T")
_TIMEOUT = 60.0


class vLLMSampler:
    """Samples on a service, whatever backend it has. Every method also exists as coroutine `..._async`.

    Args:
        model_id: name of the served model; None is the one it serves.
        engine_args: options of a local sampler. They have no effect, and a note in the log says so: the operator of the
            service chooses them.
        client: by default that of the last `init_twinkle_client`.
        **kwargs: none; options of the sampler are those of the service.

    Raises:
        ArgumentError: an argument is unknown.
    """

    def __init__(
        self,
        model_id: str | None = None,
        engine_args: Mapping[str, Any] | None = None,
        *,
        client: TwinkleClient | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ArgumentError(
                f"{type(self).__name__}: {sorted(kwargs)[0]!r} is an option of the service that holds the model; leave "
                "it out"
            )
        if engine_args is not None and not isinstance(engine_args, Mapping):
            raise ArgumentError(f"engine_args must be a mapping or None, got a {type(engine_args).__name__}")
        if engine_args:
            get_logger().info(
                "%s: engine_args (%s) have no effect, the operator of the service chooses them",
                type(self).__name__, ", ".join(map(str, engine_args)),
            )  # fmt: skip
        self.model_id = model_id
        self.client = client or current_client()
        self._lock = threading.Lock()
        self._samplers: dict[str | None, tuple[int, str]] = {}
        self._followed: str | None = None
        self._numbers: dict[str, int] = {}
        self._uses: Counter[str] = Counter()
        self._replaced: set[str] = set()
        self._template: tuple[str, dict[str, Any]] | None = None

    def run(self, call: Call[T]) -> T:
        """Run a call in this thread."""
        return self.client.run(call)

    async def run_async(self, call: Call[T]) -> T:
        """Run a call on the current event loop."""
        return await self.client.run_async(call)

    def set_template(self, template_cls: str, adapter_name: str = "", **kwargs: Any) -> None:
        """Set the template that encodes conversations and decodes sequences, by name."""
        _check_adapter(adapter_name)
        own = _bare(kwargs.pop("model_id", None))
        if own not in (None, _bare(self.model_id)):
            raise ArgumentError(f"set_template: model_id must be that of the sampler, {self.model_id!r}, got {own!r}")
        self._template = component_for("set_template", template_cls, kwargs)

    def follow_checkpoint(self, adapter_uri: Any) -> None:
        """Use a checkpoint in all calls without `adapter_uri`; None is the base model.

        `CheckpointEngineManager(model, sampler).sync_weights()` calls this with the present weights of the model.
        """
        self._followed = None if adapter_uri is None else str(adapter_uri)

    def reset_prefix_cache(self) -> None:
        """Do nothing: the service keeps what it computed of prompts apart for all weights, so that none is stale."""

    def add_adapter_to_sampler(self, adapter_name: str, config: Any) -> None:
        """Refuse: adapters are sampled by the path of a checkpoint."""
        raise Unsupported("add_adapter_to_sampler: pass the path of a checkpoint as adapter_uri= of sample")

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Refuse: all tenants sample with the same model."""
        raise Unsupported("apply_patch: a patch would change the model that other tenants sample with")

    def _sample(
        self,
        inputs: Any,
        sampling_params: Any = None,
        adapter_name: str = "",
        adapter_uri: Any = None,
        num_samples: int | None = None,
        *,
        use_base_model: bool = False,
    ) -> Call[list["types.SampleResponseModel"]]:
        """Return one response for each input, in order, with `num_samples` sequences each.

        `new_input_feature` of a sequence has all columns of its input, such as `user_data`, and the sampled turn at the
        end of `messages`. The log shows the progress of calls that take more than some seconds.

        Args:
            inputs: conversations (`messages`, ...), encoded with a generation prompt, or rows with `input_ids`.
            sampling_params: `twinkle.data_format.SamplingParams`, or a mapping of its fields.
            adapter_name: "": an adapter is given by `adapter_uri`.
            adapter_uri: path of a checkpoint; None is that of the last sync, and without one the base model. If this
                client has saved another checkpoint under the same path, that is used.
            num_samples: overrides that of `sampling_params`.
            use_base_model: sample the base model, also after a sync.

        Raises:
            ArgumentError: an argument has no effect on a service.
            RequestRefused: an input or a parameter is invalid.
            OperationFailed: the service could not sample.
        """
        from twinkle_client import types

        _check_adapter(adapter_name)
        uri = self._weights(adapter_uri, use_base_model)
        prompts = rows_of(inputs)
        sampler, body = yield from self._stream_body(prompts, sampling_params, uri, num_samples)
        with self._in_use(sampler):
            body["seq_id"] = self._numbered(sampler, len(prompts))
            log = WaitLog("sample")
            while True:
                answer = yield from self.client.connection.exchange(
                    "POST", f"/samplers/{sampler}/sample", body, timeout=_TIMEOUT
                )
                if answer.status != 202:
                    break
                log.add(value_of(answer))
        responses = outcome_of(value_of(answer))
        for prompt, response in zip(prompts, responses, strict=True):
            for sequence in response["sequences"]:
                if (row := sequence.get("new_input_feature")) is not None:
                    sequence["new_input_feature"] = continued_row(prompt, row)
        return [types.SampleResponseModel(**response) for response in responses]

    sample, sample_async = twins(_sample)

    def sample_stream(
        self,
        inputs: Any,
        sampling_params: Any = None,
        adapter_uri: Any = None,
        num_samples: int | None = None,
        *,
        use_base_model: bool = False,
    ) -> Iterator["types.SampleDelta"]:
        """Yield tokens while they are sampled; closing the iterator, or leaving its loop, cancels the rest.

        The arguments are those of `sample`, and with a seed, so are the tokens. A stream is not repeated: if it breaks,
        `ConnectionFailed` is raised.

        Raises:
            ArgumentError: an argument has no effect on a service.
            RequestRefused: an input or a parameter is invalid.
            OperationFailed: the service could not sample.
        """
        uri = self._weights(adapter_uri, use_base_model)
        sampler, body = self.run(self._stream_body(inputs, sampling_params, uri, num_samples))
        ended = False
        stream: Any = self.client.connection.events(f"/samplers/{sampler}/stream", body)
        with self._in_use(sampler), contextlib.closing(stream) as events:
            for event in events:
                if (delta := _delta_of(event)) is None:
                    ended = True
                    break
                yield delta
        _check_end(ended)

    async def sample_stream_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        adapter_uri: Any = None,
        num_samples: int | None = None,
        *,
        use_base_model: bool = False,
    ) -> AsyncIterator["types.SampleDelta"]:
        """As `sample_stream`, as an asynchronous generator; `aclose()` cancels the rest."""
        uri = self._weights(adapter_uri, use_base_model)
        sampler, body = await self.run_async(self._stream_body(inputs, sampling_params, uri, num_samples))
        ended = False
        events: Any = self.client.connection.events_async(f"/samplers/{sampler}/stream", body)
        with self._in_use(sampler):
            async with contextlib.aclosing(events):
                async for event in events:
                    if (delta := _delta_of(event)) is None:
                        ended = True
                        break
                    yield delta
        _check_end(ended)

    def _weights(self, adapter_uri: Any, use_base_model: bool) -> str | None:
        """Return the path of the checkpoint of a call; None for the base model.

        Raises:
            ArgumentError: a checkpoint and the base model are requested.
        """
        if use_base_model and adapter_uri is not None:
            raise ArgumentError("adapter_uri= and use_base_model=True exclude each other; leave one of them out")
        if use_base_model:
            return None
        return self._followed if adapter_uri is None else str(adapter_uri)

    def _stream_body(
        self, inputs: Any, sampling_params: Any, uri: str | None, num_samples: int | None
    ) -> Call[tuple[str, dict[str, Any]]]:
        """Return the sampling session and the body of a request without its number."""
        options = _options_of(sampling_params)
        if num_samples is not None:
            options["num_samples"] = num_samples
        rows = [sendable_prompt(row) for row in rows_of(inputs)]
        body: dict[str, Any] = {"inputs": rows, "options": options}
        if self._template is not None:
            body["template"], body["template_options"] = self._template
        return (yield from self._sampler(uri)), body

    def _sampler(self, uri: str | None) -> Call[str]:
        """Return the sampling session of a checkpoint, which is created at its first use.

        A sampling session keeps the weights with which it was created; a checkpoint that this client has saved again
        under the same path gets a new one.
        """
        client = self.client
        saves = 0 if uri is None else client.saves_of(uri)
        with self._lock:
            known = self._samplers.get(uri)
            if known is not None and known[0] == saves:
                self._uses[known[1]] += 1
                return known[1]
        body = {
            "session_id": client.session_id,
            "sampler_seq_id": client.next_number("sampler"),
            "base_model": _bare(self.model_id),
            "adapter_uri": uri,
        }
        created: str = (yield from client.connection.request("POST", "/samplers", body))["sampler_id"]
        with self._lock:
            known = self._samplers.get(uri)
            if known is None or known[0] < saves:
                self._replaced |= set() if known is None else {known[1]}
                self._samplers[uri] = known = saves, created
            else:  # another thread was faster
                self._replaced.add(created)
            self._uses[known[1]] += 1
            unused = {name for name in self._replaced if not self._uses[name]}
            self._replaced -= unused
            for name in unused:
                del self._uses[name]
                self._numbers.pop(name, None)
        for name in unused:  # the service keeps the weights of a sampling session until it ends
            yield from client.connection.request("DELETE", f"/samplers/{name}")
        return known[1]

    @contextlib.contextmanager
    def _in_use(self, sampler: str) -> Iterator[None]:
        """Count a call of a sampling session down when it ends."""
        try:
            yield
        finally:
            with self._lock:
                self._uses[sampler] -= 1

    def _numbered(self, sampler: str, count: int) -> int:
        with self._lock:
            first = self._numbers.get(sampler, 0)
            self._numbers[sampler] = first + count
            return first


class TorchSampler(vLLMSampler):
    """As `vLLMSampler`: the service decides which backend samples."""


def _delta_of(event: Mapping[str, Any]) -> "types.SampleDelta | None":
    """Return the delta of an event; None for the last one.

    Raises:
        TwinkleClientError: the service could not go on.
    """
    from twinkle_client import types

    if "error" in event:
        raise error_of(int(event["status"]), str(event["error"]))
    return None if "end" in event else types.SampleDelta(**event)


def _check_end(ended: bool) -> None:
    if not ended:
        raise ConnectionFailed("the stream ended before its sequences; start it again")


def _check_adapter(name: str) -> None:
    if name:
        raise ArgumentError(
            f"adapter_name={name!r}: save the adapter with is_sampler=True, and pass its path as adapter_uri="
        )


def _options_of(params: Any) -> dict[str, Any]:
    """Return the sampling parameters that are given; the service refuses those that it does not know."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        values = dict(params)
        if "max_new_tokens" in values:
            alias = values.pop("max_new_tokens")
            if values.setdefault("max_tokens", alias) != alias:
                raise ArgumentError("sampling_params: max_tokens and max_new_tokens are given and differ; give one")
    elif is_dataclass(params):
        given = {entry.name: getattr(params, entry.name) for entry in fields(params)}
        values = {entry.name: given[entry.name] for entry in fields(params) if given[entry.name] != entry.default}
    else:
        raise ArgumentError(f"sampling_params must be SamplingParams or a mapping, got a {type(params).__name__}")
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = {str(token): value for token, value in bias.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
