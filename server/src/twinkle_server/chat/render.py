"""Text to tokens: the service's end of the render process, which starts at the first request that has text."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from twinkle_server.engine.messages import AsyncLink, LinkClosed, Message
from twinkle_server.environment import scrubbed
from twinkle_server.errors import BadRequest, ServiceError, Unavailable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)
_START, _ANSWER = 120.0, 30.0  # seconds
_RETRY = 2.0


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        parser: name of the component of kind `tool_parser` that reads them.
        json: whether a call is a JSON object `{"name", "arguments"}` between the parser's markers; only then can calls
            be forced.
        before: white space after the opening marker.
        after: white space before the closing marker.
        special: whether the markers are special tokens.
    """

    parser: str
    json: bool
    before: str
    after: str
    special: bool


@dataclass(frozen=True, slots=True)
class Text:
    """The model's tokenizer in this process, for decoding.

    Attributes:
        tokenizer: of the model.
        tools: how it writes tool calls; None if its chat template has none.
    """

    tokenizer: "Tokenizer"
    tools: ToolFormat | None


class RenderFailed(ServiceError):
    """The template of the model failed."""


class Renderer:
    """Renders conversations in a process of its own; one request at a time, in order.

    Args:
        model: folder of the model.
        template: name of a component of kind `template`.
    """

    def __init__(self, model: str, template: str) -> None:
        self._model, self._template = model, template
        self._process: asyncio.subprocess.Process | None = None
        self._link: AsyncLink | None = None
        self._waiting: deque[asyncio.Future[Message]] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._text: Text | None = None

    async def text(self) -> Text:
        """Return the tokenizer and the format of tool calls.

        Raises:
            BadRequest: the model has no tokenizer that can be used.
            Unavailable: the process cannot be started.
        """
        if self._text is None:
            about = await self._ask("about")
            from tokenizers import Tokenizer

            tokenizer = await asyncio.to_thread(Tokenizer.from_str, about["tokenizer"])
            self._text = Text(tokenizer, ToolFormat(**about["tools"]) if about["tools"] else None)
        return self._text

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, thinking: bool, continued: bool = False
    ) -> list[int]:
        """Return the tokens of a conversation with the header of an assistant turn.

        Args:
            messages: in OpenAI's form.
            tools: in OpenAI's form.
            thinking: option of the chat template.
            continued: the last message is the assistant's; end after its text, in its turn.

        Raises:
            BadRequest: the template refuses the conversation.
        """
        tokens: list[int] = await self._ask(
            "chat", messages=messages, tools=tools, thinking=thinking, continued=continued
        )
        return tokens

    async def texts(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts, with the special tokens that the tokenizer adds."""
        tokens: list[list[int]] = await self._ask("texts", texts=texts)
        return tokens

    async def check_grammar(self, structure: Mapping[str, Any]) -> None:
        """Check `SamplingParams.structured_outputs`.

        Raises:
            BadRequest: it is invalid or too complex.
        """
        await self._ask("grammar", structure=dict(structure))

    async def close(self) -> None:
        """End the process."""
        if self._link is not None:
            self._link.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._process = self._link = None

    async def _ask(self, kind: str, **arguments: Any) -> Any:
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        try:
            link = await self._connected()
            self._waiting.append(answered)
            link.put(Message(kind, {}, orjson.dumps(arguments)))
            async with asyncio.timeout(_ANSWER):
                answer = await asyncio.shield(answered)
        except TimeoutError as error:
            _log.error("rendering took longer than %g s; its process is ended", _ANSWER)
            await self.close()
            raise Unavailable("the chat template of this model takes too long", retry_after=_RETRY) from error
        except LinkClosed as error:
            raise Unavailable("the process that renders text has ended; repeat the request", _RETRY) from error
        if (problem := answer.head.get("error")) is None:
            return orjson.loads(answer.body)
        if answer.head["category"] == "user":
            raise BadRequest(problem)
        _log.error("rendering failed: %s", problem)
        raise RenderFailed("the chat template of this model failed; the log of the service says why")

    async def _connected(self) -> AsyncLink:
        async with self._starting:
            if self._link is None:
                await self._start()
            assert self._link is not None
            return self._link

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = scrubbed(os.environ) | {"TOKENIZERS_PARALLELISM": "false"}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "twinkle_server.chat.render_worker", str(theirs.fileno()), self._model, self._template),
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise Unavailable(f"cannot start the process that renders text: {error.strerror}", _RETRY) from error
        finally:
            theirs.close()
        link = await AsyncLink.open(ours)
        try:
            async with asyncio.timeout(_START):
                ready = await link.receive()
        except (LinkClosed, TimeoutError) as error:
            link.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise Unavailable("the process that renders text cannot be started; see the log", _RETRY) from error
        if problem := ready.head.get("error"):
            link.close()
            await process.wait()
            raise BadRequest(f"this model cannot be used with text: {problem}")
        self._process, self._link = process, link
        self._reading = asyncio.create_task(self._read(process, link), name="render")

    async def _read(self, process: asyncio.subprocess.Process, link: AsyncLink) -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                answer = await link.receive()
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(answer)
        waiting, self._waiting = self._waiting, deque()
        if self._link is link:
            self._link = None
        for future in waiting:
            if not future.done():
                future.set_exception(LinkClosed("the render process ended"))
        link.close()
        await process.wait()
