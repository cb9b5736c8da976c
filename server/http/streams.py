"""The answers of our server as server-sent events."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Send
from tokenweir import BrokenStream, TokenweirClientError
from tokenweir.v1 import common_pb2, generation_service_pb2

from server.http.answers import Form, Json, Positions, envelope, finish_reason, usage_json
from server.http.errors import AsSent, http_error

Message = generation_service_pb2.GenerateStreamResponse


class EventStream(StreamingResponse):
    """A stream that ends its call of the server as soon as its reader is gone."""

    def __init__(
        self,
        first: Message,
        messages: AsyncGenerator[Message],
        chunks: Chunks,
        request_id: str,
        as_sent: AsSent,
    ) -> None:
        super().__init__(
            _events(first, messages, chunks, as_sent),
            headers={
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                "x-request-id": request_id,
            },
            media_type="text/event-stream",
        )
        self._messages = messages

    async def stream_response(self, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._messages):
            await super().stream_response(send)


class Chunks:
    """Makes OpenAI's chunks of the messages of one stream."""

    def __init__(self, form: Form, request_id: str, model: str, *, has_usage: bool) -> None:
        self._form, self._id, self._model = form, request_id, model
        self._has_usage = has_usage
        self._num_messages = 0
        self._sent: Counter[int] = Counter()  # characters, by output
        self._begun: set[int] = set()
        self._is_whole = False

    def of(self, message: Message) -> Iterator[Json]:
        """Yield the chunks of the next message; BrokenStream if one was lost."""
        self._num_messages += 1
        if message.sequence_number != self._num_messages:
            raise BrokenStream(
                f"message {message.sequence_number} came where {self._num_messages} was due"
            )
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                yield from self._more(delta.index, delta.text, delta.logprobs)
            case "finished":
                yield from self._end(message.finished)
            case "summary":
                self._is_whole = True
                if self._has_usage:
                    usage = usage_json(message.summary.usage)
                    yield self._chunk() | {"usage": usage}

    def check_end(self) -> None:
        """Raise BrokenStream unless all has come."""
        if not self._is_whole:
            raise BrokenStream(f"the stream ended after {self._num_messages} messages")

    def _more(self, index: int, text: str, logprobs: Positions) -> Iterator[Json]:
        if index not in self._begun:
            self._begun.add(index)
            if (first := self._form.first(index)) is not None:
                yield self._chunk(first)
        if text or logprobs:
            yield self._chunk(self._form.piece(index, text, logprobs, self._sent[index]))
        self._sent[index] += len(text)

    def _end(self, finished: Message.Finished) -> Iterator[Json]:
        sequence = finished.sequence  # all of it, where nothing was streamed
        yield from self._more(finished.index, sequence.text, sequence.logprobs)
        value = sequence.finish_reason or finished.finish_reason
        yield self._chunk(self._form.last(finished.index, finish_reason(_name(value))))

    def _chunk(self, *choices: Json) -> Json:
        return envelope(self._id, self._form.chunk_object, self._model, choices)


async def _events(
    first: Message, messages: AsyncIterator[Message], chunks: Chunks, as_sent: AsSent
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream, of which the first message has come already.

    An error ends it with an event that says so, without `[DONE]`.
    """
    try:
        for chunk in chunks.of(first):
            yield _event(chunk)
        async for message in messages:
            if data := b"".join(map(_event, chunks.of(message))):
                yield data
        chunks.check_end()
        yield b"data: [DONE]\n\n"
    except TokenweirClientError as error:
        yield _event(dict(http_error(error, as_sent).body))


def _name(reason: int) -> str:
    """Return the name of a reason as our client does; the number of one that is newer."""
    known = common_pb2.FinishReason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("FINISH_REASON_").lower() if known else str(reason)


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
