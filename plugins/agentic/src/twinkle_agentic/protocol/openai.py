"""Any server that speaks OpenAI's chat completions, over httpx."""

import json
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from twinkle.data_format import Message, SamplingParams, Trajectory
from twinkle.errors import ArgumentError, RequirementMissing, Unsupported
from twinkle_agentic.protocol.base import API, APIError
from twinkle_agentic.tools.calling import shortened
from twinkle_registry import nearest

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_REFUSED = (401, 403, 404)
_LONGEST_PAUSE = 20.0
_OPTIONS: dict[str, Any] = {"timeout": 120.0, "max_retries": 3, "default_headers": {}, "verify": True}
_WIRE = ("role", "content", "tool_calls", "tool_call_id")
_random = random.SystemRandom()  # the generators of the training are not ours to turn


class OpenAI(API):
    """A model behind `POST {base_url}/chat/completions`.

    What is busy or away (408, 409, 425, 429, 5xx, no connection) is asked again, at most `max_retries` times with
    growing pauses, as long as the service says but never more than 20 seconds each. The key stands in one header and
    nowhere else: not in `repr`, errors or traces.
    """

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Say which model it is; nothing is sent yet.

        Args:
            model: its name on the server.
            api_key: None is the environment's `OPENAI_API_KEY`, and without that no key is sent.
            base_url: up to `/v1`; None is the environment's `OPENAI_BASE_URL`, else OpenAI's own.
            client_kwargs: `timeout` of one request (120 seconds), `max_retries` (3), `default_headers`, and `verify`
                (of TLS: True, or the path of a file of certificates).

        Raises:
            ArgumentError: `base_url` is no address, or `client_kwargs` has another key or a `max_retries` that is none.
        """
        url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError("OpenAI: base_url must begin with https:// (or http://) and name a host")
        options = dict(client_kwargs or {})
        for name in options:
            if name not in _OPTIONS:
                hint = "".join(f", nearest: {near!r}" for near in nearest(name, _OPTIONS, 1))
                raise ArgumentError(f"OpenAI: client_kwargs has no {name!r}{hint}; it takes: {', '.join(_OPTIONS)}")
        retries = options.get("max_retries", 0)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ArgumentError(f"OpenAI: max_retries is {retries!r}; it is a whole number from 0")
        self.model, self.host = model, parts.hostname
        self._url, self._options = f"{url.rstrip('/')}/chat/completions", {**_OPTIONS, **options}
        self._key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", "")
        self._client: Any = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_client", "_lock")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _client=None, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"OpenAI(model={self.model!r}, host={self.host!r})"

    def __call__(
        self,
        trajectory: Trajectory,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        extra_body: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Message | list[Message]:
        """Return the next turn, or a list of turns for `num_samples` above 1, each with `finish_reason`.

        Args:
            trajectory: the conversation, and `tools`.
            sampling_params: `temperature`, `top_p`, `max_tokens`, `seed`, `stop` and `num_samples`; `top_k`,
                `repetition_penalty` and stop tokens are sent, where they are set, as vLLM reads them.
            extra_body: further fields of the request; they win.
            **kwargs: further fields too.

        Raises:
            APIError: no answer after all attempts, a refusal, or an answer that is none.
            Unsupported: log-probabilities are requested.
        """
        params = _read(sampling_params)
        body = {"model": self.model, "messages": [_sent(message) for message in trajectory["messages"]]}
        if trajectory.get("tools"):
            body["tools"] = list(trajectory["tools"])
        answer = self._posted({**body, **_drawn(params), **kwargs, **(extra_body or {})})
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not all(_is_choice(choice) for choice in choices):
            raise APIError(f"{self.host} answered without choices; is {self.model!r} a chat model there?")
        messages = [_received(choice) for choice in choices]
        return messages[0] if params.num_samples == 1 else messages

    def close(self) -> None:
        """Close the connections; a later call opens others."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connections(self) -> Any:
        try:
            import httpx
        except ImportError as error:
            raise RequirementMissing("OpenAI needs httpx: pip install 'twinkle-agentic[api]'") from error
        with self._lock:
            if self._client is None:
                key = {"Authorization": f"Bearer {self._key}"} if self._key else {}
                headers = {**key, **self._options["default_headers"]}
                options = {"timeout": self._options["timeout"], "verify": self._options["verify"]}
                self._client = httpx.Client(headers=headers, **options)
            return self._client

    def _posted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request until it is answered, or may not be sent again."""
        import httpx

        client, attempts = self._connections(), self._options["max_retries"] + 1
        sent = json.dumps(body, allow_nan=False).encode()  # in ASCII: what a model writes may be no Unicode
        for attempt in range(1, attempts + 1):
            pause = min(_LONGEST_PAUSE, 0.5 * 2.0 ** (attempt - 1)) * (0.5 + 0.5 * _random.random())
            try:
                response = client.post(self._url, content=sent, headers={"Content-Type": "application/json"})
            except httpx.HTTPError as error:
                why, refused, again = type(error).__name__, False, True
            else:
                if response.status_code == 200:
                    return self._parsed(response)
                why, refused = self._shown(response), response.status_code in _REFUSED
                again, pause = response.status_code in _AGAIN, _asked_pause(response, pause)
            if not again or attempt == attempts:
                break
            time.sleep(pause)
        tries = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        raise APIError(f"{self.host}, model {self.model!r}, gave no answer after {tries}: {why}", refused)

    def _parsed(self, response: Any) -> dict[str, Any]:
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise APIError(f"{self.host} answered with something that is not a JSON object: {self._shown(response)}")
        return answer

    def _shown(self, response: Any) -> str:
        """Return status and text of an answer, short, and without the key if it quotes it."""
        text = response.text
        for secret in (self._key, *map(str, self._options["default_headers"].values())):
            text = text.replace(secret, "***") if len(secret) > 3 else text
        return f"{response.status_code} {shortened(' '.join(text.split()), 300)}"


def _read(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if params.logprobs or params.prompt_logprobs or params.topk_logprobs:
        raise Unsupported("OpenAI gives messages and no log-probabilities; leave logprobs out, or use a sampler")
    return params


def _drawn(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request that say how to draw; what is not set is left to the server."""
    fields = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "stop": params.stop_strings() or None,
        "stop_token_ids": params.stop_token_ids() or None,
        "top_k": None if params.top_k == -1 else params.top_k,
        "repetition_penalty": None if params.repetition_penalty == 1 else params.repetition_penalty,
        "n": None if params.num_samples == 1 else params.num_samples,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form of the protocol: arguments of calls as text, without keys of Twinkle."""
    sent = {name: message[name] for name in _WIRE if message.get(name) is not None}
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [_sent_call(number, call) for number, call in enumerate(calls)]
    return sent


def _sent_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": function}


def _is_choice(choice: Any) -> bool:
    return isinstance(choice, dict) and isinstance(choice.get("message"), dict)


def _received(choice: Mapping[str, Any]) -> Message:
    given = choice["message"]
    message: dict[str, Any] = {"role": "assistant", "content": given.get("content") or ""}
    for name in ("tool_calls", "reasoning_content"):
        if given.get(name):
            message[name] = given[name]
    if choice.get("finish_reason"):
        message["finish_reason"] = choice["finish_reason"]
    return message  # type: ignore[return-value]


def _asked_pause(response: Any, pause: float) -> float:
    """Return the seconds to wait: as long as the service asks, within reason."""
    try:
        asked = float(response.headers.get("retry-after", ""))
    except ValueError:
        return pause
    return min(max(asked, 0.0), _LONGEST_PAUSE) if asked == asked else pause
