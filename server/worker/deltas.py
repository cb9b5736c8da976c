"""Gathers the events of a generation into as few messages as its reader can take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from itertools import chain
from typing import cast

from engine.requests.events import (
    Admitted,
    GenerationEvent,
    SequenceFinished,
    TextDelta,
)


class _Pending:
    """Text and tokens of one sequence that were not sent yet."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._deltas: list[TextDelta] = []

    def add(self, delta: TextDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self._deltas.append(delta)

    def merged(self) -> TextDelta:
        first, *others = deltas = self._deltas
        if not others:
            return first
        return TextDelta(
            first.index,
            "".join([delta.text for delta in deltas]),
            tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
            tuple(chain.from_iterable([delta.logprobs for delta in deltas])),
        )


class DeltaBuffer:
    """Merges deltas of a sequence until they are taken.

    Bounded by the output itself: a slow reader gets longer deltas, not more of them.
    """

    def __init__(self, tokens_per_message: int) -> None:
        self._tokens_per_message = tokens_per_message
        self._pending: dict[int, _Pending] = {}  # by index of the sequence
        self._others: list[GenerationEvent] = []
        self._full: dict[int, None] = {}  # the sequences that have enough for a message

    def add(self, event: GenerationEvent) -> bool:
        """Take an event; return whether there is something to send."""
        if isinstance(event, TextDelta):
            index = event.index
            if (pending := self._pending.get(index)) is None:
                pending = self._pending[index] = _Pending()
            pending.add(event)
            if pending.num_tokens >= self._tokens_per_message:
                self._full[index] = None
        else:
            self._others.append(event)
        return bool(self._full or self._others)

    def take(self) -> list[GenerationEvent]:
        """Return what is to be sent now, and forget it."""
        if not self._others:
            return self._merged(self._full)
        ended = [event.index for event in self._others if isinstance(event, SequenceFinished)]
        indices = {*ended, *self._full}
        return self._take([index for index in self._pending if index in indices])

    def take_all(self) -> list[GenerationEvent]:
        """Return what was not sent yet, after the last event."""
        return self._take(list(self._pending))

    def _take(self, indices: Iterable[int]) -> list[GenerationEvent]:
        events: list[GenerationEvent] = [e for e in self._others if isinstance(e, Admitted)]
        events += self._merged(indices)
        events += [event for event in self._others if not isinstance(event, Admitted)]
        self._others = []
        return events

    def _merged(self, indices: Iterable[int]) -> list[GenerationEvent]:
        merged: list[GenerationEvent] = [self._pending.pop(index).merged() for index in indices]
        self._full.clear()
        return merged


async def gathered(
    events: AsyncIterator[GenerationEvent], tokens_per_message: int, pause: float = 0.0
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events, with deltas merged to `tokens_per_message` tokens or more.

    What the engine does while the caller writes is merged as well, and what it does within `pause`
    seconds of the last delta; the end waits for nothing. Closing this closes `events`.
    """
    buffer = DeltaBuffer(tokens_per_message)
    wake, loop = asyncio.Event(), asyncio.get_running_loop()
    pause_ends = 0.0

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
            if (left := pause_ends - loop.time()) > 0:
                await asyncio.wait((reader,), timeout=left)
            wake.clear()
            for event in buffer.take():
                yield event
                if isinstance(event, TextDelta):
                    pause_ends = loop.time() + pause
        for event in buffer.take_all():
            yield event
        await reader  # raises what the engine raised
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
