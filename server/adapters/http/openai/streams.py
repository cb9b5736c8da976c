"""The answers of our server as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress

from starlette.responses import Response, StreamingResponse
from starlette.types import Message as AsgiMessage
from starlette.types import Send
from tokenweir import BrokenStream, TokenweirClientError, Usage
from tokenweir.received import enum_name
from tokenweir.v1 import common_pb2, generation_service_pb2

from server.adapters.http.calls import REQUEST_ID
from server.adapters.http.errors import AsSent, HttpError, http_error
from server.adapters.http.openai.answers import (
    Form,
    envelope,
    finish_reason,
    num_chars,
    usage_json,
)
from server.adapters.http.openai.generation import GenerationRequest
from server.adapters.http.requests import Json

_MOST_READ_AHEAD = 16  # messages
_REASONING = generation_service_pb2.Reasoning.DESCRIPTOR
Message = generation_service_pb2.GenerateStreamResponse
Output = generation_service_pb2.Sequence
Start = Callable[[int, asyncio.Event], AsyncGenerator[Message]]  # prompt's index; set once admitted


class Streams:
    """The streams of a request, one for each of its prompts, whose messages are read as they come.

    They run from `begin` to `end`.
    """

    def __init__(self, num_prompts: int, start: Start) -> None:
        self._admitted = [asyncio.Event() for _ in range(num_prompts)]
        self._messages: asyncio.Queue[tuple[int, Message | None]] = asyncio.Queue(_MOST_READ_AHEAD)
        self._streams = [start(place, event) for place, event in enumerate(self._admitted)]
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: tuple[int, Exception] | None = None  # index of the prompt

    def begin(self) -> None:
        """Ask for all of them."""
        self._tasks = [asyncio.create_task(self._read(at)) for at in range(len(self._streams))]

    async def end(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()

    async def wait_until_admitted(self, seconds: float) -> None:
        """Return when the server has begun with all of them, one has failed, or so much later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for event in self._admitted:
                    await event.wait()

    async def messages(self) -> AsyncGenerator[list[tuple[int, Message]]]:
        """Yield all that has come, each with the place of its prompt; raise the first failure."""
        num_open = len(self._streams)
        while num_open:
            came = [await self._messages.get()]
            while not self._messages.empty():
                came.append(self._messages.get_nowait())
            yield [(place, message) for place, message in came if message is not None]
            num_ended = sum(message is None for _, message in came)
            if num_ended and self.failure is not None:
                raise self.failure[1]
            num_open -= num_ended

    async def _read(self, place: int) -> None:
        try:
            async for message in self._streams[place]:
                self._admitted[place].set()
                await self._messages.put((place, message))
        except Exception as error:  # noqa: BLE001  # the reader of the messages gets it
            self.failure = self.failure or (place, error)
            for event in self._admitted:  # nobody has to wait for the others
                event.set()
        self._admitted[place].set()
        await self._messages.put((place, None))


class EventStream(StreamingResponse):
    """Streams that end as soon as their reader is gone.

    A comment is sent whenever nothing else was for `ping_seconds`: readers and proxies do not
    wait in silence.
    """

    def __init__(
        self,
        streams: Streams,
        events: AsyncGenerator[bytes],
        request_id: str,
        ping_seconds: float,
    ) -> None:
        super().__init__(
            events,
            headers=_headers(request_id),
            media_type=_TYPE,
        )
        self._streams, self._ping_seconds = streams, ping_seconds

    async def stream_response(self, send: Send) -> None:
        """Send the events, and end the streams."""
        pinged = _Pinged(send, self._ping_seconds)
        pinging = asyncio.create_task(pinged.ping())
        try:
            await super().stream_response(pinged)
        finally:
            pinging.cancel()
            await self._streams.end()


class WholeStream(Response):
    """The events of an answer that comes in one piece, of an object that answers and chunks share.

    A choice is an event of its own.
    """

    def __init__(self, answer: Json, usage: Json | None) -> None:
        chunks = [answer | {"choices": [choice]} for choice in answer["choices"]]
        if usage is not None:
            chunks.append(answer | {"choices": [], "usage": usage})
        content = b"".join([*map(event, chunks), _DONE])
        super().__init__(content, headers=_headers(answer["id"]), media_type=_TYPE)


class _Pinged:
    """Sends what it is given, and says something where that is nothing for a while."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self._is_open = False

    async def __call__(self, message: AsgiMessage) -> None:
        self._last = self._clock()
        self._is_open = message.get("more_body", True)
        await self._send(message)

    async def ping(self) -> None:
        while self._is_open:
            if (left := self._last + self._seconds - self._clock()) > 0:
                await asyncio.sleep(left)
            else:
                await self({"type": "http.response.body", "body": _PING, "more_body": True})


_PING, _DONE = b": ping\n\n", b"data: [DONE]\n\n"
_TYPE = "text/event-stream"
_encoded = json.JSONEncoder(separators=(",", ":")).encode


class Chunks:
    """Makes OpenAI's chunks of the messages of one stream."""

    def __init__(self, form: Form, request_id: str, asked: GenerationRequest, place: int) -> None:
        """`place` is that of its prompt among those of the request."""
        self._form, self._id, self._asked = form, request_id, asked
        self._first_index = place * (asked.n or 1)  # outputs of prompts before it
        self._num_messages = 0
        self._has_more = bool(asked.return_token_ids) or asked.has_running_usage
        self._prompt = Message.Prompt()  # comes with the first message
        self._num_tokens = 0
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # that are in no chunk yet
        self._offsets: Counter[int] = Counter()  # the next token's in the text, by output
        self._begun: set[int] = set()
        self._usage: common_pb2.Usage | None = None  # once all has come

    def of(self, message: Message) -> Iterator[Json]:
        """Yield the chunks of the next message; BrokenStream if one was lost."""
        self._num_messages += 1
        if message.sequence_number != self._num_messages:
            raise BrokenStream(
                f"message {message.sequence_number} came where {self._num_messages} was due"
            )
        if self._num_messages == 1:
            self._prompt = message.prompt
        match message.WhichOneof("event"):
            case "delta":
                yield from self._more(message.delta.index, message.delta)
            case "finished":
                yield from self._end(message.finished)
            case "summary":
                self._usage = message.summary.usage

    def usage_at_end(self) -> common_pb2.Usage:
        """Return what it took; BrokenStream unless all has come."""
        if self._usage is None:
            raise BrokenStream(f"the stream ended after {self._num_messages} messages")
        return self._usage

    def of_usage(self, usages: Sequence[common_pb2.Usage]) -> Json:
        """Return the chunk of what all streams of the request took."""
        whole = Usage(
            input_tokens=sum(one.input_tokens for one in usages),
            output_tokens=sum(one.output_tokens for one in usages),
            cached_input_tokens=sum(one.cached_input_tokens for one in usages),
            reasoning_tokens=sum(one.reasoning_tokens for one in usages),
        )
        return envelope(self._id, self._form.chunk_object, self._asked.model, []) | {
            "usage": usage_json(whole)
        }

    def _more(self, index: int, new: Message.Delta | Output) -> Iterator[Json]:
        place = self._first_index + index
        if index not in self._begun:
            self._begun.add(index)
            reasoning = enum_name(
                generation_service_pb2.Reasoning.DESCRIPTOR, self._prompt.reasoning
            )
            if (first := self._form.first(place, reasoning)) is not None:
                yield self._chunk(first)
        if self._has_more:
            self._num_tokens += len(new.tokens.ids)
            self._ids[place] += new.tokens.ids
        text, logprobs = new.text, new.logprobs
        if text or logprobs:
            pieces = self._form.piece(place, text, logprobs, self._offsets[index])
            yield from map(self._chunk, pieces)
        # Text may come later than its tokens, so they are counted.
        self._offsets[index] += sum(num_chars(one.chosen.piece) for one in logprobs)

    def _end(self, finished: Message.Finished) -> Iterator[Json]:
        sequence = finished.sequence  # all of it, where nothing was streamed
        yield from self._more(finished.index, sequence)
        value = sequence.finish_reason or finished.finish_reason
        place = self._first_index + finished.index
        name = enum_name(common_pb2.FinishReason.DESCRIPTOR, value)
        yield from map(self._chunk, self._form.last(place, finish_reason(name)))

    def _chunk(self, choice: Json) -> Json:
        chunk = envelope(self._id, self._form.chunk_object, self._asked.model, [choice])
        return self._with_more(chunk, choice) if self._has_more else chunk

    def _with_more(self, chunk: Json, choice: Json) -> Json:
        """Return a chunk with the ids of tokens and the usage so far, if they are asked for."""
        ids = self._ids.pop(choice["index"], [])
        if self._asked.return_token_ids:
            choice["token_ids"] = ids
        if self._prompt.HasField("tokens"):
            first = choice if self._form.has_prompts_in_choices else chunk
            first["prompt_token_ids"] = list(self._prompt.tokens.ids)
            self._prompt.ClearField("tokens")
        if self._asked.has_running_usage:
            chunk["usage"] = usage_json(Usage(self._prompt.input_tokens, self._num_tokens))
            del chunk["usage"]["completion_tokens_details"]  # known at the end
        return chunk


class Writer:
    """Writes answers as they are, and their chunks as events, up to `[DONE]` or an error."""

    def whole(self, body: Json) -> Json:
        """Return an answer."""
        return body

    def begin(self) -> bytes:
        """Return the events before the first chunk."""
        return b""

    def more(self, chunk: Json) -> bytes:
        """Return the events of a chunk."""
        return event(chunk)

    def end(self) -> bytes:
        """Return the events after the last one."""
        return _DONE

    def failed(self, error: HttpError) -> bytes:
        """Return the events of an error, which ends the stream."""
        return event(dict(error.body))


async def events(
    streams: Streams,
    chunks: Sequence[Chunks],
    writer: Writer,
    as_sent: Callable[[int], AsSent],
    *,
    has_usage: bool,
) -> AsyncGenerator[bytes]:
    """Yield the events of streams that have begun; `as_sent` is by the place of a prompt."""
    try:
        if begun := writer.begin():
            yield begun
        async for came in streams.messages():
            found = [one for place, message in came for one in chunks[place].of(message)]
            if found:
                yield b"".join(map(writer.more, found))
        usages = [one.usage_at_end() for one in chunks]
        last = writer.more(chunks[0].of_usage(usages)) if has_usage else b""
        yield last + writer.end()
    except TokenweirClientError as error:
        place = streams.failure[0] if streams.failure is not None else 0
        yield writer.failed(http_error(error, as_sent(place)))


def _headers(request_id: str) -> dict[str, str]:
    return {"Cache-Control": "no-store", "X-Accel-Buffering": "no", REQUEST_ID: request_id}


def event(data: Json) -> bytes:
    """Return an event, which has the name of its type if there is one."""
    name = b"event: " + data["type"].encode() + b"\n" if "type" in data else b""
    return name + b"data: " + _encoded(data).encode() + b"\n\n"
