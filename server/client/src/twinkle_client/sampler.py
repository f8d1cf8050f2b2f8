"""Samplers on a service: the base model, or an adapter that was saved for sampling."""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle.errors import ArgumentError, Unsupported
from twinkle_client.calls import Call, twins
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.errors import ConnectionFailed, error_of
from twinkle_client.http import value_of
from twinkle_client.model import _bare
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
        client: by default that of the last `init_twinkle_client`.
        **kwargs: none; options of the sampler are those of the service.
    """

    def __init__(self, model_id: str | None = None, *, client: TwinkleClient | None = None, **kwargs: Any) -> None:
        if kwargs:
            raise ArgumentError(
                f"{type(self).__name__}: {sorted(kwargs)[0]!r} is an option of the service that holds the model; leave "
                "it out"
            )
        self.model_id = model_id
        self.client = client or current_client()
        self._lock = threading.Lock()
        self._samplers: dict[str | None, str] = {}
        self._numbers: dict[str, int] = {}
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
        if not isinstance(template_cls, str):
            raise ArgumentError(f"set_template: give the name of a component, got a {type(template_cls).__name__}")
        self._template = template_cls, kwargs

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
    ) -> Call[list["types.SampleResponseModel"]]:
        """Return one response for each input, in order, with `num_samples` sequences each.

        `new_input_feature` of a sequence has all columns of its input, such as `user_data`, and the sampled turn at the
        end of `messages`. The log shows the progress of calls that take more than some seconds.

        Args:
            inputs: conversations (`messages`, ...), encoded with a generation prompt, or rows with `input_ids`.
            sampling_params: `twinkle.data_format.SamplingParams`, or a mapping of its fields.
            adapter_name: "": an adapter is given by `adapter_uri`.
            adapter_uri: path of a checkpoint that was saved with `is_sampler=True`; None is the base model.
            num_samples: overrides that of `sampling_params`.

        Raises:
            ArgumentError: an argument has no effect on a service.
            RequestRefused: an input or a parameter is invalid.
            OperationFailed: the service could not sample.
        """
        from twinkle_client import types

        _check_adapter(adapter_name)
        prompts = rows_of(inputs)
        sampler, body = yield from self._stream_body(prompts, sampling_params, adapter_uri, num_samples)
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
        self, inputs: Any, sampling_params: Any = None, adapter_uri: Any = None, num_samples: int | None = None
    ) -> Iterator["types.SampleDelta"]:
        """Yield tokens while they are sampled; closing the iterator, or leaving its loop, cancels the rest.

        The arguments are those of `sample`, and with a seed, so are the tokens. A stream is not repeated: if it breaks,
        `ConnectionFailed` is raised.

        Raises:
            ArgumentError: an argument has no effect on a service.
            RequestRefused: an input or a parameter is invalid.
            OperationFailed: the service could not sample.
        """
        sampler, body = self.run(self._stream_body(inputs, sampling_params, adapter_uri, num_samples))
        ended = False
        with contextlib.closing(self.client.connection.events(f"/samplers/{sampler}/stream", body)) as events:  # type: ignore[type-var]
            for event in events:
                if (delta := _delta_of(event)) is None:
                    ended = True
                    break
                yield delta
        _check_end(ended)

    async def sample_stream_async(
        self, inputs: Any, sampling_params: Any = None, adapter_uri: Any = None, num_samples: int | None = None
    ) -> AsyncIterator["types.SampleDelta"]:
        """As `sample_stream`, as an asynchronous generator; `aclose()` cancels the rest."""
        sampler, body = await self.run_async(self._stream_body(inputs, sampling_params, adapter_uri, num_samples))
        ended = False
        events: Any = self.client.connection.events_async(f"/samplers/{sampler}/stream", body)
        async with contextlib.aclosing(events):
            async for event in events:
                if (delta := _delta_of(event)) is None:
                    ended = True
                    break
                yield delta
        _check_end(ended)

    def _stream_body(
        self, inputs: Any, sampling_params: Any, adapter_uri: Any, num_samples: int | None
    ) -> Call[tuple[str, dict[str, Any]]]:
        """Return the sampling session and the body of a request without its number."""
        options = _options_of(sampling_params)
        if num_samples is not None:
            options["num_samples"] = num_samples
        rows = [sendable_prompt(row) for row in rows_of(inputs)]
        sampler = yield from self._sampler(None if adapter_uri is None else str(adapter_uri))
        body: dict[str, Any] = {"inputs": rows, "options": options}
        if self._template is not None:
            body["template"], body["template_options"] = self._template
        return sampler, body

    def _sampler(self, uri: str | None) -> Call[str]:
        """Return the sampling session of a checkpoint, which is created at its first use."""
        with self._lock:
            known = self._samplers.get(uri)
        if known is not None:
            return known
        client = self.client
        body = {
            "session_id": client.session_id,
            "sampler_seq_id": client.next_number("sampler"),
            "base_model": _bare(self.model_id),
            "adapter_uri": uri,
        }
        created: str = (yield from client.connection.request("POST", "/samplers", body))["sampler_id"]
        with self._lock:
            return self._samplers.setdefault(uri, created)

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
        return dict(params)
    if not is_dataclass(params):
        raise ArgumentError(f"sampling_params must be SamplingParams or a mapping, got a {type(params).__name__}")
    values = {entry.name: getattr(params, entry.name) for entry in fields(params)}
    changed = {entry.name for entry in fields(params) if values[entry.name] != entry.default}
    return {name: list(v) if isinstance(v := values[name], tuple) else v for name in changed}
