"""Sends the requests of a load test when they are due, and notes what happens to each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from tokenweir import AsyncClient, StreamOptions, TokenweirClientError
from tokenweir.v1 import common_pb2

from loadtest.errors import LoadTestError
from loadtest.metrics import OwnLoad, RequestRecord, distribution
from loadtest.workload import LoadConfig, arrival_times

Progress = Callable[[int, int], None]  # requests finished, requests in all
Item = str | bytes

_WATCH_PERIOD = 0.05  # seconds between looks at the event loop's own delay


class Sender:
    """Sends the requests; times count from the start of `send_all`."""

    def __init__(
        self,
        client: AsyncClient,
        config: LoadConfig,
        method: str,
        items: list[Item],
        progress: Progress,
    ) -> None:
        self._client = client
        self._config = config
        self._method = method
        self._items = items
        self._progress = progress
        self._start = 0.0
        self._records: list[RequestRecord] = []
        self._loop_delays: list[float] = []
        self._processor_seconds = 0.0

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """What is finished, by index."""
        return tuple(sorted(self._records, key=lambda record: record.index))

    @property
    def own_load(self) -> OwnLoad:
        """How busy this event loop has been in `send_all`."""
        share = self._processor_seconds / max(self._now(), 1e-9)
        return OwnLoad(share, distribution(self._loop_delays))

    async def warm_up(self) -> None:
        """Send one request that is not measured: it opens connections and shows wrong options."""
        try:
            await self._send(0, scheduled=self._now())
        except (TypeError, ValueError) as error:
            raise LoadTestError(f"a request cannot be made: {error}") from error

    async def send_all(self) -> None:
        """Send the requests and note what comes back, and how busy that keeps the event loop."""
        self._start = asyncio.get_running_loop().time()
        self._records.clear()
        self._progress(0, self._config.num_requests)
        processor_start = time.thread_time()
        watch = asyncio.create_task(self._watch_delay())
        try:
            if self._config.concurrency is None:
                await self._open_loop()
            else:
                await self._closed_loop(self._config.concurrency)
        finally:
            watch.cancel()
            self._processor_seconds = time.thread_time() - processor_start

    async def _watch_delay(self) -> None:
        while True:
            due = self._now() + _WATCH_PERIOD
            await asyncio.sleep(_WATCH_PERIOD)
            self._loop_delays.append(self._now() - due)

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index, scheduled in enumerate(arrival_times(self._config)):
                await asyncio.sleep(scheduled - self._now())
                group.create_task(self._measure(index, scheduled))

    async def _closed_loop(self, concurrency: int) -> None:
        indices = iter(range(self._config.num_requests))

        async def user() -> None:
            for index in indices:
                await self._measure(index, scheduled=self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, self._config.num_requests)):
                group.create_task(user())

    async def _measure(self, index: int, scheduled: float) -> None:
        self._records.append(await self._send(index, scheduled))
        self._progress(len(self._records), self._config.num_requests)

    async def _send(self, index: int, scheduled: float) -> RequestRecord:
        prompt = index % len(self._items)
        record = RequestRecord(
            index, prompt, scheduled, sent=self._now(), finished=scheduled, status="OK"
        )
        try:
            if self._method == "generate":
                return await self._generate(record, cast(str, self._items[prompt]))
            return await self._predict(record, self._items[prompt])
        except TokenweirClientError as error:
            return replace(
                record,
                finished=self._now(),
                status=error.code.name,
                reason=error.reason,
                message=str(error.args[0]),
            )

    async def _generate(self, record: RequestRecord, prompt: str) -> RequestRecord:
        token_times: list[float] = []
        first_tokens = 0
        finish_reason = ""
        summary = None
        options = cast(StreamOptions, self._config.options)
        async for message in self._client.stream_events(self._config.model, prompt, **options):
            if message.HasField("delta"):
                if not token_times:
                    first_tokens = max(1, len(message.delta.tokens.ids))
                token_times.append(self._now())
            elif message.HasField("finished"):
                finish_reason = _finish_reason(message.finished.finish_reason)
            else:
                summary = message.summary
        if summary is None:
            return replace(
                record,
                finished=self._now(),
                status="DATA_LOSS",
                reason="BROKEN_STREAM",
                message="the stream ended without its summary",
            )
        return replace(
            record,
            finished=self._now(),
            token_times=tuple(token_times),
            first_tokens=first_tokens,
            input_tokens=summary.usage.input_tokens,
            cached_input_tokens=summary.usage.cached_input_tokens,
            output_tokens=summary.usage.output_tokens,
            finish_reason=finish_reason,
            server_queue=summary.timing.queue.ToTimedelta().total_seconds(),
            server_first_token=summary.timing.time_to_first_token.ToTimedelta().total_seconds(),
            server_batch_size=summary.timing.mean_batch_size,
        )

    async def _predict(self, record: RequestRecord, item: Item) -> RequestRecord:
        model = self._config.model
        match self._method:
            case "classify":
                usage = (await self._client.classify(model, item)).usage
            case "label":
                usage = (await self._client.label(model, cast(str, item))).usage
            case _:
                usage = (await self._client.embed(model, item)).usage
        return replace(record, finished=self._now(), input_tokens=usage.input_tokens)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start


def _finish_reason(value: int) -> str:
    known = common_pb2.FinishReason.DESCRIPTOR.values_by_number.get(value)
    return known.name.removeprefix("FINISH_REASON_").lower() if known else str(value)
