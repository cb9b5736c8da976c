"""Gathers the events of a generation into as few messages as its reader can take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from engine.requests.events import (
    Admitted,
    GenerationEvent,
    PositionLogprobs,
    SequenceFinished,
    TextDelta,
)


@dataclass
class _Pending:
    """Text and tokens of one sequence that were not sent yet."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)

    def merged(self, index: int) -> TextDelta:
        return TextDelta(index, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs))


class DeltaBuffer:
    """Merges deltas of a sequence until they are taken.

    Bounded by the output itself: a slow reader gets longer deltas, not more of them.
    """

    def __init__(self, tokens_per_message: int) -> None:
        self._tokens_per_message = tokens_per_message
        self._pending: dict[int, _Pending] = {}  # by index of the sequence
        self._others: list[GenerationEvent] = []
        self._full = False  # some sequence has enough for a message

    def add(self, event: GenerationEvent) -> bool:
        """Take an event; return whether there is something to send."""
        if isinstance(event, TextDelta):
            pending = self._pending.setdefault(event.index, _Pending())
            pending.add(event)
            self._full |= len(pending.token_ids) >= self._tokens_per_message
        else:
            self._others.append(event)
        return self._full or bool(self._others)

    def take(self) -> list[GenerationEvent]:
        """Return what is to be sent now, and forget it."""
        ended = {event.index for event in self._others if isinstance(event, SequenceFinished)}
        return self._take(
            index
            for index, pending in self._pending.items()
            if index in ended or len(pending.token_ids) >= self._tokens_per_message
        )

    def take_all(self) -> list[GenerationEvent]:
        """Return what was not sent yet, after the last event."""
        return self._take(self._pending)

    def _take(self, indices: Iterable[int]) -> list[GenerationEvent]:
        events: list[GenerationEvent] = [e for e in self._others if isinstance(e, Admitted)]
        events += [self._pending.pop(index).merged(index) for index in tuple(indices)]
        events += [event for event in self._others if not isinstance(event, Admitted)]
        self._others, self._full = [], False
        return events


async def gathered(
    events: AsyncIterator[GenerationEvent], tokens_per_message: int
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events, with deltas merged to `tokens_per_message` tokens or more.

    What the engine does while the caller writes is merged as well. Closing this closes `events`.
    """
    buffer = DeltaBuffer(tokens_per_message)
    wake = asyncio.Event()

    async def read() -> None:
        # The engine's iterator is a generator: closing it is what aborts the request.
        generator = cast(AsyncGenerator[GenerationEvent, None], events)
        async with aclosing(generator):
            async for event in generator:
                if buffer.add(event):
                    wake.set()

    reader = asyncio.create_task(read())
    reader.add_done_callback(lambda _: wake.set())
    try:
        while not reader.done():
            await wake.wait()
            wake.clear()
            for event in buffer.take():
                yield event
        for event in buffer.take_all():
            yield event
        await reader  # raises what the engine raised
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
